"""topk_sigmoid beside DeepSeek-V3's router."""

import pytest
import torch
from tests.ops.moe.problems import normal, same_choice
from tests.ops.sampling.places import everywhere

from tilewright import ops


@everywhere
@pytest.mark.parametrize(("experts", "groups", "best"), [(24, 4, 2), (28, 4, 3), (16, 1, 1)])
def test_the_router_of_deepseek_v3(experts, groups, best, place):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        n_routed_experts=experts, num_experts_per_tok=5, n_group=groups, topk_group=best, hidden_size=16,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = normal(DeepseekV3TopkRouter(config))
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(40, 16))
    ours, chosen = ops.topk_sigmoid(
        logits.to(place.device), 5, bias=router.e_score_correction_bias.to(place.device), n_group=groups,
        topk_group=best, scale=2.5, backend=place.backend,
    )  # fmt: skip
    same_choice(chosen.cpu(), ids, ours.cpu(), weights)


@everywhere
def test_equal_groups_and_equal_experts_by_the_lower_number(place):
    logits = torch.zeros(1, 12, device=place.device)
    logits[0, 6] = 1.0  # of the groups of three, the third is the best
    _, ids = ops.topk_sigmoid(logits, 5, n_group=4, topk_group=2, backend=place.backend)
    assert ids.tolist() == [[6, 0, 1, 2, 7]]


@everywhere
def test_a_group_is_as_good_as_its_two_best(place):
    """Two good experts are more than one that is better."""
    bias = torch.tensor([3.0, 0.0, 0.0, 2.0, 2.0, 0.0], device=place.device)
    weights, ids = ops.topk_sigmoid(
        torch.zeros(1, 6, device=place.device), 2, bias=bias, n_group=2, topk_group=1, renormalize=False,
        backend=place.backend,
    )  # fmt: skip
    assert ids.tolist() == [[3, 4]]
    assert weights.tolist() == [[0.5, 0.5]]
