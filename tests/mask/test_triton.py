"""Masks inside Triton kernels: `allowed` is the dense mask, tables are those of torch; both compile everywhere."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.mask.formulas import FORMULAS, combinations, problems

from tilewright import mask as masks

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
S_K, B, H = 11, 2, 2
PACKED = "band:0 doc:2 &"
EVERY_LEAF = "band:0 doc.b:2 & prefix.b:4 | prefix.t:5 & global:6 | dilated:7 strided:8 ~ | & block:9 | block.bh:15 &"
SEARCH = settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))


def assert_same_tables(problem, device):
    from tilewright.mask import triton_tables
    from tilewright.mask.classify import Sizes

    mask, batch, heads, *sizes = problem
    for by in ("query", "key"):
        expected = masks.tile_table(mask, batch, heads, *sizes, by=by)
        found = triton_tables.build(*mask.program(device), Sizes(batch, heads, *sizes), by)
        assert torch.equal(found.counts.cpu(), expected.counts)
        used = torch.arange(expected.indices.shape[-1]) < expected.counts.sum(-1, keepdim=True)
        assert found.indices.dtype == expected.indices.dtype
        assert torch.equal(found.indices.cpu()[used], expected.indices[used])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_tile_of_a_kernel_is_the_dense_mask(device, name, transposed):
    from tests.mask.kernels import dense

    mask, _ = FORMULAS[name]
    for s_q in (11, 3, 13):
        assert torch.equal(dense(mask, B, H, s_q, S_K, device, transposed).cpu(), mask.dense(B, H, s_q, S_K))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("device", DEVICES)
def test_tables_are_those_of_torch(device, name):
    assert_same_tables((FORMULAS[name][0], B, H, 9, S_K, 2, 4), device)


@pytest.mark.parametrize("device", DEVICES)
@SEARCH
@given(problem=problems(combinations))
def test_tables_of_any_mask_are_those_of_torch(device, problem):
    assert_same_tables(problem, device)


@pytest.mark.parametrize("device", DEVICES)
def test_more_tiles_than_one_step_takes(device, monkeypatch):
    from tilewright.mask import triton_tables

    monkeypatch.setattr(triton_tables, "CHUNK", 8)
    ids = torch.arange(90).div(7, rounding_mode="floor")
    assert_same_tables((masks.causal() & masks.document(ids) | masks.prefix(5), 1, 1, 90, 90, 4, 4), device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fitted", [False, True], ids=["by id", "as sequences"])
def test_packed_documents_are_cheap(fitted):
    """131072 tokens in 1000 documents, from cu_seqlens to the table: at most 10 MB, and no synchronisation."""
    n = 131072
    cu = torch.linspace(0, n, 1001, device="cuda").int()
    mask = masks.causal() & masks.document(cu_seqlens=cu, length=n)

    def made():
        fresh = masks.causal() & masks.document(cu_seqlens=cu, length=n)
        program = (fresh.fitted(n, n) if fitted else fresh).program("cuda")
        return masks.tile_table_of(*program, 1, 32, n, n, 128, 128)

    made()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        torch.cuda.set_sync_debug_mode("error")
        table = made()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before <= 10_000_000
    expected = masks.tile_table(mask, 1, 32, n, n, 128, 128)
    assert torch.equal(table.counts.cpu(), expected.counts)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("text", [PACKED, EVERY_LEAF])
def test_kernels_compile(arch, text):
    from tests.mask.kernels import tile
    from triton.runtime.jit import MockTensor

    from tilewright.mask import triton_tables

    data, out, counts, indices = (MockTensor(d) for d in (torch.int32, torch.int8, torch.int32, torch.int16))
    numbers = (1000, 1000, 8, 8, 128, 128)
    made = [
        tile.compile(arch, (out, data, 100, 100), (text, False, 64), num_warps=4),
        triton_tables._bounds.compile(arch, (counts, data, *numbers), (text, 128), num_warps=1),
        *(
            triton_tables._table.compile(
                arch, (counts, indices, data, counts, *numbers), (text, by_key, triton_tables.CHUNK), num_warps=8
            )
            for by_key in (False, True)
        ),
    ]
    assert all(m.binary for m in made)
    if text == PACKED:
        assert [m.info["spills"] for m in made] == [0] * len(made)
