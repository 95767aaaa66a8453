"""mla_decode for Hopper: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

from typing import Any

import pytest
import torch
from tests.ops.attention.test_fmha_cuda import SHARED_LIMIT, needs_nvrtc, on_hopper
from torch import Tensor

from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.ops.attention.kernels.sm90 import mla_decode as cuda
from tilewright.ops.attention.kernels.sm90.mla_decode import Config
from tilewright.ops.attention.mla_decode.args import MlaDecodeArgs, bucket, problem_of
from tilewright.ops.attention.mla_decode.reference import attention
from tilewright.ops.attention.mla_decode.samples import inputs
from tilewright.ops.kvcache.mla_layout import dequantize_mla_cache

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
WHOLE = Config()._replace(cost=1 << 20)
"""No row tile is cut."""

GATHERED: tuple[dict[str, Any], ...] = ({"cache": "e4m3"}, {"topk": 100}, {"cache": "e4m3", "topk": 100})
"""What is fetched row by row."""


def problem(lengths=(300, 70), heads=128, dtype=bf16, device="cpu", seed=0, **more) -> MlaDecodeArgs:
    """more: of `samples.inputs`."""
    params = {"H": heads, "D": 576, "d_v": 512, "lengths": lengths, **more}
    return problem_of(inputs(params, dtype, torch.device(device), seed))


def run(args: MlaDecodeArgs, config: Config) -> tuple[Tensor, Tensor]:
    shape = args.q.shape[:3]
    o = torch.full((*shape, args.d_v), torch.nan, dtype=args.q.dtype, device=args.q.device)
    lse = torch.full(shape, torch.nan, device=args.q.device)
    cuda.launch((o, lse), args, config)
    return o, lse


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("bf16 or fp16", {"dtype": fp32}),
    "other widths": ("D = 576 and d_v = 512, got D = 320", {"D": 320, "d_v": 256}),
    "narrower values": ("d_v = 512, got D = 576, d_v = 448", {"d_v": 448}),
    "a scale of 0": ("a positive scale", {"scale": 0.0}),
    "no sequences": ("nothing to read", {"lengths": ()}),
}


def on(monkeypatch, arch: str) -> None:
    monkeypatch.setattr(cuda, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, change = REFUSED[case]
    on(monkeypatch, "sm_90")
    assert words in str(cuda.why_not(problem(**change)))


def test_other_gpus_are_refused(monkeypatch):
    on(monkeypatch, "sm_100")
    assert "sm_90" in str(cuda.why_not(problem()))


def test_views_are_taken_where_the_copies_can_follow_them(monkeypatch):
    on(monkeypatch, "sm_90")
    args = problem(S_q=2)
    assert cuda.why_not(args) is None
    wide = torch.empty(2, 2, 130, 576, dtype=bf16)
    assert "one stride" in str(cuda.why_not(args._replace(q=wide[:, :, :128])))
    assert cuda.why_not(args._replace(q=wide[:, :1, :128])) is None
    assert "16 bytes" in str(cuda.why_not(args._replace(q=torch.empty(2, 2, 128, 580, dtype=bf16)[..., :576])))


@pytest.mark.parametrize("page", [None, 1, 24, 64, 256])
def test_pages_of_any_size_are_taken(monkeypatch, page):
    on(monkeypatch, "sm_90")
    assert cuda.why_not(problem(page=page)) is None


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernels and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls = [], []
        monkeypatch.setattr(cuda, "tensor_map", lambda t, box, swizzle: self.maps.append((tuple(t.shape), box)))
        monkeypatch.setattr(cuda, "usable_sms", lambda _: 132)
        for name in ("KERNEL", "COMBINE"):
            monkeypatch.setattr(cuda, name, lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


@pytest.mark.parametrize(
    ("change", "tiles"),
    [
        ({"heads": 128}, 2),
        ({"heads": 16}, 1),
        ({"heads": 65}, 2),
        ({"heads": 128, "S_q": 2}, 4),
        ({"heads": 48, "S_q": 4}, 3),
    ],
)
def test_tiles_of_64_rows(launches, change, tiles):
    run(problem((4000, 70), page=64, **change), Config())
    grid, args, _, options = launches.calls[0]
    assert (args.tiles, args.rows) == (tiles, change["heads"] * change.get("S_q", 1))
    assert grid == (132,)
    assert (args.blocks, options["block"]) == (132, 512)


@pytest.mark.parametrize(("page", "rows"), [(None, 64), (1, 1), (16, 16), (24, 8), (64, 64), (96, 32), (128, 64)])
def test_a_box_lies_in_one_page(launches, page, rows):
    args = problem(page=page)
    run(args, Config())
    assert launches.maps == [((2, 128, 576), (1, 64, 64)), (tuple(args.kv_cache.shape), (1, rows, 64))]


def test_the_second_kernel_has_warps_for_every_tile_that_may_be_cut(launches):
    run(problem((8192,)), Config())
    grid, args, _, _ = launches.calls[1]
    assert (grid, args.warps_each) == ((2, 64), 16), "a block for each of 64 rows of two tiles"
    run(problem((640,) * 80), Config())
    grid, args, _, _ = launches.calls[3]
    assert (grid, args.warps_each) == ((131, 4), 1), "one share ends in each block but the last"


@pytest.mark.parametrize("change", [{"lengths": (64, 100)}, {"lengths": (4000, 70)}])
def test_short_and_batch_invariant_rows_stay_whole(launches, change):
    args = problem(**change)
    run(args._replace(batch_invariant=change["lengths"][0] > 256), Config())
    (_, given, _, _), *others = launches.calls
    assert given.least == 0
    assert not others


@pytest.mark.parametrize("change", GATHERED)
def test_tokens_of_an_index_have_their_own_keys(launches, change):
    args = problem((300, 70), S_q=3, page=64, **change)
    run(args, Config())
    _, given, params, _ = launches.calls[0]
    assert (params.kPacked, params.kSparse) == ("cache" in change, "topk" in change)
    assert (given.batches, given.each, given.rows) == ((6, 3, 128) if "topk" in change else (2, 1, 384))
    assert (given.row_units, given.page_units) == ((41, 41 * 64) if "cache" in change else (72, 72 * 64))


def test_every_config_fits_shared_memory():
    for config in cuda.CONFIGS:
        for change in ({}, *GATHERED):
            params = cuda.params(problem(page=64, **change), config)
            assert cuda.shared_bytes(params) + 2048 <= SHARED_LIMIT
    for heads in (16, 128):
        sizes = bucket(problem(heads=heads))
        assert cuda.configure(sizes, bf16) in cuda.candidates(sizes, bf16)
        assert set(cuda.candidates(sizes, bf16)) <= set(cuda.CONFIGS)


def test_triton_keeps_what_it_does_faster():
    taken = {
        name: cuda.configure(bucket(problem(**change)), bf16) is not None
        for name, change in {
            "dense": {"lengths": (8192,)},
            "packed": {"cache": "e4m3"},
            "packed, one sequence": {"cache": "e4m3", "lengths": (8192,)},
            "chosen": {"topk": 100},
            "chosen, packed": {"topk": 100, "cache": "e4m3"},
        }.items()
    }
    assert [name for name in taken if not taken[name]] == ["packed, one sequence", "chosen"]


# ----------------------------------------------------------------------------------------------- what it compiles


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("config", cuda.CONFIGS)
@pytest.mark.parametrize("change", [{}, {"heads": 16, "page": 1}, {"dtype": fp16, "page": 64}], ids=str)
def test_products_use_the_matrix_units_and_spill_nothing(change, config):
    with collect("sm_90") as collector:
        run(problem((4000, 70), **change), config)
    kernel, combine = (job.compile().info for job in collector.jobs)
    assert kernel["instructions"]["HGMMA"] == 36 + 2 * 2 * 4, "36 steps of S; of P V four in two parts, for both halves"
    assert kernel["instructions"]["UTMALDG"] >= 9
    for info in (kernel, combine):
        assert info["spill_stores"] == 0
        assert info["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("change", GATHERED, ids=str)
@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_gathering_leaves_the_products_as_they_are(dtype, change):
    with collect("sm_90") as collector:
        run(problem((4000, 70), page=64, dtype=dtype, **change), Config())
    kernel = collector.jobs[0].compile().info
    assert kernel["instructions"]["HGMMA"] == 36 + 2 * 2 * 4
    assert kernel["warnings"] == []
    assert kernel["spill_stores"] == 0


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED: dict[str, dict[str, Any]] = {
    "one key tile": {"lengths": (64,)},
    "lengths": {"lengths": (0, 1, 63, 64, 65, 1000)},
    "cut": {"lengths": (9000,)},
    "cut, sinks": {"lengths": (20, 140, 4096, 0), "sinks": True},
    "16 heads": {"heads": 16, "lengths": (20, 140, 4096)},
    "9 heads": {"heads": 9, "lengths": (20, 140, 4096)},
    "126 heads": {"heads": 126, "lengths": (20, 140, 4096)},
    "tokens": {"heads": 16, "S_q": 4, "lengths": (1, 3, 64, 1000)},
    "tokens of three tiles": {"heads": 63, "S_q": 3, "lengths": (1, 2, 130, 1000)},
    "tokens, not causal": {"heads": 128, "S_q": 2, "lengths": (1, 64, 1000), "causal": False},
    "many": {"lengths": tuple(37 * b % 700 for b in range(150))},
    "several tiles a block": {"lengths": (512,) * 80},
    "several tiles a block, pages": {"lengths": (1024,) * 140, "page": 64},
    "many keys": {"lengths": (65536,), "page": 64},
    "many keys, odd": {"lengths": (16385, 4097, 12345, 1), "page": 16},
    "many keys, pages of 1": {"lengths": (16384, 777), "page": 1, "heads": 16},
    "fp16": {"dtype": fp16, "lengths": (20, 140, 4096)},
    **{f"pages of {n}": {"page": n, "lengths": (1, 130, 2222), "heads": 64} for n in (1, 7, 16, 24, 64, 128)},
    "656 bytes": {"cache": "e4m3", "page": 64, "lengths": (1, 130, 2222, 0)},
    "656 bytes, tokens": {"cache": "e4m3", "heads": 63, "S_q": 3, "lengths": (1, 130, 2222), "sinks": True},
    "656 bytes, fp16": {"cache": "e4m3", "page": 24, "lengths": (1, 130, 2222), "dtype": fp16},
    "indices": {"topk": 300, "page": 64, "heads": 16, "S_q": 2, "lengths": (1, 130, 2222)},
    "indices, lengths": {"topk": 300, "topk_lengths": (0, 65, 300), "page": 64, "lengths": (1, 130, 2222)},
    "indices, 656 bytes": {"topk": 2048, "cache": "e4m3", "page": 64, "S_q": 2, "lengths": (100, 4000)},
    "pages, shared": {"page": 64, "lengths": (200, 700, 2222), "shared": 3},
}


def judged(args: MlaDecodeArgs, config: Config) -> None:
    """Near float64's over the keys that are multiplied, and the same bits again."""
    kv = dequantize_mla_cache(args.kv_cache, args.q.dtype) if args.is_packed else args.kv_cache
    sinks = None if args.sinks is None else args.sinks.double()
    exact, exact_lse = attention(args._replace(q=args.q.double(), kv_cache=kv.double(), sinks=sinks))
    o, lse = run(args, config)
    assert (o.double() - exact).norm() <= 6e-3 * exact.norm()
    assert (o.double() - exact).abs().max() <= 2e-2 * exact.abs().max()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3)
    again, again_lse = run(args, config)
    assert torch.equal(o, again)
    assert torch.equal(lse, again_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_computed(case):
    on_hopper()
    args = problem(device="cuda", unused="nan", **COMPUTED[case])
    for config in (*cuda.CONFIGS, WHOLE):
        judged(args, config)


@pytest.mark.gpu
def test_one_graph_serves_changing_lengths_and_tables():
    on_hopper()
    args = problem((300, 4000, 0), page=64, device="cuda")
    other = problem((4000, 1, 900), page=64, device="cuda", seed=1)
    width = max(args.block_table.shape[1], other.block_table.shape[1])
    pages = max(args.kv_cache.shape[0], other.kv_cache.shape[0])
    table = torch.zeros(3, width, dtype=torch.int32, device="cuda")
    held = args._replace(
        q=args.q.clone(),
        kv_cache=torch.zeros(pages, 64, 576, dtype=bf16, device="cuda"),
        lengths=args.lengths.clone(),
        block_table=table,
    )
    run(held, Config())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(held, Config())
    for given in (args, other, args):
        held.q.copy_(given.q)
        held.kv_cache[: given.kv_cache.shape[0]].copy_(given.kv_cache)
        held.lengths.copy_(given.lengths)
        table[:, : given.block_table.shape[1]].copy_(given.block_table)
        graph.replay()
        exact, _ = attention(held._replace(q=held.q.double(), kv_cache=held.kv_cache.double()))
        assert (outs[0].double() - exact).norm() <= 6e-3 * exact.norm()


REPEATED: dict[str, tuple[tuple[int, ...], Config]] = {
    "lengths": (tuple(37 * b % 1500 for b in range(40)), Config()),
    "many keys": ((4096,) * 64, Config()),
    "row tiles one after another": ((1024,) * 160, WHOLE),
    "cut, and one after another": ((4096,) * 80, Config()),
}
"""Queries of a second row tile come into stages that the first one's keys leave: once they were read too late."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", REPEATED)
def test_a_thousand_repeats_give_the_same_bits(case):
    on_hopper()
    lengths, config = REPEATED[case]
    args = problem(lengths, page=64, device="cuda")
    o, lse = run(args, config)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again, again_lse = run(args, config)
        differ += (o != again).any() | (lse != again_lse).any()
    assert int(differ) == 0
