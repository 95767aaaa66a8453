"""Attention over a KV cache for Hopper: what it refuses, chooses and launches; on a Hopper GPU, what it computes."""

from itertools import product

import pytest
import torch
from tests.ops.attention.caches import problem
from tests.ops.attention.test_fmha_cuda import SHARED_LIMIT, on_hopper

from tilewright import numerics
from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.attention.kernels.sm90 import decode as cuda
from tilewright.ops.attention.kernels.sm90 import decode_choice as choice
from tilewright.ops.attention.kernels.sm90.decode_choice import Config, Division
from tilewright.ops.attention.paged.args import PagedBucket, bucket, problem_of
from tilewright.ops.attention.paged.reference import attention
from tilewright.ops.attention.paged.samples import int32

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SIZES = {"H": 8, "H_kv": 2, "D": 64, "lengths": (37, 1, 64, 21)}
MIXED = (1500, 0, 3, 16, 255, 1, 700)


def raw(dtype=bf16, device="cpu", **params):
    """Raw arguments of a problem with unused slots of NaN."""
    return problem_of(problem({**SIZES, **params}, dtype, device))


def run(args, config):
    """o and lse of one launch, over poison."""
    (tokens, heads, d), device = args.q.shape, args.q.device
    o = torch.full((tokens, heads, d), torch.nan, dtype=args.q.dtype, device=device)
    lse = torch.full((tokens, heads), torch.nan, device=device)
    cuda.launch((o, lse), args, config)
    return o, lse


def configs_of(args):
    return choice.candidates(bucket(args), args.q.dtype)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "another GPU": ("sm_90", "sm_80", {}),
    "float32": ("bf16 or fp16", "sm_90", {"dtype": fp32}),
    "a width": ("D = D_v of 64, 128, 256, got D=80", "sm_90", {"D": 80}),
    "rows": ("at most 16 query rows of 128 numbers, got 24", "sm_90", {"D": 128, "H": 16, "S_q": 3}),
    "prefills": ("no more than sequences", "sm_90", {"new": (1, 9, 2, 1)}),
    "two widths": ("got D=128, D_v=64", "sm_90", {"D": 128, "D_v": 64}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(cuda, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    assert words in str(cuda.why_not(raw(**change)))
    assert (cuda.why_not(raw()) is None) == (arch == "sm_90")


def test_unaligned_rows_and_too_many_units_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "device_info", lambda _: DeviceInfo("a GPU", "sm_90", 132, 0, 0))
    args = raw()
    wide = torch.zeros(*args.k_cache.shape[:3], 68, dtype=bf16)
    assert "16 bytes" in str(cuda.why_not(args._replace(k_cache=wide[..., 1:65])))
    table = torch.zeros(1, 1, dtype=torch.int32).expand(4, 1 << 30)
    assert "units of 16 keys" in str(cuda.why_not(args._replace(block_table=table)))


def test_packed_tokens_under_batch_invariance_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "device_info", lambda _: DeviceInfo("a GPU", "sm_90", 132, 0, 0))
    args = raw(new=(1, 0, 2, 1))
    assert cuda.why_not(args) is None
    assert "batch_invariant" in str(cuda.why_not(args._replace(batch_invariant=True)))


# ----------------------------------------------------------------------------------------------- what it chooses

BUCKETS = [
    PagedBucket(b, b * max(s_q, 1), keys, s_q, h_kv, group, d, d, page, cache, 0, 1)
    for b, s_q, keys, h_kv, group, d, page, cache in product(
        (1, 8, 128), (0, 1, 4), (512, 8192, 1 << 18), (1, 8), (1, 4, 8), (64, 128, 256), (0, 16), (0, 1, 2)
    )
]


def test_every_choice_is_declared_and_fits():
    declared = set(choice.configs())
    for each in BUCKETS:
        found = choice.candidates(each, bf16)
        assert set(found) <= declared
        assert choice.configure(each, bf16) in (*found, None)
        assert (not found) == (max(each.S_q, 1) * each.group * each.D > 2048)


def test_shared_memory_holds_every_config():
    for width, cache in product(choice.WIDTHS, range(3)):
        unit = choice.unit_of(width, cache, bf16)
        for config in choice.configs():
            if config not in set(choice.space(unit, config.rows)):
                continue
            division = Division.CLUSTER if config.cluster > 1 else Division.EQUAL
            dtype = bf16 if cache == 0 else torch.float8_e4m3fn
            sizes = config.rows, config.keys, config.warps, config.warps, config.stages
            params = cuda.Params(width, *sizes, division.value, config.cluster, cache == 2, bf16, dtype)
            taken = choice.shared_bytes(params)
            assert config.shares * (taken + 1024) <= SHARED_LIMIT + 1024
            assert config.stages * unit.stage_bytes * config.warps <= taken


def test_clusters_serve_few_row_tiles_of_few_keys():
    """Of all blocks 64 find room at once in clusters of four and more, 128 in pairs (measured on an H200)."""
    of = BUCKETS[0]._replace(S_q=1, H_kv=8, group=4, D=128, D_v=128)
    chosen = {
        (b, keys): choice.configure(of._replace(B=b, T=b, keys=keys), bf16)
        for b, keys in ((1, 8192), (2, 2048), (4, 1024), (8, 2048), (1, 1 << 17), (32, 4096))
    }
    assert [c.cluster for c in chosen.values()] == [8, 4, 2, 2, 1, 1]
    assert {c.warps for c in chosen.values()} == {8}
    packed = choice.configure(of._replace(B=8, T=8, keys=2048, S_q=0), bf16)
    assert (packed.cluster, packed.warps) == (1, 4), "four warps leave the second kernel room"


def test_prefills_are_left_to_triton():
    """More tokens than sequences, of which any may have many."""
    one = BUCKETS[0]._replace(S_q=0)
    assert choice.configure(one, bf16) is not None
    assert choice.configure(one._replace(T=one.B * 2), bf16) is None


# ----------------------------------------------------------------------------------------------- what it launches


def launched(args, config):
    """(grid, arguments, parameters, options) of the kernels of a launch."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("KERNEL", "COMBINE"):
            patch.setattr(cuda, name, lambda *given, **options: calls.append((*given, options)))
        patch.setattr(cuda, "usable_sms", lambda _: 132)
        run(args, config)
    return calls


def test_equal_shares_fill_the_machine_and_a_second_kernel_adds():
    args = raw(H=32, H_kv=8, D=128, lengths=(4096, 4096))
    (grid, given, params, options), (splits, sums, _, _) = launched(args, Config(8, 16, 8, 2))
    assert (grid, given.blocks) == ((16 * 8,), 16), "of 132 multiprocessors, 16 for each key head"
    assert (splits, sums.by_tile, sums.blocks) == ((2, 4, 8), True, 16), "two row tiles of four rows and eight heads"
    assert given.partial is sums.partial
    assert given.partial.shape == (2 * 16 * 8 * 8, 128)
    assert options["cluster"] is None
    assert params.kDivision == Division.EQUAL.value


def test_the_second_kernel_has_a_block_for_each_share_where_these_are_fewer():
    args = raw(H=32, H_kv=8, D=128, lengths=(500,) * 80, page=64)
    (_, (splits, sums, _, _)) = launched(args, Config(8, 16, 8, 2))
    assert (splits, sums.by_tile) == ((15, 4, 8), False), "a row tile that begins in one share may go on in 15 others"


def test_more_heads_than_multiprocessors():
    ((grid, given, *_),) = launched(raw(H=200, H_kv=200, lengths=(4096,)), Config(8, 32, 8, 2))
    assert (grid, given.blocks) == ((200,), 1)


def test_small_caches_get_fewer_blocks():
    args = raw(H=8, H_kv=2, lengths=(256,), page=128)
    ((grid, *_),) = launched(args, Config(8, 32, 8, 3))
    assert grid == (2,), "384 keys of a head, three pages, are 12 units; a block has one for each warp"


def test_a_cluster_for_each_row_tile_and_nothing_else():
    args = raw(H=32, H_kv=8, D=128, lengths=(4096, 4096))
    ((grid, given, params, options),) = launched(args, Config(8, 16, 8, 3, 1, 8))
    assert grid == (2 * 8 * 8,)
    assert options["cluster"] == (8, 1, 1)
    assert given.partial.shape[0] == 8 * 8
    assert params.kCluster == 8


def test_own_shares_do_not_depend_on_the_machine():
    args = raw(H=32, H_kv=8, D=128, lengths=(4096, 4096))._replace(batch_invariant=True)
    (grid, given, params, _), (splits, *_) = launched(args, Config(8, 16, 8, 3, 1, 8))
    chunks = -(-args.capacity // 16 // 32)
    assert params.kDivision == Division.OWN.value
    assert grid == (2 * 8 * chunks,)
    assert splits == (2, 4, 8)
    assert given.partial.shape[0] == grid[0] * 8


def test_nothing_is_launched_for_no_token():
    assert launched(raw(lengths=()), Config(8, 32, 8, 3)) == []


def test_both_kernels_are_compiled_before_they_are_needed():
    with collect("sm_90") as collector:
        run(raw(lengths=(9000, 3)), Config(8, 32, 8, 3))
    assert [job.key[1] for job in collector.jobs] == ["sm90_decode", "sm90_decode_combine"]


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED = {
    "one_token": {},
    "contiguous": {"page": None, "capacity": 200},
    "page_1": {"page": 1},
    "page_3": {"page": 3, "S_q": 2},
    "page_64": {"page": 64, "lengths": MIXED},
    "mixed": {"lengths": MIXED, "H": 32, "H_kv": 4},
    "many": {"lengths": tuple(37 * i % 300 for i in range(150))},
    "long": {"lengths": (9000, 4097), "H": 32, "H_kv": 8},
    "no_keys": {"lengths": (0, 0)},
    "tokens": {"S_q": 4, "lengths": (3, 0, 5, 700)},
    "full": {"S_q": 2, "causal": False},
    "window": {"window": (9, 0), "S_q": 2, "lengths": (37, 5, 64, 1500)},
    "wide_window": {"window": (300, 0), "lengths": MIXED},
    "sinks": {"sinks": True, "lengths": (20, 0, 5, 900)},
    "softcap": {"softcap": 1.5, "scale": 0.4, "S_q": 2},
    "negative_scale": {"scale": -0.3},
    "mqa": {"H": 16, "H_kv": 1, "lengths": MIXED},
    "mha": {"H": 3, "H_kv": 3, "lengths": MIXED},
    "shared_pages": {"shared": 2, "page": 4},
    "alone_in_clusters": {"lengths": (1500,)},
    "alone_and_short": {"lengths": (3,), "sinks": True},
}
CACHES = {"16_bits": {}, "heads": {"cache": "e4m3"}, "tokens": {"cache": "e4m3", "token_scales": True}}


def exact(args):
    """o and lse in float64; numbers of e4m3 are exact as they are."""
    k, v = (t if t.dtype == torch.float8_e4m3fn else t.double() for t in (args.k_cache, args.v_cache))
    sinks = None if args.sinks is None else args.sinks.double()
    return attention(args._replace(q=args.q.double(), k_cache=k, v_cache=v, sinks=sinks))


def judged(args, config):
    """At most twice as far from float64 as the reference in the queries' dtype, and the same bits again."""
    made, (wanted, wanted_lse), (rounded, _) = run(args, config), exact(args), attention(args)
    scale = wanted.abs().amax()
    allowed = 2 * (rounded.double() - wanted).abs().amax() + 2e-3 * scale
    assert bool((made[0].double() - wanted).abs().amax() <= allowed), config
    torch.testing.assert_close(made[1].double(), wanted_lse, rtol=0, atol=3e-3)
    again = run(args, config)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True)), config


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("case", COMPUTED)
def test_every_config(case, d, cache):
    on_hopper()
    sample = problem({**SIZES, "D": d, **COMPUTED[case], **CACHES[cache]}, fp16 if cache != "16_bits" else bf16, "cuda")
    args = problem_of(sample)
    found = configs_of(args)
    if not found:
        assert d == 256
        pytest.skip("more rows than its registers hold")
    for config in found:
        judged(args, config)
    judged(args._replace(batch_invariant=True), found[0])


@pytest.mark.gpu
def test_more_rows_than_a_tile():
    """They are several row tiles, which `configure` leaves to Triton."""
    on_hopper()
    sample = problem({**SIZES, "H": 16, "S_q": 8, "lengths": (40, 900, 3)}, bf16, "cuda")
    for config in (Config(8, 32, 8, 2), Config(16, 32, 8, 2, 1, 4)):
        judged(problem_of(sample), config)


@pytest.mark.gpu
@pytest.mark.parametrize("new", [(1, 1, 1, 1), (1, 0, 2, 1), (0, 0, 4, 0), (1, 1, 30, 21)], ids=str)
def test_packed_tokens(new):
    on_hopper()
    sample = problem({**SIZES, "new": new, "behind": 3, "sinks": True}, bf16, "cuda")
    for rows in (8, 16):
        judged(problem_of(sample), Config(rows, 32, 8, 2))


@pytest.mark.gpu
def test_queries_that_fp16_cannot_hold():
    """They are scaled for each row where keys of e4m3 are multiplied in fp16."""
    on_hopper()
    sample = problem({**SIZES, "cache": "e4m3"}, bf16, "cuda")
    args = problem_of(sample)
    wanted = run(args, configs_of(args)[0])
    for power in (-100, 100):
        changed = args._replace(q=args.q * 2.0**power, scale=args.scale * 2.0**-power)
        for a, b in zip(run(changed, configs_of(args)[0]), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [0.0, 2.0**-60, 2.0**60])
def test_scales_of_values_that_fp16_cannot_hold(factor):
    on_hopper()
    sample = problem({**SIZES, "cache": "e4m3", "token_scales": True}, bf16, "cuda")
    args = problem_of(sample)
    for config in configs_of(args):
        o, lse = run(args, config)
        scaled = run(args._replace(v_scale=args.v_scale * factor), config)
        torch.testing.assert_close(scaled[0].float(), o.float() * factor)
        assert torch.equal(scaled[1], lse)


@pytest.mark.gpu
def test_nan_of_a_query_is_not_lost():
    on_hopper()
    args = raw(device="cuda")
    args.q[1, 3] = torch.nan
    for config in configs_of(args):
        o, lse = run(args, config)
        assert bool(o[1, 3].isnan().all())
        assert bool(lse[1, 3].isnan())
        assert not bool(o[0].isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("op", [fmha_decode, fmha_paged], ids=lambda op: op.__name__)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graph_serves_other_lengths_and_nothing_waits(op):
    on_hopper()
    new = {"new": (1, 1, 1)} if op is fmha_paged else {}
    sample = problem({**SIZES, **new, "lengths": (900, 900, 900), "unused": None}, bf16, "cuda")
    lengths = sample.args[-1]
    op(*sample.args, **sample.kwargs, backend="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        op(*sample.args, **sample.kwargs, backend="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*sample.args, **sample.kwargs, backend="cuda")
    for numbers in ((1, 900, 300), (0, 0, 5), (900, 64, 65)):
        lengths.copy_(int32(numbers, "cuda"))
        graph.replay()
        assert torch.equal(captured, op(*sample.args, **sample.kwargs, backend="cuda"))


@pytest.mark.gpu
def test_other_sequences_leave_no_trace_under_batch_invariance():
    on_hopper()
    sample = problem({**SIZES, "lengths": (300, 41, 2900), "unused": None}, bf16, "cuda")
    q, k, v, lengths = sample.args
    table = sample.kwargs["block_table"]
    with numerics("batch_invariant"):
        together = fmha_decode(q, k, v, lengths, block_table=table, backend="cuda")
        for b in range(3):
            rows = slice(b, b + 1)
            used = -(-int(lengths[b]) // 16)
            alone = fmha_decode(q[rows], k, v, lengths[rows], block_table=table[rows, :used], backend="cuda")
            assert torch.equal(together[rows], alone)
