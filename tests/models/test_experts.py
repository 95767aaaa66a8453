"""Experts and routers of every family that `patch` promises: what runs, that it computes the same, and the way back."""

import copy
from typing import Any

import pytest
import torch
from tests.models.zoo import build, build_as, tokens
from torch import Tensor, nn

from tilewright import ops
from tilewright.models import patch
from tilewright.models.moe.experts import run_plainly
from tilewright.models.report import Row

_FIRST = "ops.fused_moe, silu on the first half of gate_up_proj"
_OSS = "ops.fused_moe_bias, swigluoai on every second column of gate_up_proj, biases, transposed weights"
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {  # options, what experts and routers run
    "mixtral": ({}, _FIRST, "ops.topk_softmax, 2 experts, renormalized"),
    "qwen2_moe": ({}, _FIRST, "ops.topk_softmax, 2 experts"),
    "qwen3_moe": ({}, _FIRST, "ops.topk_softmax, 3 experts, renormalized"),
    "olmoe": ({}, _FIRST, "ops.topk_softmax, 2 experts"),
    "deepseek_v2": ({"topk_method": "greedy", "routed_scaling_factor": 1.5}, _FIRST,
                    "ops.topk_softmax, 2 experts, times 1.5"),
    "deepseek_v3": ({}, _FIRST, "ops.topk_sigmoid, 2 experts, 1 of 2 groups, renormalized, times 2.5"),
    "glm4_moe": ({}, _FIRST, "ops.topk_sigmoid, 2 experts, 1 of 2 groups, renormalized"),
    "gpt_oss": ({}, _OSS, "ops.topk_softmax, 2 experts, renormalized"),
}  # fmt: skip
_EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8,
                               "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                             "head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
}  # fmt: skip
KINDS = ["experts", "routers"]


def family(name: str, **options: Any) -> nn.Module:
    """A tiny model of `FAMILIES`."""
    options = {**FAMILIES[name][0], **options}
    if name in _EXTRA:
        prefix, own = _EXTRA[name]
        return build_as(prefix, {**own, **options})
    return build(name, **options)


def rows(model: nn.Module, kind: str, **options: Any) -> list[Row]:
    with patch(model, verify=False, ops=KINDS, **options) as p:
        return [row for row in p.report().rows if row.kind == kind]


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_every_block_runs_and_that_it_is_the_same(name: str) -> None:
    model, ids = family(name), tokens(2, 12)
    _, experts, routers = FAMILIES[name]
    wide = copy.deepcopy(model).double()
    run_plainly(wide)
    exact, before = logits(wide, ids), logits(model, ids)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with patch(model, verify=False, ops=KINDS, backend="torch") as p:
        for kind, text in (("experts", experts), ("routers", routers)):
            said = {row.text.rsplit(" (", 1)[0] for row in p.report().rows if row.kind == kind}
            assert said == {text}
        assert error(logits(model, ids), exact) <= 2 * error(before, exact) + 1e-6
        assert model.state_dict().keys() == state.keys()
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_state_dict(state)
        assert error(logits(model, ids), exact) <= 2 * error(before, exact) + 1e-6
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_gradients(name: str) -> None:
    model, ids = family(name), tokens(1, 12)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    with patch(model, mode="train", verify=False, ops=KINDS, backend="torch"):
        after = gradients()
    assert after.keys() == before.keys()
    for key, gradient in after.items():
        torch.testing.assert_close(gradient, before[key], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, ids = family(name, num_hidden_layers=1), tokens(1, 8)
    with patch(model, verify=False, ops=KINDS, backend="torch"):
        expected = logits(model, ids)
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)


def test_groups_by_their_best_expert_are_left() -> None:
    model = build("deepseek_v2")
    assert [(r.status, r.text) for r in rows(model, "routers")] == [
        ("left", "chooses experts in another way than ops.topk_softmax and ops.topk_sigmoid")
    ]


def test_mxfp4_is_left_by_name() -> None:
    class Mxfp4Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("gate_up_proj", "down_proj"):
                blocks = torch.zeros(4, 32, 1, 16, dtype=torch.uint8)
                setattr(self, name, nn.Parameter(blocks, requires_grad=False))

    model = nn.Sequential(nn.RMSNorm(8, eps=1e-5), Mxfp4Experts())
    (row,) = [r for r in patch(model, verify=False).report().rows if r.kind == "experts"]
    assert row.status == "left"
    assert "mxfp4" in row.text
    assert "dequantize=True" in row.text


@pytest.mark.parametrize("k", [1, 2])
def test_the_blocks_of_llama4(k: int) -> None:
    check_llama4(k, "torch", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"])
def test_the_blocks_of_llama4_on_a_gpu(backend: str | None) -> None:
    check_llama4(1, backend, torch.device("cuda"))


def check_llama4(k: int, backend: str | None, device: torch.device) -> None:
    """Every block is replaced, computes the same with gradients, and is undone."""
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=128, hidden_size=32, intermediate_size=16, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=k,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.Llama4ForCausalLM(config).to(device).eval()
    ids = tokens(1, 12).to(device)
    for parameter in model.parameters():
        if parameter.dim() == 3:  # zeros as they are made
            torch.nn.init.normal_(parameter, 0, 0.3)

    def run() -> tuple[Tensor, Tensor]:
        out = model(input_ids=ids, use_cache=False).logits
        return out.detach(), torch.autograd.grad(out.square().sum(), model.model.layers[0].feed_forward.router.weight)[
            0
        ]

    before, gradient = run()
    with patch(model, verify=False, mode="train", ops=KINDS, backend=backend) as p:
        text = f"ops.fused_moe_bias, silu, {k} experts of tokens times their scores"
        said = {row.text.rsplit(" (", 1)[0] for row in p.report().rows if row.kind == "experts"}
        assert said == {text, "each take all tokens: what runs is decided by the block that holds them"}
        after, patched_gradient = run()
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(patched_gradient, gradient, rtol=1e-3, atol=1e-5)
    assert torch.equal(run()[0], before)


def _reference_top_k(logits: Tensor, k: int) -> Tensor:
    """The k experts of a row, sorted: greater scores first, of equals the lower ids."""
    order = sorted(range(logits.shape[0]), key=lambda e: (-float(logits[e]), e))
    return torch.tensor(sorted(order[:k]))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 64, 128, 256])
def test_ties_on_a_gpu_go_where_the_model_sends_them(experts: int) -> None:
    """torch.topk on a GPU takes the lower ids of equals, as ours does: tokens go to the same experts."""
    torch.manual_seed(0)
    coarse = (2 * torch.randn(4000, experts, device="cuda")).round().bfloat16()
    k = 8 if experts > 8 else 2
    p = torch.softmax(coarse, -1, dtype=torch.float32)
    theirs = torch.topk(p, k, dim=-1)[1].sort(-1).values
    weights, ids = ops.topk_softmax(coarse, k, renormalize=False)
    ours = ids.sort(-1)
    assert torch.equal(ours.values, theirs)
    torch.testing.assert_close(weights.gather(1, ours.indices), p.gather(1, theirs), rtol=4e-7, atol=0)
    assert torch.equal(ours.values[0].cpu(), _reference_top_k(coarse[0].cpu(), k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu(name: str, backend: str | None, dtype: torch.dtype) -> None:
    """Every block by itself: whole models in half types differ where a router nearly ties."""
    check_blocks(name, backend, dtype, torch.device("cuda"))


def check_blocks(name: str, backend: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Routers choose the same experts of the same logits; experts are as near to a wider copy as their own forward."""
    model = family(name, hidden_size=256, intermediate_size=512, num_attention_heads=4).to(device, dtype)
    run_plainly(model)
    x = torch.randn(140, 256, device=device, dtype=dtype)
    for layer in model.model.layers:
        block: Any = layer.mlp
        if not hasattr(block, "experts"):
            continue
        router = "gate" if hasattr(block, "gate") else "router"
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        exact_experts = copy.deepcopy(block.experts).to(wider)
        with torch.no_grad():
            values, weights, ids = getattr(block, router)(x)
            before = block.experts(x, ids, weights)
            exact = exact_experts(x.to(wider), ids, weights.to(wider)).double()
            with patch(block, verify=False, ops=KINDS, backend=backend):
                got_values, got_weights, got_ids = getattr(block, router)(x)
                got = block.experts(x, ids, weights)
        assert torch.equal(got_values, values)
        ours, theirs = got_ids.sort(-1), ids.sort(-1)
        assert torch.equal(ours.values, theirs.values)
        close = {"rtol": 1e-6 if weights.dtype == torch.float32 else 2**-7, "atol": 0}
        torch.testing.assert_close(got_weights.gather(1, ours.indices), weights.gather(1, theirs.indices), **close)
        assert error(got, exact) <= 2 * error(before, exact) + 1e-6
