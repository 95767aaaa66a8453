"""fused_moe beside the experts of transformers' models, and what its backward keeps."""

import copy

import pytest
import torch
from tests.ops.moe.problems import normal
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import InputError


def experts(tokens=30, count=6, k=2, width=32, inner=24, dtype=torch.float32, device="cpu"):
    """x, w1, w2, topk_weights, topk_ids."""
    x = torch.randn(tokens, width, dtype=dtype, device=device)
    w1 = (torch.randn(count, 2 * inner, width, device=device) * width**-0.5).to(dtype)
    w2 = (torch.randn(count, width, inner, device=device) * inner**-0.5).to(dtype)
    ids = torch.rand(tokens, count, device=device).argsort(1)[:, :k].contiguous()
    return x, w1, w2, torch.rand(tokens, k, device=device), ids


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
def test_the_experts_of_qwen3_moe(form):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=6, num_experts_per_tok=2, hidden_size=32, moe_intermediate_size=24)
    config._experts_implementation = form
    module = normal(Qwen3MoeExperts(config), 0.2)
    x, _, _, weights, ids = experts()
    with torch.no_grad():
        wanted = module(x, ids, weights)
        ours = ops.fused_moe(x, module.gate_up_proj, module.down_proj, weights, ids, backend="torch")
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@everywhere
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_the_sum_of_every_token(activation, place):
    x, w1, w2, weights, ids = (t.to(place.device) for t in experts())
    ids[::4, 1] = -1
    got = ops.fused_moe(x, w1, w2, weights, ids, activation=activation, backend=place.backend)
    wanted = torch.zeros_like(x, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j, expert in enumerate(ids[t].tolist()):
            if expert >= 0:
                gate, up = (w1[expert].double() @ x[t].double()).chunk(2)
                gate = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(
                    gate, approximate="tanh"
                )  # fmt: skip
                wanted[t] += weights[t, j].double() * (w2[expert].double() @ (gate * up))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_steps():
    """By `moe_permute`, `grouped_matmul`, `silu_and_mul` and `moe_unpermute`, each with its own backward."""
    x, w1, w2, weights, ids = experts(dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (x, w1, w2, weights)]
    y = ops.fused_moe(x, w1, w2, weights, ids, backend="torch")
    slots, positions, _, ends = ops.moe_align(ids, 6)
    rows = ops.moe_permute(x, slots, positions)
    hidden = ops.silu_and_mul(ops.grouped_matmul(rows, w1, ends, trans_b=True))
    steps = ops.moe_unpermute(ops.grouped_matmul(hidden, w2, ends, trans_b=True), weights, slots, positions)
    dy = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(steps, leaves, dy), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.interp
def test_nothing_but_the_arguments_is_kept():
    x, w1, w2, weights, ids = experts()
    given = {t.data_ptr() for t in (x, w1, w2, weights, ids)}
    saved = []
    leaves = [t.requires_grad_() for t in (x, w1, w2, weights)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.fused_moe(*leaves, ids, backend="triton")
    assert {t.data_ptr() for t in saved} == given
    torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", [(9, 8, 2, 64, 32), (700, 5, 2, 256, 128)])
def test_a_graph_takes_other_routing(shape, backend):
    """Captured once and replayed with other ids, among them none for an expert, and -1."""
    x, w1, w2, weights, ids = experts(*shape, dtype=torch.bfloat16, device="cuda")
    ops.fused_moe(x, w1, w2, weights, ids, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fused_moe(x, w1, w2, weights, ids, backend=backend)
    for other in (torch.zeros_like(ids), ids.flip(0), torch.where(ids > 1, ids, -1)):
        ids.copy_(other)
        graph.replay()
        wanted = ops.fused_moe(*(t.double() for t in (x, w1, w2, weights)), ids, backend="torch")
        assert float((y.double() - wanted).norm() / (wanted.norm() + 1e-9)) < 1e-2


def test_low_bits_are_refused_by_name():
    with pytest.raises(InputError, match="quant is 'int4'; allowed are None, 'fp8_block'"):
        ops.fused_moe(*experts(), quant="int4")


def test_a_patched_model_runs_it(monkeypatch):
    from tests.models.zoo import build, tokens

    from tilewright.models import patch
    from tilewright.models.cpu_sizes import every_size_on_ops
    from tilewright.models.moe import experts as finder

    model = build("mixtral")
    calls = []
    own = ops.fused_moe
    monkeypatch.setattr(finder.ops, "fused_moe", lambda *a, **k: calls.append(1) or own(*a, **k))
    before = copy.deepcopy(model)(input_ids=tokens()).logits
    with patch(model, ops=["experts"], verify=False) as p, every_size_on_ops():
        assert [r.text for r in p.report().rows if r.status == "replaced"] == [
            "ops.fused_moe, silu on the first half of gate_up_proj (bitwise)"
        ] * 2
        calls.clear()  # those of the probe
        after = model(input_ids=tokens()).logits
    assert len(calls) == 2
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    model(input_ids=tokens())
    assert len(calls) == 2
