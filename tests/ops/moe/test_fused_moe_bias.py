"""fused_moe_bias beside the experts of gpt-oss, and what `fused_moe` makes of it and of shared experts."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.moe.problems import normal
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.moe.fused.extras import SharedExperts
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs, bias_bucket
from tilewright.ops.moe.kernels import bias_pipeline


def experts(tokens=30, count=6, k=2, width=32, inner=24, dtype=torch.float32, device="cpu"):
    """x, w1 and w2 as gpt-oss stores them, topk_weights, topk_ids, and both biases."""
    x = 3 * torch.randn(tokens, width, dtype=dtype, device=device)
    w1 = (torch.randn(count, width, 2 * inner, device=device) * width**-0.5).to(dtype)
    w2 = (torch.randn(count, inner, width, device=device) * inner**-0.5).to(dtype)
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :k].contiguous()
    biases = {
        "w1_bias": torch.randn(count, 2 * inner, dtype=dtype, device=device),
        "w2_bias": torch.randn(count, width, dtype=dtype, device=device),
    }
    return x, w1, w2, torch.rand(tokens, k, device=device), ids, biases


def loop(x, w1, w2, weights, ids, biases, alpha=1.702, limit=7.0):
    """Token by token, slot by slot; differentiable."""
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[0])
        for j, expert in enumerate(ids[t].tolist()):
            if expert >= 0:
                both = x[t] @ w1[expert] + biases["w1_bias"][expert]
                gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
                h = (up + 1) * gate * torch.sigmoid(alpha * gate)
                total = total + weights[t, j] * (h @ w2[expert] + biases["w2_bias"][expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
def test_the_experts_of_gpt_oss(form):
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(num_local_experts=6, hidden_size=32, intermediate_size=24)
    config._experts_implementation = form
    module = normal(GptOssExperts(config), 0.8)
    x, _, _, weights, ids, _ = experts()
    with torch.no_grad():
        wanted = module(x, ids, weights)
        ours = ops.fused_moe(
            x, module.gate_up_proj.mT, module.down_proj.mT, weights, ids, w1_bias=module.gate_up_proj_bias,
            w2_bias=module.down_proj_bias, activation="swigluoai", interleaved=True, backend="torch",
        )  # fmt: skip
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@everywhere
@pytest.mark.parametrize("limit", [0.7, 7.0])
def test_the_sum_of_every_token(limit, place):
    x, w1, w2, weights, ids, biases = experts(tokens=11)
    ids[::4, 1] = -1
    wanted = loop(*(t.double() for t in (x, w1, w2, weights)), ids, {n: b.double() for n, b in biases.items()},
                  limit=limit)  # fmt: skip
    x, w1, w2, weights, ids = (t.to(place.device) for t in (x, w1, w2, weights, ids))
    got = ops.fused_moe_bias(
        x, w1.mT, w2.mT, weights, ids, **{n: b.to(place.device) for n, b in biases.items()}, interleaved=True,
        limit=limit, backend=place.backend,
    )  # fmt: skip
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


@everywhere
def test_gradients_of_everything(place):
    """With rows beyond the limit, whose gates and ups have none."""
    x, w1, w2, weights, ids, biases = experts(tokens=9, count=3)
    leaves = [t.double().requires_grad_() for t in (x, w1, w2, weights, *biases.values())]
    y = loop(*leaves[:4], ids, dict(zip(biases, leaves[4:], strict=True)), limit=1.5)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, leaves, dy)
    ours = [t.detach().float().to(place.device).requires_grad_() for t in leaves]
    got = ops.fused_moe_bias(
        ours[0], ours[1].mT, ours[2].mT, ours[3], ids.to(place.device), w1_bias=ours[4], w2_bias=ours[5],
        interleaved=True, limit=1.5, backend=place.backend,
    )  # fmt: skip
    for a, b in zip(torch.autograd.grad(got, ours, dy.float().to(place.device)), wanted, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", [(9, 8, 2, 64, 32), (700, 5, 2, 256, 128)])
def test_a_graph_takes_other_routing(shape, backend):
    x, w1, w2, weights, ids, biases = experts(*shape, dtype=torch.bfloat16, device="cuda")
    call = lambda: ops.fused_moe_bias(x, w1.mT, w2.mT, weights, ids, **biases, interleaved=True, backend=backend)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for other in (torch.zeros_like(ids), ids.flip(0), torch.where(ids > 1, ids, -1)):
        ids.copy_(other)
        graph.replay()
        wide = {n: b.double() for n, b in biases.items()}
        wanted = ops.fused_moe_bias(
            x.double(), w1.double().mT, w2.double().mT, weights.double(), ids, **wide, interleaved=True, backend="torch"
        )
        assert float((y.double() - wanted).norm() / (wanted.norm() + 1e-9)) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added(gated):
    x, w1, w2, weights, ids, _ = experts(tokens=7)
    w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
    shared = SharedExperts(torch.randn(20, 32) / 6, torch.randn(32, 10) / 3, torch.randn(1, 32) / 6 if gated else None)
    gate, up = (x @ shared.w1.T).chunk(2, -1)
    mlp = (F.silu(gate) * up) @ shared.w2.T
    if shared.gate is not None:
        mlp = torch.sigmoid(x @ shared.gate.T) * mlp
    given = shared if gated else tuple(shared)[:2]
    leaves = [t.requires_grad_() for t in (x, *given)]
    got = ops.fused_moe(x, w1, w2, weights, ids, shared_experts=given)
    routed = ops.fused_moe(x.detach(), w1, w2, weights, ids)
    torch.testing.assert_close(got.detach(), routed + mlp.detach(), rtol=1e-5, atol=1e-5)
    assert all(bool(g.abs().sum() > 0) for g in torch.autograd.grad(got.sum(), leaves))
    out = torch.empty_like(routed)
    with torch.no_grad():
        assert ops.fused_moe(x.detach(), w1, w2, weights, ids, shared_experts=given, out=out) is out
    torch.testing.assert_close(out, got.detach())


def test_what_shared_experts_are_refused():
    x, w1, w2, weights, ids, biases = experts()
    plain = x, w1.mT.contiguous(), w2.mT.contiguous(), weights, ids
    with pytest.raises(InputError, match="shared_experts is a Tensor; needs"):
        ops.fused_moe(*plain, shared_experts=x)
    with pytest.raises(InputError, match=r"needs \(2 I, H\) and \(H, I\)"):
        ops.fused_moe(*plain, shared_experts=(torch.ones(20, 31), torch.ones(32, 10)))
    with pytest.raises(InputError, match=r"gate of shared_experts is \(2, 32\)"):
        ops.fused_moe(*plain, shared_experts=(torch.ones(20, 32), torch.ones(32, 10), torch.ones(2, 32)))
    with pytest.raises(InputError, match="w2 of shared_experts is .*float16"):
        ops.fused_moe(*plain, shared_experts=(torch.ones(20, 32), torch.ones(32, 10).half()))
    with pytest.raises(InputError, match="experts with biases or a clamped gate need None"):
        ops.fused_moe(*plain, **biases, quant="fp8_block")


def test_ids_that_are_no_experts():
    """On a CPU ids are read in every call; on a GPU under TILEWRIGHT_CHECK=1."""
    x, w1, w2, weights, ids, biases = experts()
    ids[3, 1] = 6
    with pytest.raises(InputError, match=r"topk_ids has 6; needs -1 \(dropped\) to 5"):
        ops.fused_moe_bias(x, w1.mT, w2.mT, weights, ids, **biases)


def test_weights_without_a_unit_stride_are_planned_apart():
    """A plan belongs to a bucket: one made for columns of any alignment must not serve weights that no kernel takes."""
    w1, w2 = torch.empty(4, 33, 42).mT, torch.empty(4, 21, 33).mT
    args = FusedMoeBiasArgs(
        torch.empty(9, 33), w1, w2, torch.empty(9, 2), torch.zeros(9, 2, dtype=torch.int64), None, None, None,
        "swigluoai", True, 1.702, 7.0,
    )  # fmt: skip
    strided = args._replace(w1=torch.empty(4, 42, 66)[..., ::2])
    assert bias_pipeline.why_not(args) is None
    assert bias_pipeline.why_not(strided) is not None
    assert bias_bucket(strided) != bias_bucket(args)
