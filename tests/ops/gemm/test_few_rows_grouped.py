"""Groups of few rows with weights each: what is chosen, refused, launched and compiled; on a Hopper GPU, what is
computed, and what is left alone.
"""

import random

import pytest
import torch
from tests.ops.gemm.test_few_rows import worst_tile
from tests.ops.gemm.test_few_rows_scaled import dequantised, needs_nvrtc
from tests.ops.gemm.test_few_rows_scaled import operands as scaled_operands

from tilewright.errors import InputError
from tilewright.jit.collect import collect
from tilewright.ops.gemm.grouped.args import GroupedArgs, GroupedBucket
from tilewright.ops.gemm.kernels.sm90 import few_rows_grouped as grouped
from tilewright.ops.gemm.kernels.sm90 import few_rows_launch as launch
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as model
from tilewright.ops.gemm.kernels.sm90.few_rows_model import UNSCALED, Work, predicted_us
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out
from tilewright.ops.gemm.scaled.scaling import Scaling

bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
KINDS = (UNSCALED, Scaling.TENSOR, Scaling.ROW, Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN)
DECODE = [(4096, 7168), (7168, 2048), (6144, 7168), (7168, 3072)]  # (N, K) of experts


def bucket(rows, columns, depth, groups, scaling):
    return GroupedBucket(rows, columns, depth, groups, 0, 1, 16, 0, int(scaling))


def deepest(tokens, split, ctas, scaling=UNSCALED):
    config = model.deepest(tokens, split, ctas, scaling, grouped=True)
    assert config is not None
    return config


def operands(batch, rows, columns, depth, groups, scaling=UNSCALED, layout="nt", device="cpu"):
    """a (batch, rows, K), b (groups, K, N), their scales or None."""
    if scaling != UNSCALED:
        return scaled_operands(rows, columns, depth, scaling, batch, groups, device)
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(batch, rows, depth, generator=generator, device=device).to(bf16)
    shape = (groups, columns, depth) if layout == "nt" else (groups, depth, columns)
    b = torch.randn(shape, generator=generator, device=device).to(bf16)
    return a, b.mT if layout == "nt" else b, None, None


def bounds(starts, ends, device="cpu"):
    return tuple(None if t is None else torch.tensor(t, dtype=torch.int32, device=device) for t in (starts, ends))


def run(config, a, b, scale_a, scale_b, starts, ends, activation="", out_dtype=bf16):
    shape = *a.shape[:2], columns_out(b.shape[-1], activation)
    d = torch.full(shape, torch.nan, dtype=out_dtype, device=a.device)
    grouped.gemm_rows(d, GroupedArgs(a, b, scale_a, scale_b, starts, ends, 16, activation, out_dtype), config)
    return d


# ----------------------------------------------------------------------------------------------- what it chooses


@pytest.mark.parametrize("scaling", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64])
def test_choices_are_listed_and_have_room_for_more_rows(rows, scaling):
    for columns, depth in (*DECODE, (512, 7168), (2048, 512)):
        for groups in (1, 8, 256):
            config = grouped.configure(bucket(rows, columns, depth, groups, scaling), fp8)
            assert config in grouped.CONFIGS
            assert config.tokens >= min(rows + rows // 2, 64), "groups differ"
            found = grouped.candidates(bucket(rows, columns, depth, groups, scaling), fp8)
            assert 4 <= len(set(found)) == len(found) <= 24
            for candidate in (config, *found):
                assert candidate.split <= Work(1, columns, depth, scaling).steps
                assert model.shared_bytes(candidate, scaling, grouped=True) <= model.SHARED[candidate.ctas]


@pytest.mark.parametrize("scaling", [UNSCALED, Scaling.TOKEN_BLOCK])
@pytest.mark.parametrize(("columns", "depth"), DECODE)
@pytest.mark.parametrize(("groups", "rows"), [(32, 20), (8, 16)])
def test_many_experts_are_predicted_to_be_read_at_the_speed_of_the_memory(groups, rows, columns, depth, scaling):
    config = grouped.configure(bucket(model.fitting((16, 32), rows), columns, depth, groups, scaling), fp8)
    floor = groups * columns * depth * (2 if scaling == UNSCALED else 1) / model.READ
    assert 0.97 * floor < predicted_us(config, Work(rows, columns, depth, scaling, groups)) < floor / 0.95


def test_token_tiles_of_a_group_share_its_weights():
    one, two = (predicted_us(deepest(32, 1, 1), Work(rows, 8192, 8192, UNSCALED, 16)) for rows in (32, 64))
    assert one < two < 1.8 * one, "their products and tokens come twice, the weights from memory once"


# ----------------------------------------------------------------------------------------------- what it refuses


def why_not(a, b, scale_a, scale_b, starts, ends, expected=10, out_dtype=bf16):
    return str(grouped.why_not(GroupedArgs(a, b, scale_a, scale_b, starts, ends, expected, "", out_dtype)))


def test_what_it_cannot_do_is_said(hopper):
    a, b, _, _ = operands(1, 40, 128, 256, 4)
    starts, ends = bounds([0, 10, 20, 30], [10, 20, 30, 40])
    assert why_not(a, b, None, None, starts, ends) == "None"
    assert why_not(a, b.contiguous(), None, None, None, ends) == "None"
    assert "65" in why_not(a, b, None, None, starts, ends, 65)
    assert "int32" in why_not(a, b, None, None, starts.long(), ends)
    assert "int32" in why_not(a, b, None, None, starts, ends[::2])
    assert "bf16 or fp16" in why_not(a.float(), b.float(), None, None, starts, ends)
    assert "along K" in why_not(a.mT.contiguous().mT, b, None, None, starts, ends)


def test_scales_are_read_in_place(hopper):
    a, b, scale_a, scale_b = operands(1, 40, 256, 256, 4, Scaling.TOKEN_BLOCK)
    ends = bounds(None, [10, 20, 30, 40])[1]
    assert why_not(a, b, scale_a, scale_b, None, ends) == "None"
    assert "scale_a have strides" in why_not(a, b, scale_a.contiguous(), scale_b, None, ends)
    assert "need torch.float32" in why_not(a, b, scale_a, scale_b.double(), None, ends)
    moved = torch.empty(81)[1:].as_strided((1, 40, 2), (80, 1, 40), 1)
    assert "16 bytes" in why_not(a, b, moved, scale_b, None, ends)
    assert "fp32" in why_not(a, b, scale_a, scale_b, None, ends, out_dtype=fp8)


# ----------------------------------------------------------------------------------------------- what it launches


@pytest.fixture
def launched(monkeypatch):
    """(maps, calls): what the kernel and the tensor maps are given."""
    maps, calls = [], []
    monkeypatch.setattr(launch, "tensor_map", lambda t, box, **_: maps.append((tuple(t.shape), box)) or len(maps))
    monkeypatch.setattr(launch, "usable_sms", lambda _: 132)
    monkeypatch.setattr(grouped, "KERNEL", lambda *args, **options: calls.append((*args, options)))
    return maps, calls


def test_the_grid_needs_no_word_from_the_device(launched):
    maps, calls = launched
    starts, ends = bounds([0, 1], [1, 5])
    run(deepest(16, 2, 1), *operands(1, 5, 64, 512, 2), starts, ends)
    assert calls[-1][0] == (3 * 2,), "five rows are one tile, or one for each of two groups"
    assert maps == [((2, 64, 512), (1, 64, 64)), ((1, 5, 512), (1, 5, 64))]
    run(deepest(16, 2, 1), *operands(2, 40, 64, 512, 2), starts, ends)
    assert calls[-1][0] == (2 * 3 * 2,), "three tiles in each of two batches at most"
    run(deepest(16, 1, 2), *operands(64, 33, 1024, 512, 64), None, ends)
    assert calls[-1][0] == (264,)


def test_scales_are_copied_from_up_to_three_rows_before_a_group(launched):
    maps, calls = launched
    for scaling in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN):
        maps.clear()
        config = deepest(16, 1, 1, scaling)
        run(config, *operands(1, 37, 128, 512, 3, scaling), None, bounds(None, [3, 10, 37])[1])
        assert ((1, 4, 37), (1, 2, 16 + 4)) in maps, "groups begin at any row, copies at multiples of four"
        assert maps[2:-1] == [] if scaling is Scaling.TOKEN_BLOCK else maps[-1] == ((3, 4, 128), (1, 2, 64))
        assert calls[-1][3]["shared_bytes"] == model.shared_bytes(config, scaling, grouped=True)


def test_batches_and_metadata_reach_the_kernel(launched):
    starts, ends = bounds([0, 0, 0], [4, 0, 9])
    a, b, scale_a, scale_b = operands(3, 9, 256, 512, 3, Scaling.TOKEN_BLOCK)
    run(deepest(16, 2, 1, Scaling.TOKEN_BLOCK), a, b, scale_a, scale_b, starts, ends)
    _, args, params, _ = launched[1][-1]
    assert args.starts is starts and args.ends is ends and args.scale_a is scale_a and args.scale_b is scale_b
    strides = (args.scale_a_batch, args.scale_b_batch, args.scale_b_row, args.d_batch, args.d_row)
    assert strides == (4 * 12, 8, 4, 9 * 256, 256)
    assert (args.groups, args.m, args.n, args.k, args.token_rows, args.masked) == (3, 9, 256, 512, 9, True)
    assert params.kScaling == Scaling.TOKEN_BLOCK
    run(deepest(16, 2, 1), *operands(1, 9, 256, 512, 3), None, ends)
    assert launched[1][-1][1].starts is None
    assert launched[1][-1][1].masked is False


def test_nothing_to_write_is_no_launch(launched):
    a, b, _, _ = operands(1, 4, 64, 512, 2)
    run(deepest(16, 1, 1), a[:, :0], b, None, None, None, torch.zeros(2, dtype=torch.int32))
    run(deepest(16, 1, 1), a, b[:0], None, None, None, torch.zeros(0, dtype=torch.int32))
    assert launched[1] == []
    with pytest.raises(InputError, match="K=512 has 4 steps"):
        run(deepest(16, 8, 1), a, b, None, None, None, torch.zeros(2, dtype=torch.int32))


# ----------------------------------------------------------------------------------------------- what it compiles

INSTANCES = [
    (config, KINDS[n % 5], ACTIVATIONS[n % 5], (bf16, fp32)[n % 2])
    for n, config in enumerate((*grouped.CONFIGS[::4], deepest(64, 2, 2, 3), deepest(48, 1, 2, 2)))
]


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("config", "scaling", "activation", "out"), INSTANCES)
def test_group_schedulers_spill_nothing(config, scaling, activation, out):
    config = deepest(config.tokens, config.split, config.ctas, scaling)
    layout = "nn" if scaling == UNSCALED else "nt"
    with collect("sm_90") as collector:
        ends = torch.zeros(4, dtype=torch.int32)
        run(config, *operands(1, 16, 512, 4096, 4, scaling, layout), ends, ends, activation, out)
    (job,) = collector.jobs
    info = job.compile().info
    assert info["stack_bytes"] == info["spill_stores"] == 0
    assert not info["instructions"].keys() & {"LDL", "STL"}
    counts = {name: info["instructions"][name] for name in info["instructions"].keys() & {"HGMMA", "QGMMA"}}
    assert counts == ({"HGMMA": 8} if scaling == UNSCALED else {"QGMMA": 16})
    assert info["warnings"] == []


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("scaling", KINDS)
def test_host_and_kernel_agree_on_shared_memory(scaling, monkeypatch):
    config, element = deepest(24, 2, 1, scaling), bf16 if scaling == UNSCALED else fp8
    params = grouped.Params(*config, False, 0, int(scaling), element, bf16, bf16, bf16)
    text, size = grouped.KERNEL.source(params), model.shared_bytes(config, scaling, grouped=True)
    laid_out = f"tilewright::Layout<tilewright::Grouped<Config>>::kBarriersOffset + {16 * (1 + config.stages)}"
    claim = f"static_assert({laid_out} == {size});\n"
    monkeypatch.setattr(grouped.KERNEL, "source", lambda _: text + claim)
    grouped.KERNEL.compile(params, "sm_90")


# ----------------------------------------------------------------------------------------------- what it computes

RAGGED = [0, 3, 17, 0, 0, 1, 8, 33, 64, 5, 0, 20, 7, 100, 2, 0]
SPARSE = [0] * 5 + [3] + [0] * 634 + [40] + [0] * 458 + [1]  # 1100 groups

COMPUTED = {  # rows of groups, rows between them (None: batches), columns, depth, (tokens, split, ctas), activation
    "batches": (RAGGED, None, 320, 1024, (32, 1, 2), ""),
    "batches, two blocks": ([20, 14, 26, 0, 32, 19], None, 2048, 1536, (48, 2, 1), ""),
    "tight": (RAGGED, 0, 320, 1024, (16, 2, 2), "silu"),
    "rows between": (RAGGED, 3, 200, 528, (64, 1, 1), ""),
    "gated": ([5, 30, 0, 12], 0, 1024, 2048, (32, 4, 1), "swiglu"),
    "all rows in one group": ([0, 0, 70, 0], 0, 512, 768, (64, 2, 1), ""),
    "no rows": ([0, 0, 0], None, 512, 768, (64, 2, 1), ""),
    "1100 groups, three with rows": (SPARSE, 0, 192, 512, (16, 2, 1), ""),
}


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", KINDS)
@pytest.mark.parametrize("case", COMPUTED)
def test_results(case, scaling):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    rows, between, columns, depth, sizes, activation = COMPUTED[case]
    starts, ends, total = [], [], 5
    for count in rows:
        starts.append(0 if between is None else total)
        ends.append(starts[-1] + count)
        total = max(total, count + 7) if between is None else ends[-1] + between
    batch = len(rows) if between is None else 1
    a, b, scale_a, scale_b = operands(batch, total, columns, depth, len(rows), scaling, device="cuda")
    owned = torch.zeros(batch, total, dtype=torch.bool, device="cuda")
    for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
        owned[g if between is None else 0, start:end] = True
    a.view(torch.uint8 if scaling != UNSCALED else torch.int16)[~owned] = 0x7F if scaling != UNSCALED else 0x7FFF  # NaN

    d = run(deepest(*sizes, scaling), a, b, scale_a, scale_b, *bounds(starts, ends, "cuda"), activation)
    assert d[~owned].isnan().all(), "rows of no group stay as they are"
    if scaling == UNSCALED:
        x, w = a.double(), b.double()
    else:
        of_a, of_b = scaling.layouts
        x, w = dequantised(a, scale_a, of_a), dequantised(b.mT, scale_b, of_b).mT
    for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
        at = g if between is None else 0
        if start < end:
            exact = apply_epilogue(x[at, start:end] @ w[g], None, None, activation, torch.float64)
            assert worst_tile(d[at : at + 1, start:end], exact[None]) < 4e-3
    again = run(deepest(*sizes, scaling), a, b, scale_a, scale_b, *bounds(starts, ends, "cuda"), activation)
    assert torch.equal(d.view(torch.int16), again.view(torch.int16))


@pytest.mark.gpu
def test_a_captured_graph_follows_the_rows_of_groups():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    a, b, _, _ = operands(1, 96, 512, 1024, 8, device="cuda")
    d, ends = torch.empty(1, 96, 512, dtype=bf16, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")
    launch_once = (d, GroupedArgs(a, b, None, None, None, ends, 16, "", bf16), deepest(16, 2, 1))
    grouped.gemm_rows(*launch_once)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped.gemm_rows(*launch_once)
    choose = random.Random(0)
    for _ in range(10):
        cuts = sorted(choose.randrange(200) for _ in range(8))  # some beyond the rows there are
        ends.copy_(torch.tensor(cuts))
        graph.replay()
        for g, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
            end = min(end, 96)
            if start < end:
                exact = a[0, start:end].double() @ b[g].double()
                assert worst_tile(d[:, start:end], exact[None]) < 4e-3
