"""topk_softmax beside the routers of transformers' models, and how equals are ordered."""

import pytest
import torch
from tests.ops.moe.problems import normal, same_choice
from tests.ops.sampling.places import everywhere

from tilewright import ops
from tilewright.errors import RefusedError


@pytest.mark.parametrize("norm", [True, False])
def test_the_router_of_qwen3_moe(norm):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(num_experts=24, num_experts_per_tok=4, hidden_size=16, norm_topk_prob=norm)
    logits, weights, ids = normal(Qwen3MoeTopKRouter(config))(torch.randn(40, 16))
    ours, chosen = ops.topk_softmax(logits, 4, renormalize=norm, backend="torch")
    assert torch.equal(chosen, ids)
    assert torch.equal(ours, weights)


def test_the_router_of_mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    router = normal(MixtralTopKRouter(MixtralConfig(num_local_experts=8, num_experts_per_tok=2, hidden_size=16)))
    logits, weights, ids = router.bfloat16()(torch.randn(40, 16).bfloat16())
    ours, chosen = ops.topk_softmax(logits, 2, backend="torch")
    same_choice(chosen, ids, ours, weights)
    assert ours.dtype == torch.float32


@everywhere
@pytest.mark.parametrize(("n", "k"), [(8, 8), (60, 7), (130, 3)])
def test_equals_by_the_lower_id(n, k, place):
    logits = torch.randint(-2, 3, (9, n)).to(place.device, torch.bfloat16)
    weights, ids = ops.topk_softmax(logits, k, backend=place.backend)
    wanted = [sorted(range(n), key=lambda i, row=row: (-row[i], i))[:k] for row in logits.tolist()]
    assert ids.tolist() == wanted
    chosen = torch.softmax(logits.float(), -1).gather(1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True), rtol=1e-6, atol=0)


@everywhere
def test_logits_that_are_no_numbers(place):
    """NaN counts as the largest; -inf may be chosen where nothing else is left, with weight 0."""
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[0.0, nan, 1.0, nan], [-inf, 2.0, -inf, -inf], [0.0, -0.0, -inf, 0.0]], device=place.device)
    weights, ids = ops.topk_softmax(logits, 3, backend=place.backend)
    assert ids.tolist() == [[1, 3, 2], [1, 0, 2], [0, 1, 3]]
    assert weights[1].tolist() == [1.0, 0.0, 0.0]


@everywhere
def test_the_bias_is_for_the_choice_alone(place):
    logits = torch.zeros(2, 5, device=place.device)
    bias = torch.tensor([0.0, 0.5, 0.0, 0.75, 0.25], device=place.device)
    weights, ids = ops.topk_softmax(logits, 2, bias=bias, backend=place.backend)
    assert ids.tolist() == [[3, 1]] * 2
    assert weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.interp
def test_the_kernel_says_what_it_takes():
    with pytest.raises(RefusedError, match="k up to 64"):
        ops.topk_softmax(torch.zeros(1, 100), 65, backend="triton")
