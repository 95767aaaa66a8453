"""merge_states on the kernels: the same bits wherever rows lie and however states are stacked."""

import pytest
import torch
from tests.ops.attention.test_merge_states import KERNELS, gradients, states

from tilewright import ops
from tilewright.dispatch import call, contract


def scattered(t, order):
    """The same values, dimensions 1 to 3 in another order in memory, with gaps between rows."""
    order = (0, *(1 + i for i in order), *range(4, t.dim()))
    wide = t.permute(order)
    wide = torch.cat((wide, torch.full_like(wide, torch.nan)), -1)[..., : wide.shape[-1]]
    return wide.permute([order.index(i) for i in range(t.dim())])


def assert_same(made, wanted, rtol=0.0):
    """Bits (or rtol) of o', lse' and the gradients of o; those of lse are sums of D products, in any order."""
    *made, d_lse = made
    *wanted, wanted_d_lse = wanted
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    torch.testing.assert_close(d_lse, wanted_d_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("place", KERNELS)
@pytest.mark.parametrize(("form", "n"), [("stack", 1), ("stack", 2), ("pair", 2), ("stack", 5)])
def test_any_order_in_memory_gives_the_same_bits(form, n, place):
    """Rows are found by division only where dimensions cannot be joined; both ways, and for each tensor by itself."""
    o, lse = states(n, 2, 3, 5, d=16, device=place.device)
    cotangents = torch.randn(2, 3, 5, 16, device=place.device), torch.randn(2, 3, 5, device=place.device)

    def run(o, lse, do):
        leaves = [t.detach().requires_grad_() for t in ((o, lse) if form == "stack" else (*o, *lse))]
        made = ops.merge_states(*(leaves if form == "stack" else (leaves[:2], leaves[2:])), backend=place.backend)
        grads = gradients(made, leaves, (do, cotangents[1]))
        if form == "pair":
            grads = torch.stack(grads[:2]), torch.stack(grads[2:])
        return [t.detach() for t in (*made, *grads)]

    wanted = run(o, lse, cotangents[0])
    for order, of_lse in (
        ((0, 2, 1), (0, 1, 2)),
        ((0, 1, 2), (0, 2, 1)),
        ((2, 0, 1), (1, 0, 2)),
        ((1, 2, 0), (1, 2, 0)),
    ):
        do = scattered(cotangents[0][None], of_lse)[0]
        assert_same(run(scattered(o, order), scattered(lse, of_lse), do), wanted)


@pytest.mark.parametrize("place", KERNELS)
@pytest.mark.parametrize("counts", [(1, 1), (1, 4), (3, 1), (3, 2)], ids=str)
def test_two_stacks_and_one_give_the_same(counts, place):
    """What the raw op takes: the public one has at most one state in each of two.  Bit for bit for two states; more of
    one stack are added in another order than those of two.
    """
    o, lse = states(sum(counts), 2, 3, 5, d=24, device=place.device)
    lse[0, 0, 0] = -torch.inf
    lse[:, 1, 1] = -torch.inf
    cotangents = torch.randn(2, 3, 5, 24, device=place.device), torch.randn(2, 3, 5, device=place.device)
    found = []
    for stacks in ([sum(counts)], counts):
        leaves = [
            t.clone().requires_grad_() for pair in zip(o.split(stacks), lse.split(stacks), strict=True) for t in pair
        ]
        given = (*leaves, None, None)[:4]
        made = call(contract("merge_states"), (*given, torch.float32), place.backend)
        grads = gradients(made, leaves, cotangents)
        found.append([t.detach() for t in (*made, torch.cat(grads[::2]), torch.cat(grads[1::2]))])
    assert_same(*found, rtol=0.0 if counts == (1, 1) else 1e-6)  # eight roundings


def test_dense_rows_are_found_without_a_division():
    """Sizes of 1 are constants of the kernel; where dimensions cannot be joined every place must still be right."""
    from tilewright.ops.attention.kernels.triton.merge_states import _numbers

    shape = (3, 2, 4, 5, 16)
    dense, log = (640, 320, 80, 16, 1)[:5], (40, 20, 5, 1)
    none = (0,) * 5
    assert _numbers(shape, 0, dense[1:], dense, none, log, none)[:6] == (40, 1, 1, 16, 3, 0)
    assert _numbers((2, *shape[1:]), 0, dense[1:], dense, none, log, none)[:6] == (40, 1, 1, 16, 1, 1)
    by_token = (640, 320, 16, 64, 1)
    *_, h, s = _numbers(shape, 0, by_token[1:], by_token, none, log, none)[:3]
    assert (h, s) == (4, 5)
