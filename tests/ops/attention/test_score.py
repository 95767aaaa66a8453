"""Score modifiers: what is native equals what is written as a function, and what has no kernel says where it runs."""

import logging

import pytest
import torch
from tests.ops.attention.bounds import check, problem

from tilewright import mask as masks
from tilewright import ops
from tilewright.errors import BackendError, InputError
from tilewright.log import forget_logged
from tilewright.ops.attention import score

HALF = torch.bfloat16
CPU, GPU = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)
on_every_device = pytest.mark.parametrize("device", [CPU, GPU])


def near(made, wanted):
    """Two ways of one formula in bf16."""
    torch.testing.assert_close(made.float(), wanted.float(), rtol=0.02, atol=0.02)


@on_every_device
@pytest.mark.parametrize("s_q", [40, 64])
@pytest.mark.parametrize(
    "mask", [None, masks.window(20), masks.causal() | masks.prefix(9)], ids=["full", "band", "program"]
)
def test_a_callable_is_the_modifier_it_writes_out(mask, s_q, device):
    q, k, v = problem(2, 4, 2, s_q, 64, 64, dtype=HALF, device=device)
    slopes, sinks = score.alibi_slopes(4, device), torch.randn(4, device=device)
    shift = 64 - s_q

    def both(s, b, h, i, j):
        return 1.5 * torch.tanh(s / 1.5) - slopes[h] * (i + shift - j).abs()

    native = ops.fmha(q, k, v, mask=mask, softcap=1.5, score_mod=score.alibi(slopes), sinks=sinks, return_lse=True)
    written = ops.fmha(q, k, v, mask=mask, score_mod=both, sinks=sinks, return_lse=True)
    near(written[0], native[0])
    torch.testing.assert_close(written[1], native[1], rtol=1e-3, atol=1e-3)
    assert native[0].dtype == written[0].dtype == HALF


@on_every_device
def test_order_matters(device):
    """alibi before softcap is another function, which no kernel has."""
    q, k, v = problem(1, 4, 4, 64, 64, 64, dtype=HALF, device=device)
    alibi, cap = score.alibi(8 * score.alibi_slopes(4, device)), score.softcap(1.0)
    first, second = (ops.fmha(q, k, v, score_mod=steps) for steps in ((cap, alibi), (alibi, cap)))
    check(first, q, k, v, score_mod=(cap, alibi))
    assert not torch.allclose(first.float(), second.float(), atol=0.05)
    slopes = alibi.slopes

    def written(s, b, h, i, j):
        return torch.tanh(s - slopes[h] * (i - j).abs())

    near(second, ops.fmha(q, k, v, score_mod=written))


@on_every_device
@pytest.mark.parametrize("reach", [3, 100])
def test_relative_bias(reach, device):
    q, k, v = problem(1, 2, 2, 33, 40, 64, dtype=HALF, device=device)
    table = torch.randn(2, 2 * reach + 1, device=device)
    distance = torch.arange(33, device=device)[:, None] + 7 - torch.arange(40, device=device)
    bias = table[:, distance.clamp(-reach, reach) + reach]
    wanted = torch.softmax(q.double() @ k.double().mT / 8 + bias, -1) @ v.double()
    near(ops.fmha(q, k, v, score_mod=score.relative_bias(table)), wanted)


def test_relative_bias_learns():
    q, k, v = problem(1, 2, 1, 5, 6, 4, dtype=torch.float64, device="cpu")
    tensors = [t.requires_grad_() for t in (q, k, v, torch.randn(2, 7, dtype=torch.float64))]

    def call(q, k, v, table):
        return ops.fmha(q, k, v, causal=True, score_mod=score.relative_bias(table), return_lse=True)

    assert torch.autograd.gradcheck(call, tensors)


@pytest.mark.parametrize(("s_q", "s_k"), [(6, 3), (4, 0)])
def test_rows_that_see_nothing_under_a_callable(s_q, s_k):
    q, k, v = (t.requires_grad_() for t in problem(1, 2, 1, s_q, s_k, 4, dtype=torch.float32, device="cpu"))
    o, lse = ops.fmha(q, k, v, causal=True, score_mod=lambda s, b, h, i, j: 2 * s, return_lse=True)
    empty = s_q - s_k
    assert not o[:, :, :empty].any()
    assert bool((lse[:, :, :empty] == -torch.inf).all())
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in grads)


def test_what_has_no_kernel_says_so_once(caplog):
    caplog.set_level(logging.INFO, "tilewright")
    forget_logged()
    q = torch.randn(1, 2, 4, 8)
    for _ in range(2):
        ops.fmha(q, q, q, score_mod=lambda s, b, h, i, j: s)
    assert sum("no kernel of tilewright has it" in r.message for r in caplog.records) == 1
    with pytest.raises(BackendError, match=r'fmha\[triton\] has no .*Try backend="torch"'):
        ops.fmha(q, q, q, score_mod=lambda s, b, h, i, j: s, backend="triton")
    with pytest.raises(BackendError, match=r"fmha\[cuda\] has no dropout"):
        ops.fmha(q, q, q, dropout=0.1, backend="cuda")


def test_slopes_of_the_paper():
    assert score.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    twelve = score.alibi_slopes(12)
    assert twelve[:8].tolist() == score.alibi_slopes(8).tolist()
    assert twelve[8:].tolist() == score.alibi_slopes(16)[::2][:4].tolist()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: score.softcap(0), "positive finite number"),
        (lambda: score.softcap(float("inf")), "positive finite number"),
        (lambda: score.alibi(torch.ones(2, 2)), r"slopes is \(2, 2\) torch.float32; needs \(H,\)"),
        (lambda: score.sinks(torch.ones(2, dtype=torch.int32)), "needs"),
        (lambda: score.relative_bias(torch.ones(2, 4)), r"needs \(H, 2 R \+ 1\)"),
        (lambda: score.relative_bias([1.0]), "table is a list"),
    ],
)
def test_what_is_no_modifier(make, match):
    with pytest.raises(InputError, match=match):
        make()


# Dropout.


@on_every_device
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": masks.window(30, 5)}, {"layout": "BSHD"}], ids=str)
def test_dropout_keeps_the_mean(options, device):
    torch.manual_seed(0)
    q, k, v = problem(64, 4, 2, 48, 48, 64, dtype=HALF, device=device, spread=0.1)
    v = torch.ones_like(v)  # then o is the sum of the probabilities that were kept
    if "layout" in options:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    made = ops.fmha(q, k, v, dropout=0.25, **options).float()
    assert abs(float(made.mean()) - 1.0) < 0.01
    assert float(made.std()) > 0.02
    assert not torch.equal(made, ops.fmha(q, k, v, dropout=0.25, **options).float())


def test_dropout_honours_a_mask_and_empty_rows():
    q, k, v = problem(1, 2, 2, 20, 8, 16, dtype=torch.float32, device="cpu")
    v[:, :, 0] = 100.0
    made = ops.fmha(q, k, v, dropout=0.5, mask=~masks.prefix(1))
    assert float(made.abs().max()) < 20
    assert not ops.fmha(q, k, v, dropout=0.5, causal=True)[:, :, :12].any()


# Masks that only torch can evaluate.


@on_every_device
def test_a_foreign_block_mask(device):
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = problem(1, 2, 2, 128, 128, 64, dtype=HALF, device=device)
    block_mask = create_block_mask(lambda b, h, i, j: (i + j) % 3 > 0, 1, 1, 128, 128, device=device)
    mask = masks.from_block_mask(block_mask)
    made = ops.fmha(q, k, v, mask=mask, softcap=2.0)
    i = torch.arange(128, device=device)
    seen = (i[:, None] + i) % 3 > 0
    s = (2 * torch.tanh(q.double() @ k.double().mT / 16)).masked_fill(~seen, -torch.inf)
    near(made, torch.softmax(s, -1) @ v.double())
