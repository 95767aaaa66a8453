"""verify_tree: the path that the target's own tokens take."""

import torch
from tests.ops.sampling.places import TORCH, assert_distributed, everywhere, keyed

from tilewright import ops


@everywhere
def test_paths_by_hand(place):
    """A tree 0 -> (1, 2), 1 -> 3, 2 -> (4, 5); 6 is padding."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, -1]], dtype=torch.int32).repeat(4, 1)
    drafts = torch.tensor([[9, 10, 20, 11, 21, 22, 10]]).repeat(4, 1)
    targets = torch.full((4, 7), 99)
    targets[0, 0] = 7  # no child
    targets[1, 0], targets[1, 2], targets[1, 5] = 20, 22, 5
    targets[2, 0], targets[2, 1] = 10, 21  # a token of another branch
    targets[3, 0], targets[3, 2], targets[3, 4] = 20, 21, 10
    tensors = (t.to(place.device) for t in (targets, drafts, parents))
    tokens, nodes, accepted = ops.verify_tree(*tensors, backend=place.backend)
    ends = [-1] * 4
    assert tokens.tolist() == [[7, -1, -1, *ends], [20, 22, 5, *ends], [10, 21, -1, *ends], [20, 21, 10, *ends]]
    assert nodes.tolist() == [[0, -1, -1, *ends], [0, 2, 5, *ends], [0, 1, -1, *ends], [0, 2, 4, *ends]]
    assert accepted.tolist() == [0, 2, 1, 2]


@everywhere
def test_the_first_of_equal_children_is_followed(place):
    parents = torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32, device=place.device)
    drafts = torch.tensor([[0, 5, 5, 6]], device=place.device)
    targets = torch.tensor([[5, 6, 6, 1]], device=place.device)
    tokens, nodes, accepted = ops.verify_tree(targets, drafts, parents, backend=place.backend)
    assert (tokens.tolist(), nodes.tolist()) == ([[5, 6, -1, -1]], [[0, 1, -1, -1]])
    assert accepted.tolist() == [1]


def test_tokens_have_the_target_distribution():
    """The first token over all rows; the second of the rows that go on, whose context is the accepted token."""
    rows, vocabulary = 20000, 8
    laws = torch.randn(vocabulary + 1, vocabulary)  # row 0: the root's; row 1 + v: after token v
    drafts = torch.tensor([[0, 2, 5]]).repeat(rows, 1)
    parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32).repeat(rows, 1)
    seeds, positions = keyed(rows, TORCH)
    contexts = (0, 3, 6)
    depths = (0, 1, 1)
    targets = torch.stack(
        [
            ops.sample(laws[context].expand(rows, -1), seeds, 2 * positions + depth, backend="torch")
            for context, depth in zip(contexts, depths, strict=True)
        ],
        1,
    )
    tokens, _, accepted = ops.verify_tree(targets, drafts, parents, backend="torch")
    assert_distributed(tokens[:, 0], laws[0].softmax(-1))
    for token in (2, 5):
        after = tokens[:, 0] == token
        assert (accepted[after] == 1).all()
        assert_distributed(tokens[after, 1], laws[1 + token].softmax(-1))
