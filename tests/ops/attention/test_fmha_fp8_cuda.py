"""The float8 forward for Hopper: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention.test_fmha_cuda import ALL_LEAVES, PROGRAMS, documents, needs_nvrtc, on_hopper
from torch import Tensor

from tilewright import mask as masks
from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.ops.attention.fmha_fp8.args import (
    BLOCKS_K,
    BLOCKS_V,
    FmhaFp8Args,
    FmhaFp8Bucket,
    Options,
    bucket,
    raw_arguments,
)
from tilewright.ops.attention.fmha_fp8.reference import attention
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK
from tilewright.ops.attention.kernels.sm90 import fp8_forward as forward
from tilewright.ops.attention.kernels.sm90.fp8_forward import Config

E4M3, bf16 = torch.float8_e4m3fn, torch.bfloat16
SHARED_LIMIT = 232448  # bytes a block may have on sm_90, 1 KB of it for barriers
POISON = 7.0
SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class Sizes(NamedTuple):
    s_q: int = 333
    s_k: int = 410
    d: int = 128
    d_v: int = 0  # 0: d
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    blocks: str = ""
    by_token: bool = False


def problem(device: str = "cpu", **change: Any) -> FmhaFp8Args:
    """Arguments of the raw op; change: of `Sizes`, and the options of a call, sinks: True for some."""
    sizes = Sizes(**{name: change.pop(name) for name in Sizes._fields if name in change})
    generator = torch.Generator(device).manual_seed(0)
    tensors, scales = [], []
    for name, heads, rows, width in (
        ("q", sizes.heads, sizes.s_q, sizes.d),
        ("k", sizes.kv_heads, sizes.s_k, sizes.d),
        ("v", sizes.kv_heads, sizes.s_k, sizes.d_v or sizes.d),
    ):
        shape = (sizes.batch, rows, heads, width) if sizes.by_token else (sizes.batch, heads, rows, width)
        t = torch.randn(shape, generator=generator, device=device) + (3.0 if name == "v" else 0.0)
        tensors.append(t.to(E4M3).transpose(1, 2) if sizes.by_token else t.to(E4M3))
        count = -(-rows // SCALE_BLOCK) if name in sizes.blocks else 1
        drawn = torch.rand(sizes.batch, heads, count, generator=generator, device=device)
        scales.append(torch.exp2(2 * drawn - 1))
    sinks = torch.randn(sizes.heads, generator=generator, device=device) if change.pop("sinks", False) else None
    options = {"causal": False, "window": None, "mask": None, "scale": None, "softcap": None, "out_dtype": bf16}
    return raw_arguments(*tensors, *scales, Options(**options | change, sinks=sinks))


def empty(args: FmhaFp8Args) -> tuple[Tensor, Tensor]:
    q, v = args.q, args.v
    return (
        torch.empty(*q.shape[:3], v.shape[3], dtype=args.out_dtype, device=q.device),
        torch.empty(q.shape[:3], device=q.device),
    )


def candidates(args: FmhaFp8Args) -> tuple[Config, ...]:
    return forward.candidates(bucket(args), E4M3)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "another GPU": ("sm_90", "sm_100", {}),
    "wide heads": ("up to 256", "sm_90", {"d": 272}),
    "wide values": ("up to 256", "sm_90", {"d_v": 272}),
    "rows that no copy engine addresses": ("multiples of 16 bytes", "sm_90", {"d": 72}),
    "no keys": ("no keys", "sm_90", {"s_k": 0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(forward, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    assert words in str(forward.why_not(problem(**change)))
    assert (forward.why_not(problem()) is None) == (arch == "sm_90")


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernel, the maps and the transposition are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.calls = [], []
        monkeypatch.setattr(
            forward, "tensor_map", lambda t, box, swizzle: self.maps.append((tuple(t.shape), box, swizzle))
        )
        monkeypatch.setattr(forward, "usable_sms", lambda _: 132)
        monkeypatch.setattr(forward, "KERNEL", lambda *args, **options: self.calls.append((*args, options)))
        monkeypatch.setattr(forward, "transposed", transposed)


def transposed(v: Tensor, fragments: bool) -> Tensor:
    assert fragments
    return v.new_empty(*v.shape[:2], v.shape[3], -(-v.shape[2] // 16) * 16)


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def test_a_causal_launch(launches):
    args = problem(s_q=1000, s_k=1100, heads=32, kv_heads=8, causal=True, blocks="kv")
    forward.forward(empty(args), args, Config(2, 128, 3, 2))
    assert launches.maps == [
        ((2, 32, 1000, 128), (1, 1, 64, 128), 128),
        ((2, 8, 1100, 128), (1, 1, 128, 128), 128),
        ((2, 8, 128, 1104), (1, 1, 128, 128), 128),
    ], "V is transposed, and has whole groups of keys"
    ((grid, given, params, options),) = launches.calls
    assert grid == (132,)
    assert (given.s_q, given.s_k, given.heads, given.batches, given.heads_per_kv) == (1000, 1100, 32, 2, 4)
    assert (given.left, given.right, given.paired) == (-1, 0, True)
    assert given[given._fields.index("q_scale_batch") : -2] == (32, 1, 0, 72, 9, 1, 72, 9, 1), "strides of scales"
    assert (params.Mask, params.kModify, params.kScaleV) == ("tilewright::BandOnly", False, True)
    assert options["block"] == 384
    assert options["shared_bytes"] == 2 * 2 * 64 * 128 + 3 * 2 * 128 * 128


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"scale": 0.0}, {"scale": -1.0}])
def test_scores_are_brought_to_their_units_where_a_scale_alone_is_not_enough(launches, change):
    args = problem(**change)
    forward.forward(empty(args), args, Config(2, 128, 3, 2))
    assert launches.calls[0][2].kModify


def test_a_program_brings_lists_of_tiles(launches):
    args = problem(mask=masks.causal() | masks.prefix(torch.tensor([3, 200])))
    forward.forward(empty(args), args, Config(2, 128, 3, 2))
    (_, given, params, _) = launches.calls[0]
    assert given.counts.shape == (*given.indices.shape[:3], 2)
    assert (given.batch_stride, given.head_stride, given.row_stride) == (3, 0, 4)
    assert params.Mask.startswith("tilewright::Mask")


# ----------------------------------------------------------------------------------------------- what it compiles


@pytest.mark.parametrize("blocks", [0, 1, BLOCKS_K, BLOCKS_V])
def test_every_config_fits_shared_memory_and_a_block_of_scales(blocks):
    for d in SIZES:
        for mask in range(4):
            sizes = FmhaFp8Bucket(8, 1, 2048, 2048, d, d, mask, 0, 1, blocks)
            assert forward.candidates(sizes, E4M3)[0] == forward.configure(sizes, E4M3)
            for config in forward.candidates(sizes, E4M3):
                assert config in forward.CONFIGS
                assert forward.shared_bytes(d, d, config) + 1024 <= SHARED_LIMIT
                assert blocks < BLOCKS_K or SCALE_BLOCK % config.block_n == 0


@pytest.mark.parametrize(
    ("s_q", "group", "s_k", "taken"),
    [
        (1, 8, 8192, False),
        (64, 8, 8192, True),
        (1, 1, 1024, False),
        (9, 1, 1024, True),
        (512, 1, 512, False),
        (512, 1, 1024, True),
    ],
)
def test_few_queries_behind_many_keys_and_short_ones_are_left_to_triton(s_q, group, s_k, taken):
    sizes = FmhaFp8Bucket(64, group, s_q, s_k, 128, 128, 0, 0, 1, 0)
    assert (forward.configure(sizes, E4M3) is not None) == taken


def compiled(monkeypatch, args: FmhaFp8Args, config: Config) -> dict[str, Any]:
    monkeypatch.setattr(forward, "transposed", transposed)  # a Triton kernel, which is compiled elsewhere
    with collect("sm_90") as collector:
        forward.forward(empty(args), args, config)
    (job,) = collector.jobs
    return job.compile().info


PLAIN = {"causal": True}
EVERYTHING = {"softcap": 3.0, "sinks": True, "blocks": "qkv", "window": (90, 20)}
COMPILED = [(d, PLAIN, n) for d in SIZES for n in range(2)] + [(d, EVERYTHING, 0) for d in (64, 128, 256)]
PRODUCER_WORDS = 16
"""The threads that only copy have 24 registers, and keep so many words of a tile of queries in local memory."""


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("d", "change", "n"), COMPILED)
def test_bands_use_the_matrix_units_and_spill_nothing(monkeypatch, d, change, n):
    args = problem(d=d, **change)
    config = candidates(args)[n]
    info = compiled(monkeypatch, args, config)
    # The first tile, the loop, and P V of the last
    assert info["instructions"]["QGMMA"] == 2 * -(-d // 32) + 2 * config.parts * config.block_n // 32
    assert info["spill_stores"] <= 4 * PRODUCER_WORDS
    assert info["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("d", [64, 128, 256])
def test_programs_leave_the_products_as_they_are(monkeypatch, d):
    args = problem(d=d, mask=ALL_LEAVES)
    info = compiled(monkeypatch, args, candidates(args)[0])
    assert info["warnings"] == []
    assert info["spill_stores"] <= 128


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "one tile": {"s_q": 128, "s_k": 128, "causal": True},
    "one query": {"s_q": 1, "s_k": 1000, "causal": True},
    "one key": {"s_q": 70, "s_k": 1},
    "rows without keys": {"s_q": 500, "s_k": 123, "causal": True},
    "rows of nothing but a sink": {"s_q": 500, "s_k": 123, "causal": True, "sinks": True},
    "window": {"s_q": 900, "s_k": 1000, "window": (70, 33), "blocks": "qkv"},
    "to the left alone": {"s_q": 700, "s_k": 900, "window": (200, -1)},
    "by token": {"by_token": True, "causal": True, "blocks": "v"},
    "float16": {"out_dtype": torch.float16, "causal": True},
    "float32": {"out_dtype": torch.float32, "causal": True, "blocks": "k"},
    "many tiles": {"s_q": 1111, "s_k": 1111, "batch": 4, "heads": 8, "causal": True},
    "an odd number of heads": {"s_q": 1700, "s_k": 1700, "batch": 3, "heads": 5, "kv_heads": 5, "causal": True},
    "softcap": {"softcap": 1.5, "blocks": "k"},
    "everything": EVERYTHING,
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.3, "causal": True, "blocks": "k"},
    **{f"D = {d}": {"d": d, "causal": True, "blocks": "qkv"} for d in SIZES},
    "values are narrower": {"d": 192, "d_v": 128, "causal": True},
    "values are wider": {"d": 64, "d_v": 240, "causal": True, "blocks": "v"},
}


def judged(args: FmhaFp8Args, config: Config) -> None:
    """Against float64, beside the reference in e4m3; in poisoned memory; the same bits again."""
    wide = {n: getattr(args, n) for n in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "sinks")}
    exact, exact_lse = attention(args._replace(**{n: None if t is None else t.double() for n, t in wide.items()}))
    rounded, _ = attention(args)
    *rows, s_q, d_v = exact.shape
    around = torch.full((*rows, s_q + 3, d_v), POISON, dtype=args.out_dtype, device="cuda")
    o, lse = around[:, :, :s_q], torch.full((*rows, s_q), torch.nan, device="cuda")
    forward.forward((o, lse), args, config)
    assert (around[:, :, s_q:] == POISON).all(), "rows of another head"
    # Matrix units keep 14 bits of a sum of float8 products
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-2, atol=1e-2)
    error, allowed = (o.double() - exact).square(), (rounded.double() - exact).square()
    floor = 2.0**-9 * exact.square().mean().sqrt()
    assert error.mean().sqrt() <= 1.5 * allowed.mean().sqrt() + 0.1 * floor
    assert error.mean(-1).sqrt().max() <= 2 * allowed.mean(-1).sqrt().max() + floor
    assert (o[exact_lse == -torch.inf] == 0).all()
    for _ in range(3):
        again, again_lse = torch.empty_like(o), torch.empty_like(lse)
        forward.forward((again, again_lse), args, config)
        assert torch.equal(again, o)
        assert torch.equal(again_lse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_bands(case):
    on_hopper()
    args = problem("cuda", **COMPUTED[case])
    for config in candidates(args):
        judged(args, config)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, d):
    on_hopper()
    args = problem("cuda", s_q=900, s_k=1111, d=d, mask=PROGRAMS[name](1111), blocks="kv")
    judged(args, candidates(args)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sums_are_as_exact_as_short_ones(d):
    """Values of one sign and flat probabilities: a sum of 14 bits would stand still long before the last key."""
    on_hopper()
    args = problem("cuda", s_q=64, s_k=40000, d=d, heads=2, kv_heads=2, batch=1, scale=0.01, blocks="qkv")
    judged(args, candidates(args)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("programmed", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_that_are_not_allowed_may_be_nan(d, programmed):
    on_hopper()
    mask = masks.document(documents(410)) & masks.causal() if programmed else masks.causal()
    args = problem("cuda", s_q=410, d=d, mask=mask)
    (expected, expected_lse), (o, lse) = empty(args), empty(args)
    for config in candidates(args):
        forward.forward((expected, expected_lse), args, config)
        given = args.k.clone()
        given.view(torch.uint8)[:, :, 409] = 0x7F  # NaN; the last query alone sees it
        forward.forward((o, lse), args._replace(k=given), config)
        assert torch.equal(o[:, :, :409], expected[:, :, :409])
        assert torch.equal(lse[:, :, :409], expected_lse[:, :, :409])
        assert o[:, :, 409].isnan().all()
