"""fused_moe_fp8 beside a loop over tokens and experts, and its other face, `fused_moe(quant="fp8_block")`."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.moe.fused_fp8.args import FusedMoeFp8Args, fp8_bucket


def experts(tokens=20, count=5, k=2, width=272, inner=144, device="cpu"):
    """x, w1, w2 and their scales, topk_weights, topk_ids."""
    x = torch.randn(tokens, width, device=device).to(torch.bfloat16)
    w1 = torch.randn(count, 2 * inner, width, device=device) * width**-0.5
    w2 = torch.randn(count, width, inner, device=device) * inner**-0.5
    (q1, s1), (q2, s2) = (ops.per_block_cast_to_fp8(w, backend="torch") for w in (w1, w2))
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :k].contiguous()
    return x, q1, q2, s1, s2, torch.rand(tokens, k, device=device), ids


def cast(row):
    """A vector as its cast restores it: groups of 128 times 448 over their maximum, in e4m3."""
    parts = []
    for part in row.float().split(128):
        scale = part.abs().max().clamp(min=1e-4) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(parts)


def restored(q, scales):
    """Weights (N, K) with one scale for 128 x 128."""
    return q.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: q.shape[0], : q.shape[1]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_sum_of_every_token(device):
    x, w1, w2, s1, s2, weights, ids = (t.to(device) for t in experts())
    ids[::4, 1] = -1
    got = ops.fused_moe_fp8(x, w1, w2, s1, s2, weights, ids)
    wanted = torch.zeros_like(x, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j, expert in enumerate(ids[t].tolist()):
            if expert >= 0:
                both = (restored(w1[expert], s1[expert]) @ cast(x[t])).to(x.dtype)
                gate, up = both.float().chunk(2)
                hidden = (torch.nn.functional.silu(gate).to(x.dtype) * up.to(x.dtype)).to(x.dtype)
                wanted[t] += weights[t, j].double() * (restored(w2[expert], s2[expert]) @ cast(hidden))
    # A rounding of the first product puts a few numbers of the second cast on their other side: 1/16 of each
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-2


def test_the_other_face():
    x, w1, w2, s1, s2, weights, ids = experts()
    ours = ops.fused_moe_fp8(x, w1, w2, s1, s2, weights, ids)
    other = ops.fused_moe(x, w1, w2, weights, ids, quant="fp8_block", w1_scale=s1, w2_scale=s2)
    assert torch.equal(ours, other)


def test_what_goes_with_quant():
    x, w1, w2, s1, s2, weights, ids = experts()
    with pytest.raises(InputError, match="scales of weights without quant"):
        ops.fused_moe(x, w1, w2, weights, ids, w1_scale=s1)
    with pytest.raises(InputError, match="without w1_scale or w2_scale"):
        ops.fused_moe(x, w1, w2, weights, ids, quant="fp8_block", w1_scale=s1)
    with pytest.raises(InputError, match='needs "silu"'):
        ops.fused_moe(x, w1, w2, weights, ids, quant="fp8_block", w1_scale=s1, w2_scale=s2, activation="gelu")


def test_gradients_are_refused():
    x, *others = experts()
    with pytest.raises(InputError, match="a gradient is wanted of float8 experts"):
        ops.fused_moe_fp8(x.requires_grad_(), *others)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(9, 8, 2, 256, 128), (700, 5, 2, 384, 256)])
def test_a_graph_takes_other_routing(shape):
    x, w1, w2, s1, s2, weights, ids = experts(*shape, device="cuda")
    ops.fused_moe_fp8(x, w1, w2, s1, s2, weights, ids, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fused_moe_fp8(x, w1, w2, s1, s2, weights, ids, backend="cuda")
    for other in (torch.zeros_like(ids), ids.flip(0), torch.where(ids > 1, ids, -1)):
        ids.copy_(other)
        graph.replay()
        wanted = ops.fused_moe_fp8(x, w1, w2, s1, s2, weights, ids, backend="torch")
        assert float((y.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-9)) < 2e-2


def test_what_no_kernel_reads_is_planned_apart():
    """A plan belongs to a bucket: one made for weights and scales as casts write them must not serve others."""
    x, w1, w2, s1, s2, weights, ids = experts()
    args = FusedMoeFp8Args(x, w1, w2, s1, s2, weights, ids, None)
    assert fp8_bucket(args).aligned
    for other in (
        args._replace(w1=w1.mT.contiguous().mT),
        args._replace(w1_scale=s1.mT.contiguous().mT),
        args._replace(w2_scale=s2.mT.contiguous().mT),
    ):
        assert not fp8_bucket(other).aligned
