"""mla's backward for Hopper: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention.test_fmha_backward_computed import LONGER, RAGGED, on_hopper
from tests.ops.attention.test_fmha_backward_cuda import (
    POISON,
    SHARED_LIMIT,
    Launches,
    as_on_an_h200,
    documents,
    sequences,
)
from tests.ops.attention.test_fmha_cuda import needs_nvrtc
from torch import Tensor

from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.kernels.sm90 import backward
from tilewright.ops.attention.kernels.sm90 import mla_backward as cuda
from tilewright.ops.attention.kernels.sm90.backward import Config
from tilewright.ops.attention.mla.args import MlaArgs, MlaBackwardArgs, MlaBucket, backward_bucket
from tilewright.ops.attention.reference import attention, attention_backward

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("dq", "dq_pe", "dk", "dk_pe", "dv")
WIDTHS = ((128, 64, 128), (128, 32, 128), (64, 32, 64), (64, 64, 128), (80, 24, 48), (16, 64, 64), (128, 64, 64))
"""D, D_pe, D_v"""


class Problem(NamedTuple):
    """do, dlse, then q, q_pe, k, k_pe, v, and what follows o and lse in a raw call."""

    do: Tensor
    dlse: Tensor | None
    tensors: tuple[Tensor, ...]
    options: tuple[Any, ...]

    def args(self, o: Tensor, lse: Tensor) -> MlaBackwardArgs:
        return MlaBackwardArgs(self.do, self.dlse, *self.tensors, o, lse, *self.options)

    @property
    def bare(self) -> MlaBackwardArgs:
        """With o and lse unwritten."""
        return self.args(torch.empty_like(self.do), torch.empty(self.do.shape[:3], device=self.do.device))


def problem(
    s_q=333, s_k=410, d=128, d_pe=64, d_v=128, heads=4, batch=2, dtype=bf16, device="cpu", views=False, **options
) -> Problem:
    """views: q and q_pe of one projection, k and v of another, by token.

    options: left, right, scale; dlse: True for one; mask: (S_q, S_k) -> mask.
    """
    generator = torch.Generator(device).manual_seed(0)

    def made(rows, count, *widths):
        shape = (batch, rows, count, sum(widths)) if views else (batch, count, rows, sum(widths))
        t = torch.randn(shape, generator=generator, device=device).to(dtype)
        parts = (t.transpose(1, 2) if views else t).split(widths, -1)
        return parts if views else [part.contiguous() for part in parts]

    (q, q_pe), (k, v), (k_pe,), (do,) = (
        made(s_q, heads, d, d_pe), made(s_k, heads, d, d_v), made(s_k, 1, d_pe), made(s_q, heads, d_v),
    )  # fmt: skip
    dlse = torch.randn(batch, heads, s_q, generator=generator, device=device) if options.get("dlse") else None
    program, data = "", None
    if "mask" in options:
        program, data = options["mask"](s_q, s_k).to(device).fitted(s_q, s_k).program(device)
    scale = options.get("scale", (d + d_pe) ** -0.5)
    band = options.get("left", -1), options.get("right", -1)
    return Problem(do, dlse, (q, q_pe, k, k_pe, v), (data, program, *band, scale))


def run(p: Problem, config: Config, o: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients; behind each head of them, three rows that must stay as they are."""
    around = [torch.full((*t.shape[:2], t.shape[2] + 3, t.shape[3]), POISON).to(t) for t in p.tensors]
    made = [t[:, :, :-3] for t in around]
    cuda.backward(tuple(made), p.args(o, lse), config)
    assert all((t[:, :, -3:] == POISON).all() for t in around), "rows of another head"
    return made


def launch(p: Problem, config: Config) -> None:
    run(p, config, p.bare.o, p.bare.lse)


def candidates(p: Problem) -> tuple[Config, ...]:
    return cuda.candidates(backward_bucket(p.bare), p.do.dtype)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "another GPU": ("sm_90", "sm_100", {}),
    "float32": ("bf16 or fp16", "sm_90", {"dtype": fp32}),
    "a rotated part of two boxes": ("up to 64 numbers", "sm_90", {"d_pe": 72}),
    "keys of four boxes": ("192 with D in whole 64s", "sm_90", {"d": 136}),
    "wide values": ("D_v up to 128", "sm_90", {"d_v": 136}),
    "rows that are no vectors": ("16 bytes", "sm_90", {"d_v": 60}),
    "one row that is no vector": ("multiples of 8", "sm_90", {"s_q": 1, "s_k": 1, "batch": 1, "heads": 1, "d_v": 60}),
    "no keys": ("no keys", "sm_90", {"s_k": 0}),
    "another program": ("triton evaluates", "sm_90", {"mask": lambda s_q, s_k: by_id(s_k)}),
}


def by_id(s_k):
    from tilewright import mask as masks

    return masks.document(torch.arange(s_k, dtype=torch.int32) // 100 % 3)  # ids come again


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(backward, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    assert words in str(cuda.why_not(problem(**change).bare))
    assert (cuda.why_not(problem().bare) is None) == (arch == "sm_90")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("views", [False, True])
def test_what_it_can_do(monkeypatch, widths, views):
    monkeypatch.setattr(backward, "device_info", lambda _: DeviceInfo("a GPU", "sm_90", 132, 0, 0))
    assert cuda.why_not(problem(7, 9, *widths, views=views).bare) is None
    assert cuda.why_not(problem(70, 90, *widths, mask=sequences([30, 40], [50, 40])).bare) is None


# ----------------------------------------------------------------------------------------------- what it launches


@pytest.fixture
def launches(monkeypatch):
    made = Launches(monkeypatch)
    made.sums = []
    monkeypatch.setattr(cuda, "KERNEL", lambda *args, **options: made.main.append((*args, options)))
    monkeypatch.setattr(cuda, "POSTPROCESS", lambda *args, **options: made.postprocess.append((*args, options)))
    monkeypatch.setattr(cuda, "head_sum", lambda out, per_head: made.sums.append((out, per_head)))
    return made


def test_a_causal_launch(launches):
    launch(problem(s_q=1000, s_k=1100, heads=16, right=0), Config(64, 2, 1, 1))
    rows, keys = (1, 1, 64, 64), (1, 1, 128, 64)
    assert launches.maps == [
        ((2, 16, 1000, 128), rows),
        ((2, 16, 1000, 64), rows),
        ((2, 16, 1100, 128), keys),
        ((2, 1, 1100, 64), keys),
        ((2, 16, 1100, 128), keys),
        ((2, 16, 1000, 128), rows),
        ((2, 16, 1100, 128), rows),
        ((2, 16, 1100, 128), rows),
        ((2 * 16 * 16, 2 * 64), (1, 2 * 64)),
    ]
    (grid, args, params, options) = launches.main[0]
    assert grid == (132,)
    assert args.dq_acc.shape == (2 * 16 * 16, 64, 192)
    assert (args.s_q, args.s_k, args.heads, args.batches, args.d_pe) == (1000, 1100, 16, 2, 64)
    assert (args.left, args.right, args.alternate) == (-1, 0, True)
    assert (params.kD, params.kDv) == (192, 128)
    assert options["shared_bytes"] == SHARED_LIMIT - 2048
    assert args.dk_pe.shape == (2, 16, 1100, 64)
    assert args.dk_pe.dtype == fp32
    ((dk_pe, per_head),) = launches.sums
    assert dk_pe.shape == (2, 1, 1100, 64)
    assert per_head is args.dk_pe
    ((_, post, _, _),) = launches.postprocess
    assert (post.d, post.d_pe) == (128, 64)


# ----------------------------------------------------------------------------------------------- what it compiles


@pytest.mark.parametrize("widths", WIDTHS)
def test_every_config_fits_shared_memory(widths):
    sizes = MlaBucket(8, 512, 512, *widths, 1, 1)
    assert cuda.candidates(sizes, bf16)[0] == cuda.configure(sizes, bf16)
    for config in cuda.candidates(sizes, bf16):
        assert config in cuda.CONFIGS
        params = cuda._params(problem(9, 9, *widths).bare, config)
        assert backward.shared_bytes(params) + 1024 <= SHARED_LIMIT


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("change", [{}, {"dtype": fp16}, {"mask": sequences([100])}], ids=["bf16", "fp16", "packed"])
def test_instances_use_the_matrix_units_and_spill_little(monkeypatch, widths, change):
    as_on_an_h200(monkeypatch)
    p = problem(100, 100, *widths, right=0, **change)
    for config in candidates(p):
        with collect("sm_90") as collector:
            launch(p, config)
        *small, main, queries, _ = (job.compile().info for job in collector.jobs)
        assert len(small) == 1 + ("mask" in change)
        assert all(info["spill_stores"] == 0 for info in (*small, queries))
        steps, steps_v = -(-cuda.columns(*widths[:2]) // 16), -(-widths[2] // 16)
        parts = 2 if steps > 8 else 1  # of dQ
        # S of the first tile, of the next in the loop; dP, dV, dK and dQ in the loop and before or behind it
        assert main["instructions"]["HGMMA"] == 2 * (steps + steps_v + 8 + 8 * parts)
        assert main["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"
        assert main["spill_stores"] <= 64, "words of those who move, which have 24 registers"


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "one tile": {"s_q": 128, "s_k": 128, "right": 0},
    "one query": {"s_q": 1, "s_k": 1000, "right": 0},
    "one key": {"s_q": 70, "s_k": 1, "dlse": True},
    "rows without keys": {"s_q": 500, "s_k": 123, "right": 0},
    "keys that no query sees": {"s_q": 100, "s_k": 900, "left": 50, "right": 0},
    "window": {"s_q": 900, "s_k": 1000, "left": 70, "right": 33},
    "views of two projections": {"views": True, "right": 0},
    "fp16": {"dtype": fp16, "right": 0},
    "many tiles": {"s_q": 1111, "s_k": 1111, "batch": 4, "heads": 8, "right": 0, "dlse": True},
    "more tiles than blocks": {"s_q": 512, "s_k": 640, "batch": 8, "heads": 16, "right": 0},
    "an odd number of heads": {"s_q": 1700, "s_k": 1700, "batch": 3, "heads": 5, "right": 0},
    "heads beyond one step of the sum": {"s_q": 100, "s_k": 200, "heads": 37},
    "scale 0": {"scale": 0.0, "dlse": True},
    "scale below 0": {"scale": -0.3, "right": 0},
    **{str(widths): dict(zip(("d", "d_pe", "d_v"), widths, strict=True)) | {"right": 0} for widths in WIDTHS[1:]},
    "a box and a bit, views": {"d": 80, "d_pe": 24, "d_v": 48, "views": True},
    "packed": {"s_q": 423, "s_k": 423, "mask": sequences(RAGGED, causal=True)},
    "packed, longer keys": {"s_q": 423, "s_k": 713, "mask": sequences(RAGGED, LONGER, causal=True), "dlse": True},
    "packed, window": {"s_q": 423, "s_k": 713, "mask": sequences(RAGGED, LONGER, window=(40, 10))},
    "documents": {"s_q": 700, "s_k": 700, "mask": documents([0, 100, 100, 612])},
}


def exact(p: Problem) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o, lse and the gradients in float64, over joined tensors."""
    do, dlse, *tensors = (None if t is None else t.double() for t in (p.do, p.dlse, *p.tensors))
    forward = MlaArgs(*tensors, *p.options)
    joined: FmhaArgs = forward.joined
    o, lse = attention(joined)
    args = MlaBackwardArgs(do, dlse, *tensors, o, lse, *p.options)
    whole: FmhaBackwardArgs = args.backward_of(joined)
    dq, dk, dv, _ = attention_backward(whole)
    d = p.tensors[0].shape[3]
    return o, lse, (dq[..., :d], dq[..., d:], dk[..., :d], dk[..., d:].sum(1, keepdim=True), dv)


def judge(found: list[Tensor], wanted: tuple[Tensor, ...], eps: float) -> None:
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        error = (one.double() - other).abs()
        assert (error <= 8 * eps * other.abs().max() + 1e-5).all(), name
        assert error.norm() <= 2 * eps * other.norm() + 1e-5 * error.numel() ** 0.5, name


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_gradients(case):
    """Against float64, in units of what rounding P, dS and o costs; in poisoned memory; the same bits again."""
    on_hopper()
    p = problem(device="cuda", **COMPUTED[case])
    dtype = p.do.dtype
    o, lse, wanted = exact(p)
    given = o.to(dtype), lse.float()
    for config in candidates(p):
        made = run(p, config, *given)
        judge(made, wanted, torch.finfo(dtype).eps)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(p, config, *given), made, strict=True)), "the same bits"


@pytest.mark.gpu
def test_another_stream_and_a_graph_give_the_same_bits():
    on_hopper()
    p = problem(device="cuda", s_q=1000, s_k=1000, heads=8, right=0)
    o, lse, _ = exact(p)
    given, config = (o.to(bf16), lse.float()), candidates(p)[0]
    made = run(p, config, *given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = run(p, config, *given)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(beside, made, strict=True))
    outs = tuple(torch.full_like(t, POISON) for t in p.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.backward(outs, p.args(*given), config)
    for _ in range(3):
        for t in outs:
            t.fill_(POISON)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, made, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_the_public_op_takes_it(causal):
    """`mla(..., backend="cuda")` in both directions, from views of projections."""
    on_hopper()
    from tilewright.ops import mla

    p = problem(device="cuda", s_q=300, s_k=300, views=True, right=0 if causal else -1)
    leaves = [t.detach().clone().requires_grad_() for t in p.tensors]
    o = mla(*leaves, causal=causal, backend="cuda")
    assert isinstance(o, Tensor)
    o.backward(p.do)
    *_, wanted = exact(p)
    grads = [t.grad for t in leaves]
    assert all(g is not None for g in grads)
    judge([g for g in grads if g is not None], wanted, 2 * torch.finfo(bf16).eps)
