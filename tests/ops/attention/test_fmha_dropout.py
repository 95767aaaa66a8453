"""fmha_dropout(q, k, v, p, seed, offset): one mask for every backend and tile, and attention by its formula with it."""

import math

import pytest
import torch
from torch import Tensor

from tilewright import mask as masks
from tilewright import ops
from tilewright.errors import BackendError, InputError
from tilewright.ops.attention.dropped import Dropout, kept

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
SEED, OFFSET = -5, 2**33 + 7


def problem(s_q=37, s_k=53, heads=4, heads_kv=2, d=32, dtype=torch.float64, device="cpu") -> tuple[Tensor, ...]:
    shapes = ((heads, s_q), (heads_kv, s_k), (heads_kv, s_k))
    return tuple(torch.randn(2, *shape, d, dtype=dtype, device=device).requires_grad_() for shape in shapes)


def mask_of(batch, heads, s_q, s_k, p, seed=SEED, offset=OFFSET, device="cpu") -> Tensor:
    numbers = (torch.tensor(n, device=device) for n in (seed, offset))
    places = (torch.arange(n, device=device) for n in (s_q, s_k))
    return kept(Dropout(*numbers, p), batch, heads, *places)


def exact(q: Tensor, k: Tensor, v: Tensor, p: float, visible: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The formula, with all weights in memory."""
    group = q.shape[1] // k.shape[1]
    s = q.shape[3] ** -0.5 * q @ k.repeat_interleave(group, 1).mT
    s = s.masked_fill(~visible.to(q.device), -torch.inf)
    column = q.new_full((1, q.shape[1], 1, 1), -torch.inf) if sinks is None else sinks[:, None, None]
    weights = torch.cat([s, column.expand(*s.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    m = mask_of(*s.shape, p, device=q.device.type) / (1 - p)
    return (weights * m) @ v.repeat_interleave(group, 1)


def causal(s_q: int, s_k: int) -> Tensor:
    return torch.arange(s_q)[:, None] + s_k - s_q >= torch.arange(s_k)


def test_the_mask_of_the_documentation():
    """By integers of Python."""

    def words(key, counter):
        (k0, k1), c = key, list(counter)
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [b >> 32 ^ c[1] ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k1, a & 0xFFFFFFFF]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return c

    p = 0.25
    made = mask_of(2, 3, 18, 26, p)
    halves = (SEED & 0xFFFFFFFF, SEED >> 32 & 0xFFFFFFFF)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 7, 8), (0, 1, 8, 7), (1, 0, 17, 25), (1, 1, 11, 13), (0, 2, 16, 3)):
        r = words(halves, (b, h, OFFSET & 0xFFFFFFFF, OFFSET >> 32))
        word = words(r[:2], (j & ~8, i & ~8, *r[2:]))[2 * (i & 8 > 0) + (j & 8 > 0)]
        assert made[b, h, i, j].item() == (word >= p * 2**32)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_shares_of_rows_columns_and_words(p):
    """Six standard deviations; words of one counter are as independent as any others."""
    made = mask_of(2, 4, 64, 64, p, seed=11, offset=0).double()
    for dims in ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (2, 3)):
        share = made.mean(dims)
        assert ((share - (1 - p)).abs() < 6 * math.sqrt(p * (1 - p) * share.numel() / made.numel())).all()
    rest = made - (1 - p)
    pairs = ((rest[:, :, :-8], rest[:, :, 8:]), (rest[..., :-8], rest[..., 8:]), (rest[:, :1], rest[:, 1:2]))
    for x, y in (*pairs, (rest[:1], rest[1:]), (rest, mask_of(2, 4, 64, 64, p, seed=11, offset=1).double() - (1 - p))):
        assert abs((x * y).mean().item()) < 6 * p * (1 - p) / math.sqrt(x.numel())


def test_the_mask_is_of_places_alone():
    made = mask_of(2, 4, 40, 56, 0.5)
    assert torch.equal(made[:1, :3, :21, :33], mask_of(1, 3, 21, 33, 0.5))
    later = Dropout(torch.tensor(SEED), torch.tensor(OFFSET), 0.5)
    assert torch.equal(made[:, :, 5:9, 30:], kept(later, 2, 4, torch.arange(5, 9), torch.arange(30, 56)))
    for other in ({"seed": 6}, {"offset": OFFSET + 1}, {"offset": OFFSET + 2**32}):
        assert not torch.equal(made, mask_of(2, 4, 40, 56, 0.5, **other))


@pytest.mark.parametrize("modified", [False, True])
def test_the_formula_and_its_gradients(modified):
    q, k, v = problem()
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if modified else None
    inputs = (q, k, v, sinks) if modified else (q, k, v)
    o = ops.fmha_dropout(q, k, v, 0.3, seed=SEED, offset=OFFSET, causal=True, sinks=sinks)
    expected = exact(q, k, v, 0.3, causal(37, 53), sinks)
    torch.testing.assert_close(o, expected)
    do = torch.randn_like(o)
    torch.testing.assert_close(torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected, inputs, do))


def test_gradients_of_gradients():
    q, k, v = problem(3, 5, 2, 1, 4)
    assert torch.autograd.gradgradcheck(lambda *t: ops.fmha_dropout(*t, 0.4, seed=5), (q, k, v))


def test_lse_and_no_dropout_are_those_of_fmha():
    q, k, v = (t.detach().float() for t in problem())
    o, lse = ops.fmha(q, k, v, causal=True, return_lse=True)
    same, same_lse = ops.fmha_dropout(q, k, v, 0.0, seed=1, causal=True, return_lse=True)
    assert torch.equal(o, same)
    assert torch.equal(lse, same_lse)
    assert torch.equal(lse, ops.fmha_dropout(q, k, v, 0.9, seed=1, causal=True, return_lse=True)[1])


def test_fmha_with_a_seed():
    """The same function; without a seed torch draws, as before."""
    q, k, v = (t.detach().float() for t in problem())
    options = {"causal": True, "softcap": 3.0, "return_lse": True}
    made = ops.fmha(q, k, v, dropout=0.2, seed=3, offset=4, **options)
    torch.testing.assert_close(made, ops.fmha_dropout(q, k, v, 0.2, seed=3, offset=4, **options), rtol=0, atol=0)
    assert torch.equal(ops.fmha(q, k, v, seed=3), ops.fmha(q, k, v))
    with pytest.raises(InputError, match="offset goes with a seed"):
        ops.fmha(q, k, v, dropout=0.2, offset=4)


def test_what_has_no_kernel_is_refused():
    q, k, v = (t.detach().float() for t in problem())
    with pytest.raises(BackendError, match="fmha_dropout"):
        ops.fmha_dropout(q, k, v, 0.2, seed=3, backend="cuda")
    with pytest.raises(InputError, match="no score modifier but softcap"):
        ops.fmha(q, k, v, dropout=0.2, seed=3, score_mod=lambda s, b, h, i, j: s)


def documents() -> masks.Mask:
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor([20, 45, 25]))
    return masks.document(ids) & masks.causal()


CASES = {
    "full, ragged": {},
    "causal, grouped": {"right": 0, "s_q": 90},
    "window, sinks": {"left": 20, "right": 3, "sinks": True},
    "documents": {"documents": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "descriptors"), [*zip(CASES, (True, False, True, False), strict=True)])
def test_tiles_are_no_part_of_the_mask(name, descriptors, device):
    """Both directions in tiles of several sizes, against the reference on float64."""
    from tilewright.ops.attention.arguments import mask_arguments
    from tilewright.ops.attention.fmha_dropout.args import FmhaDropoutArgs, FmhaDropoutBackwardArgs
    from tilewright.ops.attention.fmha_dropout.raw_ops import BACKWARD, FORWARD
    from tilewright.ops.attention.kernels.triton import backward
    from tilewright.ops.attention.kernels.triton import fmha_dropout as fmha
    from tilewright.ops.attention.kernels.triton.tiles import Config

    case = CASES[name]
    s_q, s_k = case.get("s_q", 70), 90
    q, k, v = (t.detach() for t in problem(s_q, s_k, 2, 1, 16, torch.float32, device))
    sinks = torch.tensor([0.5, -1.0], device=device) if case.get("sinks") else None
    band = masks.window(case["left"], case["right"]) if "left" in case else masks.causal() if "right" in case else None
    mask = documents() if case.get("documents") else band
    if case.get("documents"):
        q, s_q = torch.randn(2, 2, 90, 16, device=device), 90
    numbers = (torch.tensor(SEED, device=device), torch.tensor(OFFSET, device=device))
    args = FmhaDropoutArgs(q, k, v, sinks, None, *numbers, *mask_arguments(mask, q, k), 0.25, 0.0, 0.3)
    wide = args._replace(**{n: t.double() for n in ("q", "k", "v", "sinks") if (t := getattr(args, n)) is not None})
    wanted = FORWARD.plain(*wide)
    outs = FORWARD.allocate(args, device)
    do, dlse = torch.randn_like(q), torch.randn(q.shape[:3], device=device)
    for config in (Config(32, 16, 4, 1, descriptors), Config(16, 64, 4, 2, descriptors)):
        for out in outs:
            out.fill_(torch.nan)
        fmha.launch(outs, args, config)
        for out, exact_out in zip(outs, wanted, strict=True):
            torch.testing.assert_close(out.double(), exact_out, rtol=1e-4, atol=1e-5)
    rest = args[3:]
    wanted = BACKWARD.plain(*FmhaDropoutBackwardArgs(
        do.double(), dlse.double(), *wide[:3], *wanted, *wide[3:]
    ))  # fmt: skip
    back = FmhaDropoutBackwardArgs(do, dlse, q, k, v, *outs, *rest)
    grads = BACKWARD.allocate(back, device)
    for config in (backward.Config(16, 32, 4, 1, 32, 16, 4, 1, descriptors),):
        fmha.launch_backward(grads, back, config)
        for grad, exact_grad in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-4, atol=1e-4)
