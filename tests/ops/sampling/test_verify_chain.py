"""verify_chain: the tokens are the target's, exactly."""

import pytest
import torch
from tests.ops.sampling.places import TORCH, assert_distributed, everywhere, keyed

from tilewright import ops
from tilewright.ops.sampling.verify_chain import fixed


def problem(rows, steps, vocabulary, *, near=1.0):
    """Target and draft of one context, in as many rows; the rows' drafts are drawn from the draft."""
    logits = torch.randn(steps + 1, vocabulary)
    target = logits.softmax(-1)
    draft = (logits[:steps] + near * torch.randn(steps, vocabulary)).softmax(-1)
    seeds, positions = keyed(rows, TORCH)
    drafts = [
        ops.sample(draft[i].log().expand(rows, -1), seeds, positions * steps + i, backend="torch") for i in range(steps)
    ]
    return target, draft, torch.stack(drafts, 1), seeds, positions * steps


@pytest.mark.parametrize("certain", [False, True])
def test_each_token_has_the_target_distribution(certain):
    """The first token over all rows, and the second over those that accept the first, drawn with the same seeds and
    positions as the drafts.
    """
    rows, steps = 40000, 2
    target, draft, drafts, seeds, positions = problem(rows, steps, 12)
    options = {} if certain else {"draft_probs": draft.expand(rows, -1, -1)}
    if certain:
        drafts = torch.full_like(drafts, 3)
    tokens, accepted = ops.verify_chain(
        target.expand(rows, -1, -1), drafts, seeds, positions, **options, backend="torch"
    )
    assert_distributed(tokens[:, 0], target[0])
    assert_distributed(tokens[accepted >= 1, 1], target[1])
    assert_distributed(tokens[accepted >= 2, 2], target[2])


def test_the_law_is_the_target_by_enumeration():
    """min(P, Q) + rejected share * residual = P in integers, for every token: what the two steps draw from."""
    target, draft = torch.randn(2, 50).mul(2).softmax(-1).unbind(0)
    p, q = fixed(target).tolist(), fixed(draft).tolist()
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]  # q * min(1, p / q)
    residual = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    assert [a + r for a, r in zip(accepted, residual, strict=True)] == p
    rejected = sum(q) - sum(accepted)
    assert abs(rejected - sum(residual)) <= 1 << 18  # a softmax in float32 sums to 1 up to some 2^-22


@everywhere
def test_where_a_chain_ends(place):
    """All accepted, the second rejected, ended by -1, nothing in common."""
    steps, vocabulary = 2, 5
    p = torch.zeros(4, steps + 1, vocabulary, device=place.device)
    p[:, 0, 1], p[:, 1, 2], p[:, 2, 3] = 1.0, 1.0, 1.0
    drafts = torch.tensor([[1, 2], [1, 4], [1, -1], [0, 2]], device=place.device)
    q = torch.full((4, steps, vocabulary), 0.2, device=place.device)
    for options in ({}, {"draft_probs": q}):
        tokens, accepted = ops.verify_chain(p, drafts, *keyed(4, place), **options, backend=place.backend)
        assert tokens.tolist() == [[1, 2, 3], [1, 2, -1], [1, 2, -1], [1, -1, -1]]
        assert accepted.tolist() == [2, 1, 1, 0]


@everywhere
def test_a_draft_like_the_target_is_accepted(place):
    target, _, drafts, seeds, positions = problem(200, 3, 30, near=0.0)
    p = target.expand(200, -1, -1).contiguous()
    tensors = (t.to(place.device) for t in (p, drafts, seeds, positions))
    tokens, accepted = ops.verify_chain(*tensors, draft_probs=p[:, :3].to(place.device), backend=place.backend)
    assert (accepted == 3).all()
    assert torch.equal(tokens[:, :3].cpu(), drafts)


@everywhere
def test_probabilities_that_are_none(place):
    """NaN and negative ones count as 0; a row of zeros gives -1."""
    p = torch.tensor([[[torch.nan, -1.0, 0.5]], [[0.0, 0.0, 0.0]]], device=place.device)
    drafts = torch.empty(2, 0, dtype=torch.int64, device=place.device)
    tokens, accepted = ops.verify_chain(p, drafts, *keyed(2, place), backend=place.backend)
    assert tokens.tolist() == [[2], [-1]]
    assert accepted.tolist() == [0, 0]


@everywhere
def test_a_request_does_not_depend_on_the_batch(place):
    target, draft, drafts, seeds, positions = problem(8, 3, 40)
    p, q = target.expand(8, -1, -1).contiguous(), draft.expand(8, -1, -1).contiguous()
    p, q, drafts, seeds, positions = (t.to(place.device) for t in (p, q, drafts, seeds, positions))
    tokens, _ = ops.verify_chain(p, drafts, seeds, positions, draft_probs=q, backend=place.backend)
    for i in range(8):
        row = slice(i, i + 1)
        alone, _ = ops.verify_chain(
            p[row], drafts[row], seeds[row], positions[row], draft_probs=q[row], backend=place.backend
        )
        assert torch.equal(alone, tokens[row])
