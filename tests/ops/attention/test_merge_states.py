"""merge_states: pieces of attention make the whole, there and back; forms, layouts, states that saw no key, bounds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.attention.bounds import problem
from tests.ops.gemm.bounds import Place

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import contract, numerics, record
from tilewright.errors import InputError
from tilewright.ops.attention.peers.merge_states import PEERS
from tilewright.ops.rows import generator

HALF = torch.bfloat16
KERNELS = [
    pytest.param(Place("cpu", "triton"), id="cpu-triton", marks=pytest.mark.interp),
    pytest.param(Place("cuda", "triton"), id="triton", marks=pytest.mark.gpu),
]
PLACES = [
    pytest.param(Place("cpu", "torch"), id="cpu-torch"),
    pytest.param(Place("cuda", "torch"), id="torch", marks=pytest.mark.gpu),
    *KERNELS,
]
on_every_place = pytest.mark.parametrize("place", PLACES)


def states(n, *lead, d=16, dtype=torch.float32, device="cpu"):
    """Stacks (N, ..., D) and (N, ...)."""
    return torch.randn(n, *lead, d).to(device, dtype), 3 * torch.randn(n, *lead).to(device)


def formula(o, lse):
    """In float64, of finite states."""
    o, lse = o.double(), lse.double()
    return (torch.softmax(lse, 0).unsqueeze(-1) * o).sum(0), torch.logsumexp(lse, 0)


def gradients(made, leaves, cotangents):
    return torch.autograd.grad(made, leaves, cotangents)


def assert_near(made, wanted, relative):
    """By the norm of the whole: single gradients may cancel to anything."""
    made, wanted = made.detach().double(), wanted.detach().double()
    assert float((made - wanted).norm()) <= relative * float(wanted.norm())


# Pieces of attention.

CUTS = {"two": (30,), "uneven": (1, 7, 40), "with an empty one": (20, 20)}


def attend(q, k, v, mask):
    return ops.fmha(q, k, v, mask=mask, return_lse=True, backend="torch")


def in_pieces(q, k, v, cuts, place, form, causal):
    """Attention to blocks of keys, each under the part of the mask that is its own, then merged."""
    s_k, found = k.shape[2], []
    for start, end in zip((0, *cuts), (*cuts, s_k), strict=True):
        # in a block the last query counts as its last key's position: s_k - end too early
        mask = masks.window(None, s_k - end) if causal else None
        found.append(attend(q, k[:, :, start:end], v[:, :, start:end], mask))
    outs, lses = [o for o, _ in found], [lse for _, lse in found]
    if form == "stack":
        return ops.merge_states(torch.stack(outs), torch.stack(lses), backend=place.backend)
    if form == "list":
        return ops.merge_states(outs, lses, backend=place.backend)
    o, lse = outs[0], lses[0]
    for piece, log in zip(outs[1:], lses[1:], strict=True):
        o, lse = ops.merge_states((o, piece), (lse, log), out_dtype=torch.float32, backend=place.backend)
    return o.to(q.dtype), lse


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("form", ["stack", "list", "ring"])
@pytest.mark.parametrize("cuts", CUTS, ids=lambda name: name.replace(" ", "_"))
def test_pieces_make_the_whole(cuts, form, causal, dtype, place):
    """Values and all gradients.  Causal, the first queries see nothing of the last blocks."""
    tensors = problem(1, 2, 1, 20, 45, 16, dtype=dtype, device=place.device)
    leaves = [t.requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    whole = attend(*wide, masks.causal() if causal else None)
    made = in_pieces(*leaves, CUTS[cuts], place, form, causal)
    cotangents = [torch.randn_like(t) for t in made]
    wanted = gradients(whole, wide, [c.double() for c in cotangents])
    # two roundings of values and weights to the dtype, in the pieces and in the result, and in the gradients one more
    off = 4 * torch.finfo(dtype).eps if dtype == HALF else 1e-5
    for ours, exact in zip(made, whole, strict=True):
        assert_near(ours, exact, off)
    for ours, exact in zip(gradients(made, leaves, cotangents), wanted, strict=True):
        assert ours.dtype == dtype
        assert_near(ours, exact, 2 * off)


# Values, against the formula.


def bound(o, lse, dtype):
    """How far an element may be: a rounding of each product and sum, those of the weights, and one to `dtype`.

    A weight is off by what exp and a division are, and by how far lse_i - max is rounded.
    """
    weights = torch.softmax(lse.double(), 0).unsqueeze(-1)
    distance = (lse.amax(0) - lse).double().unsqueeze(-1)
    steps = 2.0**-24 * (2 * o.shape[0] + 16 + 2 * distance)
    exact = (weights * o.double()).sum(0)
    return (steps * weights * o.double().abs()).sum(0) + exact.abs() * torch.finfo(dtype).eps / 2 + 1e-37


def assert_exact(made, o, lse, dtype):
    wanted, wanted_lse = formula(o, lse)
    assert made[0].dtype == dtype
    assert made[1].dtype == torch.float32
    assert bool(((made[0].double() - wanted).abs() <= bound(o, lse, dtype)).all())
    torch.testing.assert_close(made[1].double(), wanted_lse, rtol=1e-6, atol=2e-6)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@on_every_place
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 9),
    lead=SHAPES,
    d=st.integers(1, 40),
    dtype=st.sampled_from([HALF, torch.float16, torch.float32]),
    listed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_number_of_states_of_any_shape(place, n, lead, d, dtype, listed, seed):
    g = generator(seed)
    o, lse = torch.randn(n, *lead, d, generator=g).to(dtype), 5 * torch.randn(n, *lead, generator=g)
    o, lse = o.to(place.device), lse.to(place.device)
    given = (list(o), list(lse)) if listed else (o, lse)
    made = ops.merge_states(*given, backend=place.backend)
    assert made[0].shape == (*lead, d)
    assert made[1].shape == tuple(lead)
    assert_exact(made, o, lse, dtype)


@on_every_place
@pytest.mark.parametrize("n", [32, 300])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_more_states_than_a_tile_of_them_holds(n, dtype, place):
    """Rows in parts, too; the states after the first tile have most of the weight."""
    o, lse = states(n, 3, d=100, dtype=dtype, device=place.device)
    lse[n // 2 :] += 5.0
    assert_exact(ops.merge_states(o, lse, backend=place.backend), o, lse, dtype)
    o[n - 1, 1], lse[n - 1, 1] = torch.nan, -torch.inf
    made = ops.merge_states(o, lse, backend=place.backend)
    assert_exact(tuple(t[1] for t in made), o[: n - 1, 1], lse[: n - 1, 1], dtype)


@on_every_place
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 1, 1), (1, 5, 1), (3, 1, 1, 1, 1), (2, 1, 1, 33), (1, 2, 2, 2, 7)], ids=str
)
def test_sizes_of_one(shape, place):
    """Triton makes a constant of every size and stride that is 1."""
    o, lse = states(*shape[:-1], d=shape[-1], device=place.device)
    o, lse = o.requires_grad_(), lse.requires_grad_()
    made = ops.merge_states(o, lse, backend=place.backend)
    assert_exact(made, o.detach(), lse.detach(), torch.float32)
    cotangents = [torch.randn_like(t) for t in made]
    wide = [o.detach().double().requires_grad_(), lse.detach().double().requires_grad_()]
    wanted = gradients(formula(*wide), wide, [c.double() for c in cotangents])
    for ours, exact in zip(gradients(made, (o, lse), cotangents), wanted, strict=True):
        # do . o_i of D products is off by a rounding of each
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5 * shape[-1] ** 0.5)


@on_every_place
def test_one_state_is_copied(place):
    o, lse = states(1, 3, 4, device=place.device)
    before = o.clone(), lse.clone()
    made = ops.merge_states(o, lse, backend=place.backend)
    assert torch.equal(made[0], o[0])
    torch.testing.assert_close(made[1], lse[0], rtol=0, atol=0)
    for t in made:
        t.zero_()
    assert torch.equal(o, before[0])
    assert torch.equal(lse, before[1])


@on_every_place
def test_the_scale_of_logarithms_does_not_matter(place):
    o, lse = states(3, 2, 5, device=place.device)
    lse = (8 * lse).round() / 8  # so that adding a large number rounds nothing
    o_here, lse_here = ops.merge_states(o, lse, backend=place.backend)
    for shift in (1e4, -1e4):
        made = ops.merge_states(o, lse + shift, backend=place.backend)
        assert torch.equal(made[0], o_here)
        torch.testing.assert_close(made[1], lse_here + shift, rtol=2e-7, atol=0)


# Forms.


@on_every_place
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_two_tensors_and_a_stack_of_two_give_the_same_bits(dtype, place):
    o, lse = states(2, 2, 3, 5, d=24, dtype=dtype, device=place.device)
    lse[0, 0, 0] = -torch.inf
    lse[:, 1, 1] = -torch.inf
    found = []
    for form in ("stack", "pair"):
        leaves = [t.clone().requires_grad_() for t in ((o, lse) if form == "stack" else (*o, *lse))]
        given = leaves if form == "stack" else (leaves[:2], leaves[2:])
        made = ops.merge_states(*given, backend=place.backend)
        torch.manual_seed(1)
        grads = gradients(made, leaves, [torch.randn_like(t) for t in made])
        if form == "pair":
            grads = (torch.stack(grads[:2]), torch.stack(grads[2:]))
        found.append([t.detach() for t in (*made, *grads)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@on_every_place
def test_only_some_want_a_gradient(place):
    o, lse = states(2, 3, 5, device=place.device)
    for wanted in ((0,), (1,), (2,), (3,), (0, 3)):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((*o, *lse))]
        made = ops.merge_states(leaves[:2], leaves[2:], backend=place.backend)
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
        whole = formula(torch.stack(exact[:2]), torch.stack(exact[2:]))
        for used in ((0,), (1,), (0, 1)) if set(wanted) & {2, 3} else ((0,),):  # lse does not depend on o
            cotangents = [torch.randn_like(made[i]) for i in used]
            ours, true = (
                torch.autograd.grad([m[i] for i in used], [t for t in given if t.requires_grad],
                                    [c.to(m[i]) for i, c in zip(used, cotangents, strict=True)],
                                    retain_graph=True, allow_unused=True, materialize_grads=True)
                for m, given in ((made, leaves), (whole, exact))
            )  # fmt: skip
            for a, b in zip(ours, true, strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@on_every_place
def test_a_sum_in_float32_and_a_state_in_half(place):
    o, lse = states(2, 3, 5, device=place.device)
    late = o[1].to(HALF)
    made = ops.merge_states((o[0], late), tuple(lse), backend=place.backend)
    assert_exact(made, torch.stack((o[0], late.float())), lse, torch.float32)
    assert ops.merge_states((late, o[0]), tuple(lse), backend=place.backend)[0].dtype == torch.float32
    rounded = ops.merge_states((o[0], late), tuple(lse), out_dtype=HALF, backend=place.backend)
    assert torch.equal(rounded[0], made[0].to(HALF))
    mixed = ops.merge_states((o[0], late, late), (*lse, lse[0]), backend=place.backend)
    assert_exact(mixed, torch.stack((o[0], late.float(), late.float())), torch.cat((lse, lse[:1])), torch.float32)


@on_every_place
def test_tensors_lie_where_they_lay(place):
    """Two states are not copied, and the result has the order of the first."""
    first, second = (torch.randn(2, 7, 3, 16, device=place.device).transpose(1, 2) for _ in range(2))
    logs = [torch.randn(2, 7, 3, device=place.device).transpose(1, 2) for _ in range(2)]
    with record() as notes:
        made = ops.merge_states((first, second), logs, backend=place.backend)
    _, raw, *_ = notes.calls[0]
    assert [t.data_ptr() for t in raw[:4]] == [t.data_ptr() for t in (first, logs[0], second, logs[1])]
    assert made[0].stride() == first.stride()
    assert_exact(made, torch.stack((first, second)), torch.stack(logs), torch.float32)
    packed = torch.randn(2, 9, 3, 16, device=place.device), torch.randn(2, 3, 9, device=place.device).transpose(1, 2)
    assert_exact(ops.merge_states(*packed, backend=place.backend), *packed, torch.float32)


# States that saw no key.


@on_every_place
@pytest.mark.parametrize("listed", [False, True])
def test_what_a_state_without_keys_holds_is_not_read(listed, place):
    o, lse = (t.requires_grad_() for t in states(3, 2, 5, device=place.device))
    blind, blind_lse = o.detach().clone(), lse.detach().clone()
    blind_lse[1, 0], blind_lse[:, 1, 2] = -torch.inf, -torch.inf
    blind[1, 0], blind[:, 1, 2] = torch.nan, torch.inf
    o, lse = blind.requires_grad_(), blind_lse.requires_grad_()
    made = ops.merge_states(*((list(o), list(lse)) if listed else (o, lse)), backend=place.backend)
    without = ops.merge_states(o.detach()[[0, 2], 0], lse.detach()[[0, 2], 0], backend=place.backend)
    torch.testing.assert_close(made[0][0].detach(), without[0], rtol=1e-6, atol=1e-6)
    assert not made[0][1, 2].any()
    assert made[1][1, 2].item() == -torch.inf
    grads = gradients(made, (o, lse), [torch.randn_like(t) for t in made])
    for grad in grads:
        assert bool(grad.isfinite().all())
        assert not grad[1, 0].any()
        assert not grad[:, 1, 2].any()
        assert bool(grad[0, 0].any())


@on_every_place
def test_nan_and_infinity_of_states_with_keys_arrive(place):
    o, lse = states(2, 4, device=place.device)
    o[0, 0, 3], o[1, 1, 5], lse[0, 2] = torch.nan, torch.inf, torch.nan
    made = ops.merge_states(o, lse, backend=place.backend)
    assert made[0][:2].isnan().nonzero().tolist() == [[0, 3]]
    assert made[0][:2].isinf().nonzero().tolist() == [[1, 5]]
    assert bool(made[0][2].isnan().all())
    assert made[1].isnan().nonzero().tolist() == [[2]]
    assert bool(made[0][3].isfinite().all())


# Gradients, promises, modes.


@pytest.mark.parametrize("form", ["stack", "pair"])
@pytest.mark.parametrize("blind", [False, True])
def test_finite_differences(blind, form):
    o, lse = (t.double() for t in states(2, 2, 3, d=4))
    if blind:
        lse[0, 0], lse[:, 1, 1] = -torch.inf, -torch.inf
    seen = lse != -torch.inf

    def call(states, offsets):
        logs = torch.where(seen, offsets, -torch.inf)
        given = (states, logs) if form == "stack" else (list(states), list(logs))
        made, merged = ops.merge_states(*given, backend="torch")
        return made, torch.where(merged == -torch.inf, 0.0, merged)

    offsets = torch.where(seen, lse, 0.0)
    assert torch.autograd.gradcheck(call, (o.requires_grad_(), offsets.requires_grad_()))


@pytest.mark.parametrize("place", KERNELS)
def test_a_row_has_the_same_bits_alone(place):
    o, lse = states(3, 300, device=place.device)
    with numerics("batch_invariant"):
        many = ops.merge_states(o, lse, backend=place.backend)
        for row in (0, 137, 299):
            alone = ops.merge_states(o[:, row : row + 1], lse[:, row : row + 1], backend=place.backend)
            assert torch.equal(alone[0][0], many[0][row])
            assert torch.equal(alone[1][0], many[1][row])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", ["stack", "pair", "list"])
def test_compiled(form, dynamic):
    """One graph, forward and backward."""
    count = 3 if form == "list" else 2
    torch._dynamo.reset()
    compiled = torch.compile(ops.merge_states, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (6, 9):
        o, lse = states(count, 2, length)
        results = []
        for function in (ops.merge_states, compiled):
            leaves = [t.clone().requires_grad_() for t in ((o, lse) if form == "stack" else (*o, *lse))]
            made = function(*(leaves if form == "stack" else (leaves[:count], leaves[count:])), backend="torch")
            ones = [torch.ones_like(t) for t in made]
            results.append([*made, *gradients(made, leaves, ones)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_out_of_autocast():
    o, lse = states(3, 2, 5, dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((o, lse), (list(o), list(lse)), (list(o[:2]), list(lse[:2]))):
            made = ops.merge_states(*given)
            assert [t.dtype for t in made] == [torch.float16, torch.float32]


@pytest.mark.parametrize("form", ["stack", "pair", "ring"])
def test_peers_compute_the_same(form):
    sizes = {"N": 2, "B": 2, "H": 3, "S": 5, "D": 16}
    subject = contract("merge_states")
    sample = subject.inputs({**sizes, "form": form}, torch.float32, torch.device("cpu"), 0)
    (peer,) = PEERS
    call = peer.make(sample)
    assert call is not None
    for a, b in zip(call(), subject.reference(*sample.args, **sample.kwargs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert peer.make(subject.inputs({**sizes, "N": 3}, torch.float32, torch.device("cpu"), 0)) is None


def test_costs_are_those_of_the_tensors():
    subject = contract("merge_states")
    for form, states_bytes, result in (("stack", 2 * 30 * 36, 30 * 36), ("ring", 30 * (68 + 36), 30 * 68)):
        sizes = {"N": 2, "B": 2, "H": 3, "S": 5, "D": 16, "form": form}
        sample = subject.inputs(sizes, HALF, torch.device("cpu"), 0)
        there, back = (subject.cost(sample, direction) for direction in ("fwd", "bwd"))
        assert (there.bytes_read, there.bytes_written) == (states_bytes, result)
        assert (back.bytes_read, back.bytes_written) == (states_bytes + result, states_bytes)


def test_errors_are_words():
    o, lse = states(2, 3, 5)
    with pytest.raises(InputError, match="needs two tensors, stacks of states, or two sequences"):
        ops.merge_states(o, list(lse))
    with pytest.raises(InputError, match="lse is a NoneType"):
        ops.merge_states([o[0]], [None])
    with pytest.raises(InputError, match="needs float32, as fmha gives it"):
        ops.merge_states(o, lse.double())
