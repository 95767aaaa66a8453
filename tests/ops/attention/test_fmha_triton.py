"""The Triton attention kernels against float64: bands, programs, terms of the score, ragged sizes, strides, both loads.

Outputs lie inside larger, poisoned tensors: an element left out and one written beside both fail.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs

pytestmark = pytest.mark.interp

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
POISON = -77.0


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    options: dict[str, Any]


def problem(s_q=70, s_k=90, d=16, d_v=None, heads=2, heads_kv=1, dtype=torch.bfloat16, **options):
    def made(rows, count, width):  # (B, H, S, D) as (B, S, H, D) lies in memory
        return torch.randn(2, rows, count, width).to(dtype).transpose(1, 2)

    d_v = d_v or d
    q, k = made(s_q, heads, d), made(s_k, heads_kv, d)
    return Problem(q, k, made(s_k, heads_kv, d_v), made(s_q, heads, d_v), options)


def allowed(p: Problem) -> Tensor:
    """bool (B, H, S_q, S_k)."""
    left, right, program = p.options.get("left", -1), p.options.get("right", -1), p.options.get("program", "")
    (batch, heads, s_q, _), s_k = p.q.shape, p.k.shape[2]
    positions, keys = torch.arange(s_q) + s_k - s_q, torch.arange(s_k)
    if program:
        from tilewright.mask import evaluate

        seen = evaluate(program, p.options["mask_data"], positions, keys, batch, heads)
    else:
        d = positions[:, None] - keys[None, :]
        seen = torch.ones(s_q, s_k, dtype=torch.bool)
        seen &= (d >= -right) if right >= 0 else seen
        seen &= (d <= left) if left >= 0 else seen
    return seen.expand(batch, heads, s_q, s_k)


def exact(p: Problem) -> dict[str, Tensor]:
    """Outputs and gradients in float64, straight from the formulas, by autograd; lse gets a gradient of its own."""
    q, k, v = (t.double().requires_grad_() for t in (p.q, p.k, p.v))
    group, (_, heads, s_q, d), s_k = p.q.shape[1] // p.k.shape[1], p.q.shape, p.k.shape[2]
    s = p.options.get("scale", d**-0.5) * q @ k.repeat_interleave(group, 1).mT
    if cap := p.options.get("softcap", 0.0):
        s = cap * torch.tanh(s / cap)
    if (slopes := p.options.get("slopes")) is not None:
        distance = (torch.arange(s_q)[:, None] + s_k - s_q - torch.arange(s_k)).abs()
        s = s - slopes.double()[:, None, None] * distance
    s = torch.where(allowed(p), s, -torch.inf)
    sinks = p.options.get("sinks")
    sinks = None if sinks is None else sinks.double().requires_grad_()
    column = torch.full((1, heads, 1, 1), -torch.inf, dtype=torch.float64) if sinks is None else sinks[:, None, None]
    lse = torch.logsumexp(torch.cat([s, column.expand(*s.shape[:3], 1)], -1), -1)
    weights = torch.where(lse.isinf()[..., None], 0.0, torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None]))
    o = weights @ v.repeat_interleave(group, 1)
    finite = torch.where(lse.isinf(), 0.0, lse)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    grads = torch.autograd.grad((o * p.do.double()).sum() + 0.3 * finite.sum(), inputs)
    return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))}


def poisoned(like: Tensor, **kind) -> tuple[Tensor, Tensor]:
    """(room for a result like `like`, (B, S, H, D) in memory, NaN; the poisoned tensor around it)."""
    batch, heads, s, d = like.shape
    around = torch.full((batch + 1, s + 2, heads, d + 8), POISON, dtype=like.dtype)
    out = around[:batch, :s, :, :d].transpose(1, 2)
    out.fill_(torch.nan)
    return out, around


def close(made: dict[str, Tensor], p: Problem, names: str) -> None:
    """Each element within a few roundings of its row's size: operands of the second products are rounded."""
    expected = exact(p)
    for name in names.split():
        value, wanted = made[name].double(), expected[name]
        if name == "lse":
            assert torch.equal(value.isinf(), wanted.isinf())
            value, wanted = value.nan_to_num(neginf=0.0), wanted.nan_to_num(neginf=0.0)
        assert not value.isnan().any(), name
        factor = 4 if name in ("o", "lse") else 8  # gradients read an o that is rounded
        bound = factor * ROUNDING[p.q.dtype] * (wanted.abs() + wanted.square().mean().sqrt())
        worst = ((value - wanted).abs() / bound).max().item()
        assert worst <= 1, f"{name}: {worst} times the bound"


def run_forward(p: Problem, config) -> dict[str, Tensor]:
    from tilewright.ops.attention.kernels.triton import forward as triton_forward

    o, around = poisoned(p.do)
    lse = torch.full(p.q.shape[:3], torch.nan)
    triton_forward.forward((o, lse), forward_args(p), config)
    made = {"o": o.clone(), "lse": lse}
    o.fill_(POISON)
    assert (around == POISON).all(), "written beside the output"
    return made


def run_backward(p: Problem, config) -> dict[str, Tensor]:
    from tilewright.ops.attention.kernels.triton import backward as triton_backward
    from tilewright.ops.attention.kernels.triton import delta as triton_delta

    forward = run_forward(p, FORWARD)
    rooms = [poisoned(t) for t in (p.q, p.k, p.v)]
    delta = torch.full(p.q.shape[:3], torch.nan)
    dlse = torch.where(forward["lse"].isinf(), 0.0, 0.3)
    triton_delta.delta(delta, p.do, forward["o"], dlse)
    grads = [room for room, _ in rooms]
    means = None if p.options.get("sinks") is None else torch.full(p.q.shape[:3], torch.nan)
    args = FmhaBackwardArgs(p.do, dlse, p.q, p.k, p.v, forward["o"], forward["lse"], *raw(p))
    triton_backward.backward(tuple(grads), args, delta, config, means=means)
    made = dict(zip(("dq", "dk", "dv"), (g.clone() for g in grads), strict=True))
    for room, around in rooms:
        room.fill_(POISON)
        assert (around == POISON).all(), "written beside a gradient"
    if p.options.get("sinks") is not None:
        made["dsinks"] = torch.full((p.q.shape[1],), torch.nan)
        triton_delta.sink_gradient(made["dsinks"], means, forward["lse"], p.options["sinks"], dlse)
    return made


def forward_args(p: Problem) -> FmhaArgs:
    return FmhaArgs(p.q, p.k, p.v, *raw(p))


def raw(p: Problem) -> tuple[Any, ...]:
    options = {
        "sinks": None, "slopes": None, "mask_data": None, "program": "", "left": -1, "right": -1,
        "scale": p.q.shape[3] ** -0.5, "softcap": 0.0, **p.options,
    }  # fmt: skip
    return tuple(options.values())


FORWARD = (32, 32, 4, 2, False)


@pytest.fixture(autouse=True)
def _configs(monkeypatch):
    from tilewright.ops.attention.kernels.triton.tiles import Config

    monkeypatch.setitem(globals(), "FORWARD", Config(*FORWARD))


def program(make):
    """A mask of keys 0 .. 89 as kernels take it."""
    from tilewright import mask

    text, data = make(mask).program(torch.device("cpu"))
    return {"program": text, "mask_data": data}


def documents(mask):
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor([20, 45, 25]))
    return mask.document(ids) & mask.causal()


PROGRAMS = {
    "documents": documents,
    "prefix": lambda mask: mask.causal() | mask.prefix(40),
    "by head": lambda mask: mask.block(torch.arange(18).view(1, 2, 3, 3) % 4 > 0, 32) & ~mask.window(0, 0),
}
CASES = {
    "full, ragged": {},
    "causal": {"right": 0},
    "causal, rows without keys": {"right": 0, "s_q": 90, "s_k": 40},
    "window": {"left": 20, "right": 5},
    "window to the left, narrow": {"left": 3, "right": 0, "s_q": 90},
    "window to the right": {"left": 0, "right": 33, "heads": 4, "heads_kv": 2},
    "one query": {"s_q": 1, "right": 0},
    "one query and one key, 96 = 64 + 32": {"s_q": 1, "s_k": 1, "d": 96, "sinks": torch.tensor([0.5, -1.0])},
    "80 = 64 + 16, and other values": {"d": 80, "d_v": 32, "s_q": 40, "s_k": 40},
    "24, no power of two": {"d": 24, "d_v": 48, "s_q": 40},
    "softcap and slopes": {"softcap": 2.0, "slopes": torch.tensor([0.5, 0.02]), "right": 0},
    "slopes without a mask": {"slopes": torch.tensor([0.1, 0.02])},
    "sinks": {"sinks": torch.tensor([1.5, -2.0]), "left": 9, "right": 0, "s_q": 90, "s_k": 60},
    "negative scale": {"scale": -0.3, "right": 0},
    "fp16": {"dtype": torch.float16, "right": 0},
    "fp32": {"dtype": torch.float32, "right": 0},
}


@pytest.mark.parametrize("fast", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("name", [*CASES, *PROGRAMS])
def test_forward(name, fast):
    p = named(name)
    close(run_forward(p, FORWARD._replace(descriptors=fast)), p, "o lse")


@pytest.mark.parametrize("fast", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("name", [*CASES, *PROGRAMS])
def test_backward(name, fast):
    from tilewright.ops.attention.kernels.triton.backward import Config

    p = named(name)
    made = run_backward(p, Config(16, 32, 4, 2, 32, 16, 4, 2, fast))
    close(made, p, " ".join(["dq", "dk", "dv", *(["dsinks"] if "dsinks" in made else [])]))


def named(name):
    return problem(**program(PROGRAMS[name])) if name in PROGRAMS else problem(**CASES[name])


def test_the_sinks_gradient_has_no_rounding_of_o():
    """It is a sum over all queries, which may cancel: (113, 203) with one key head, 96 wide, as FlashAttention's suite
    has it.
    """
    from tilewright.dispatch import implementations

    torch.manual_seed(0)
    p = problem(113, 203, 96, heads=3, dtype=torch.bfloat16, right=0, sinks=torch.randn(3))
    forward = run_forward(p, FORWARD)
    (op,) = [op for op in _contract().raw_ops if op.direction == "bwd"]
    dlse = torch.full(p.q.shape[:3], 0.3)
    args = (p.do, dlse, p.q, p.k, p.v, forward["o"], forward["lse"], *raw(p))
    outs = op.allocate(args, "cpu")
    triton = implementations(op.op, op.direction)["triton"]
    triton.launch(outs, *args, config=triton.configure(op.bucket_of(args, "default"), torch.bfloat16))
    terms = torch.exp(p.options["sinks"][:, None] - forward["lse"]).double().sum((0, 2))
    assert ((outs[3].double() - exact(p)["dsinks"]).abs() <= 2**-16 * terms * 96**0.5).all()


def _contract():
    from tilewright.dispatch import contract
    from tilewright.ops import attention  # noqa: F401

    return contract("fmha")
