"""kv_append_ writes each new token where a loop in Python finds its slot, and no other element.

The torch backend runs in the default process, Triton in its interpreter; both against that loop, bit for bit.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.kvcache.paged import paged

from tilewright.dispatch import contract
from tilewright.errors import BackendError, InputError
from tilewright.ops import kv_append_
from tilewright.ops.quant.numbers import AMAX_MIN, INVERSE_MAX
from tilewright.validate.bits import same_bits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]
H, D, D_V = 3, 8, 5
E4M3 = torch.float8_e4m3fn
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def packed(problem, d, seed, dtype=torch.float32):
    return torch.randn(problem.rows, H, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def appended(problem, cache, x):
    """By a loop: what the cache holds afterwards."""
    wanted = cache.clone()
    for row, b, position in problem.tokens():
        wanted[problem.slot(b, position)] = x[row].to(cache.dtype)
    return wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(problem=paged())
@few
def test_each_token_is_written_to_its_slot_and_nothing_else(backend, dtype, problem):
    k_cache, v_cache = problem.cache(H, D, dtype), problem.cache(H, D_V, dtype, seed=1)
    k, v = packed(problem, D, 2, dtype), packed(problem, D_V, 3, dtype)
    wanted = appended(problem, k_cache, k), appended(problem, v_cache, v)
    lengths, options = problem.metadata()
    assert kv_append_(k_cache, v_cache, k, v, lengths, **options, backend=backend) is None
    assert same_bits(k_cache, wanted[0])
    assert same_bits(v_cache, wanted[1])


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=paged(), per_token=st.booleans())
@few
def test_e4m3(backend, problem, per_token):
    caches = [problem.cache(H, D, E4M3), problem.cache(H, D, E4M3, seed=1)]
    x = [100 * packed(problem, D, 2), packed(problem, D, 3)]
    shape = caches[0].shape[:3] if per_token else (H,)
    scales = [torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.01 for _ in caches]
    wanted_caches, wanted_scales = [c.clone() for c in caches], [s.clone() for s in scales]
    for cache, scale, rows in zip(wanted_caches, wanted_scales, x, strict=True):
        for row, b, position in problem.tokens():
            slot = problem.slot(b, position)
            factor = scale
            if per_token:
                factor = scale[slot] = rows[row].abs().amax(-1).clamp(min=AMAX_MIN) * INVERSE_MAX
            cache.view(torch.uint8)[slot] = (
                (rows[row] * (1 / factor)[:, None]).clamp(-448, 448).to(E4M3).view(torch.uint8)
            )
    lengths, options = problem.metadata()
    kv_append_(*caches, *x, lengths, **options, k_scale=scales[0], v_scale=scales[1], backend=backend)
    for made, wanted in zip((*caches, *scales), (*wanted_caches, *wanted_scales), strict=True):
        assert same_bits(made, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_in_the_table_and_lengths_beyond_it_write_nothing_elsewhere(backend, monkeypatch):
    """What the checks refuse on a CPU is the contract of a GPU, where no check reads them: such a token is dropped."""
    monkeypatch.setattr("tilewright.ops.kvcache.checks.may_read", lambda t: False)
    cache = torch.zeros(2, 4, 1, 2)
    v_cache = cache.clone()
    table = torch.tensor([[1, 2147480000], [-5, 0], [0, 1]], dtype=torch.int32)
    lengths = torch.tensor([6, 1, 99], dtype=torch.int32)
    x = torch.arange(1, 7).float()[:, None, None].expand(6, 1, 2)
    kv_append_(cache, v_cache, x, x, lengths, block_table=table, backend=backend)
    assert not cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize(
    ("lengths", "table", "match"),
    [
        ([9, 2], [[0, 1], [2, 2]], "lengths reach from 2 to 9; needs 0 to 8"),
        ([-1, 2], [[0, 1], [2, 2]], "lengths reach from -1"),
        ([5, 2], [[0, 7], [2, 2]], "pages in use reach from 0 to 7"),
        ([1, 4], [[0, 7], [2, 7]], "sequence 0 has 2 new tokens and a length of 1"),
    ],
)
def test_numbers_outside_of_the_cache_are_refused_on_a_cpu(lengths, table, match):
    cache, x = torch.zeros(3, 4, 1, 2), torch.ones(4, 1, 2)
    with pytest.raises(InputError, match=match):
        kv_append_(
            cache, cache.clone(), x, x,
            torch.tensor(lengths, dtype=torch.int32), block_table=torch.tensor(table, dtype=torch.int32),
        )  # fmt: skip
    assert not cache.any()


def test_cu_seqlens_that_falls_is_refused():
    cache, x = torch.zeros(2, 4, 1, 2), torch.ones(3, 1, 2)
    lengths, bounds = torch.tensor([4, 4], dtype=torch.int32), torch.tensor([0, 3, 2], dtype=torch.int32)
    with pytest.raises(InputError, match="must not fall"):
        kv_append_(cache, cache.clone(), x, x, lengths, cu_seqlens=bounds)


def small(**changes):
    x = torch.ones(2, 1, 4)
    values = {
        "k_cache": torch.zeros(2, 3, 1, 4), "v_cache": torch.zeros(2, 3, 1, 4), "k": x, "v": 2 * x,
        "lengths": torch.tensor([1, 2], dtype=torch.int32),
    }  # fmt: skip
    return {**values, **changes}


def test_a_gradient_is_refused_by_name():
    for name in ("k", "v", "k_cache"):
        values = small()
        values[name] = values[name].clone().requires_grad_()
        with pytest.raises(InputError, match=f"has no gradient, and {name} requires one"):
            kv_append_(**values)
        with torch.no_grad():
            kv_append_(**values)
        assert values["k_cache"].any()


def test_a_tangent_is_refused_by_name():
    values = small()
    with torch.autograd.forward_ad.dual_level():
        values["k"] = torch.autograd.forward_ad.make_dual(values["k"], values["k"])
        with pytest.raises(InputError, match="no forward mode, and k has a tangent"):
            kv_append_(**values)


def test_other_devices_are_refused():
    with pytest.raises(InputError, match="k is on meta, the cache on cpu"):
        kv_append_(**small(k=torch.ones(2, 1, 4, device="meta")))


def test_an_unknown_backend():
    with pytest.raises(BackendError):
        kv_append_(**small(), backend="cpu")


def test_autograd_learns_that_the_caches_have_changed():
    """A graph that saved the cache must not use its new content silently."""
    values = small()
    w = torch.ones(4, requires_grad=True)
    for _ in range(2):  # the second call is a replay
        y = (values["k_cache"] * w).sum()
        kv_append_(**values)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_under_compile_the_graph_breaks_nowhere_and_the_cache_is_written():
    values = small()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k_cache, v_cache, k, v, lengths):
        kv_append_(k_cache, v_cache, k + 1, v, lengths)
        return k_cache.sum() + v_cache.sum()  # reads what was written

    total = step(**values)
    assert total == values["k_cache"].sum() + values["v_cache"].sum() == 2 * 4 * (2 + 2)
    assert torch.equal(values["k_cache"][0, 0], torch.full((1, 4), 2.0))
    assert torch.equal(values["v_cache"][1, 1], torch.full((1, 4), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_that_are_parts_of_one_tensor(backend):
    """K and V side by side, as some engines keep them."""
    both = torch.zeros(2, 2, 3, 1, 4)
    values = small(k_cache=both[:, 0], v_cache=both[:, 1])
    kv_append_(**values, backend=backend)
    kv_append_(**values, backend=backend)
    assert both.sum() == 2 * 4 * (1 + 2)


def test_what_is_written_is_named_in_the_schema():
    schema = str(torch.ops.tilewright.kv_append_.default._schema)
    written = [a.name for a in torch.ops.tilewright.kv_append_.default._schema.arguments if a.alias_info is not None]
    assert written == ["k_cache", "v_cache", "k_scale", "v_scale"] == list(contract("kv_append_").forward.mutates)
    assert schema.endswith("-> ()")
