"""moe_align: a stable sort, whatever the ids."""

import pytest
import torch
from tests.ops.sampling.places import TORCH, everywhere

from tilewright import ops
from tilewright.errors import InputError


@everywhere
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (40, 3, 5), (333, 2, 17), (700, 4, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_it_is_a_stable_sort(tokens, k, experts, dtype, place):
    ids = torch.randint(-1, experts, (tokens, k), dtype=dtype).to(place.device)
    slots, positions, starts, ends = (t.tolist() for t in ops.moe_align(ids, experts, backend=place.backend))
    flat = ids.flatten().tolist()
    assert slots == sorted(range(len(flat)), key=lambda i: (flat[i] < 0, flat[i], i))
    for row, slot in enumerate(slots):
        assert positions[slot // k][slot % k] == (row if flat[slot] >= 0 else -1)
    for expert in range(experts):
        assert [flat[slot] for slot in slots[starts[expert] : ends[expert]]] == [expert] * flat.count(expert)


@everywhere
def test_groups_go_into_a_grouped_product(place):
    ids = torch.tensor([[2], [0], [2], [1]], device=place.device)
    slots, positions, _, ends = ops.moe_align(ids, 4, backend=place.backend)
    x, w = torch.randn(4, 8, device=place.device), torch.randn(4, 8, 8, device=place.device)
    y = ops.grouped_matmul(ops.moe_permute(x, slots, positions), w, ends)
    back = ops.moe_unpermute(y, torch.ones(4, 1, device=place.device), slots, positions)
    torch.testing.assert_close(back, torch.stack([x[t] @ w[int(e)] for t, e in enumerate(ids)]), rtol=1e-4, atol=1e-4)


def test_ids_that_are_no_experts():
    for wrong, named in ((5, "5"), (-2, "-2")):
        ids = torch.tensor([[0, 1], [wrong, 2]])
        with pytest.raises(InputError, match=rf"topk_ids has {named}; needs -1 \(dropped\) to 4"):
            ops.moe_align(ids, 5)
    with pytest.raises(InputError, match="needs -1 .* to 2"):
        ops.moe_align(torch.tensor([[3]]), 1, expert_map=torch.tensor([0, -1, -1], dtype=torch.int32))


@pytest.mark.gpu
def test_ids_are_looked_at_where_the_settings_say_so(monkeypatch):
    from tilewright import settings

    ids = torch.tensor([[0, 1], [7, 2]], device="cuda")
    slots, positions, _, ends = ops.moe_align(ids, 5)
    assert positions.tolist() == [[0, 1], [-1, 2]]
    assert slots.tolist() == [0, 1, 3, 2]
    assert ends.tolist() == [1, 2, 3, 3, 3]
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    settings.reload()
    try:
        with pytest.raises(InputError, match="topk_ids has 7"):
            ops.moe_align(ids, 5)
    finally:
        monkeypatch.delenv("TILEWRIGHT_CHECK")
        settings.reload()


def test_the_map_says_which_experts_are_here():
    """Experts 1 and 3 of four are 0 and 1 here."""
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    slots, positions, starts, ends = ops.moe_align(
        torch.tensor([[3, 0], [1, 2], [1, 3]]), 2, expert_map=expert_map, backend=TORCH.backend
    )
    assert slots.tolist() == [2, 4, 0, 5, 1, 3]
    assert positions.tolist() == [[2, -1], [0, -1], [1, 3]]
    assert (starts.tolist(), ends.tolist()) == ([0, 2], [2, 4])
