"""The backward for Hopper's tensor cores: what it refuses, launches and compiles."""

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright import mask as masks
from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.attention.arguments import FmhaBackwardArgs
from tilewright.ops.attention.bucket import CAUSAL, SOFTCAP, FmhaBucket
from tilewright.ops.attention.kernels.sm90 import backward
from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions
from tilewright.ops.attention.kernels.sm90.backward import Config

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SHARED_LIMIT = 232448  # bytes a block may have on sm_90, 1 KB of it for barriers
POISON = 7.0


class Problem(NamedTuple):
    """do, dlse, q, k, v, and what follows o and lse in a raw call."""

    do: Tensor
    dlse: Tensor | None
    tensors: tuple[Tensor, Tensor, Tensor]
    options: tuple[Any, ...]

    def args(self, o: Tensor, lse: Tensor) -> FmhaBackwardArgs:
        return FmhaBackwardArgs(self.do, self.dlse, *self.tensors, o, lse, *self.options)


def problem(
    s_q=333, s_k=410, d=128, d_v=None, heads=4, kv_heads=2, batch=2, dtype=bf16, device="cpu", by_token=False, **options
) -> Problem:
    """options: left, right, scale, softcap; sinks, slopes, dlse: True for some; mask: (S_q, S_k) -> mask."""
    generator = torch.Generator(device).manual_seed(0)

    def made(rows, count, width):
        shape = (batch, rows, count, width) if by_token else (batch, count, rows, width)
        t = torch.randn(shape, generator=generator, device=device).to(dtype)
        return t.transpose(1, 2) if by_token else t

    d_v = d_v or d
    per_head = [torch.rand(heads, device=device) if options.get(n) else None for n in ("sinks", "slopes")]
    scalars = (options.get("left", -1), options.get("right", -1), options.get("scale", d**-0.5))
    dlse = torch.randn(batch, heads, s_q, generator=generator, device=device) if options.get("dlse") else None
    tensors = made(s_q, heads, d), made(s_k, kv_heads, d), made(s_k, kv_heads, d_v)
    program, data = "", None
    if "mask" in options:
        program, data = options["mask"](s_q, s_k).to(device).fitted(s_q, s_k).program(device)
    rest = (data, program, *scalars, options.get("softcap", 0.0))
    return Problem(made(s_q, heads, d_v), dlse, tensors, (*per_head, *rest))


def sequences(lengths, lengths_k=None, **band):
    """Packed, from the first query and key on."""
    cu_q, cu_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (lengths, lengths_k or lengths))

    def made(s_q, s_k):
        return masks.sequences(cu_q, cu_k, length_q=s_q, length_k=s_k, **band)

    return made


def documents(cu, also=None):
    def made(_, s_k):
        mask = masks.document(cu_seqlens=torch.tensor(cu, dtype=torch.int32), length=s_k)
        return mask if also is None else mask & also

    return made


def by_rows(*widths, also=None):
    """Documents of so many tokens each, by their ids; another width in each row of the batch."""

    def made(_, s_k):
        mask = masks.document(torch.stack([torch.arange(s_k) // width for width in widths]))
        return mask if also is None else mask & also

    return made


def run(p: Problem, config: Config, o: Tensor, lse: Tensor) -> list[Tensor]:
    """The gradients; behind each head of dq, dk and dv, three rows that no block may write."""
    around = [torch.full((*t.shape[:2], t.shape[2] + 3, t.shape[3]), POISON).to(t) for t in p.tensors]
    made = [t[:, :, :-3] for t in around]
    sinks = p.options[0]
    dsinks = torch.full((0 if sinks is None else len(sinks),), torch.nan, device=p.do.device)
    backward.backward((*made, dsinks), p.args(o, lse), config)
    assert all((t[:, :, -3:] == POISON).all() for t in around), "rows of another head"
    return [*made, dsinks]


def launch(p: Problem, config: Config) -> None:
    run(p, config, torch.empty_like(p.do), torch.empty(p.do.shape[:3]))


def bucket_of(d: int, d_v: int | None = None, extras: int = 0, mask: int = CAUSAL) -> FmhaBucket:
    return FmhaBucket(8, 1, 512, 512, d, d_v or d, mask, extras, 1)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "another GPU": ("sm_90", "sm_100", {}),
    "float32": ("bf16 or fp16", "sm_90", {"dtype": fp32}),
    "wide heads": ("up to 128", "sm_90", {"d": 136}),
    "wide values": ("up to 128", "sm_90", {"d_v": 136}),
    "rows of values that are no vectors": ("multiples of 8", "sm_90", {"d": 64, "d_v": 60}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(backward, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    q, _, v = problem(**change).tensors
    assert words in str(backward.why_not_operands(q, v))
    q, _, v = problem().tensors
    assert (backward.why_not_operands(q, v) is None) == (arch == "sm_90")


# ----------------------------------------------------------------------------------------------- what it launches


def as_on_an_h200(monkeypatch):
    for module in (backward, divisions):
        monkeypatch.setattr(module, "usable_sms", lambda _: 132)


class Launches:
    """Stands where the kernels and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch):
        self.maps, self.preprocess, self.main, self.postprocess, self.intervals = [], [], [], [], []
        monkeypatch.setattr(backward, "tensor_map", lambda t, box, swizzle: self.maps.append((tuple(t.shape), box)))
        self.parts, self.sums = [], []
        as_on_an_h200(monkeypatch)
        kernels = {
            "PREPROCESS": self.preprocess,
            "KERNEL": self.main,
            "KERNEL_PARTS": self.parts,
            "SUM_PARTS": self.sums,
            "POSTPROCESS": self.postprocess,
            "INTERVALS": self.intervals,
        }
        for name, calls in kernels.items():
            monkeypatch.setattr(backward, name, lambda *args, calls=calls, **options: calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def test_a_causal_launch(launches):
    launch(problem(s_q=1000, s_k=1100, heads=32, kv_heads=8, batch=8, right=0), Config(64, 2, 2, 2))
    lines, part, keys = (1, 1, 64, 64), (1, 1, 64, 64), (1, 1, 128, 64)
    assert launches.maps == [
        ((8, 32, 1000, 128), lines),
        ((8, 8, 1100, 128), keys),
        ((8, 8, 1100, 128), keys),
        ((8, 32, 1000, 128), lines),
        ((8, 8, 1100, 128), part),
        ((8, 8, 1100, 128), part),
        ((8 * 32 * 16, 2 * 64), (1, 2 * 64)),
    ]
    (grid, args, _, options) = launches.main[0]
    assert grid == (132,)
    assert launches.preprocess[0][1].stats.shape == (8 * 32 * 16, 2 * 64), "a tile of 64 queries"
    assert args.dq_acc.shape == (8 * 32 * 16, 64, 128)
    assert args.flags.shape == (8 * 32 * 16 + 1,), "and the counter"
    assert (args.s_q, args.s_k, args.heads, args.batches, args.heads_per_kv) == (1000, 1100, 32, 8, 4)
    assert (args.left, args.right, args.alternate) == (-1, 0, True)
    assert args.section_heads == 15, "15 heads of 9 tiles occupy 132 processors"
    assert options == {"block": 384, "shared_bytes": SHARED_LIMIT - 2048}
    assert launches.preprocess[0][0] == launches.postprocess[0][0] == (8 * 32 * 16,)
    assert launches.intervals == []
    assert args.intervals is launches.postprocess[0][1].intervals is None
    assert launches.parts == launches.sums == []


def test_few_key_tiles_of_grouped_heads_are_divided(launches):
    """Seven heads share 12 tiles of 4 heads of keys: 48 items for 132 processors, or 336 of one head each."""
    launch(problem(s_q=1500, s_k=1500, heads=28, kv_heads=4, batch=1, right=0), Config(64, 2, 2, 2))
    assert launches.main == []
    ((grid, args, _, _),) = launches.parts
    assert grid == (132,)
    assert (args.heads, args.heads_per_kv, args.parts) == (28, 1, 7)
    assert launches.maps[1][0] == launches.maps[2][0] == (1, 4, 1500, 128), "k and v as they are"
    assert launches.maps[4][0] == launches.maps[5][0] == (1, 28, 1500, 128), "dk and dv of each part"
    (((blocks, tensors), args, _, options),) = launches.sums
    assert blocks * options["block"] * 8 >= 4 * 1500 * 128
    assert tensors == 2
    assert (args.kv_heads, args.all_heads, args.s_k, args.d, args.d_v, args.parts) == (4, 4, 1500, 128, 128, 7)


@pytest.mark.parametrize(
    "mask", [sequences([300, 0, 500], [500, 7, 300], causal=True), documents([0, 400, 1000], masks.causal())]
)
def test_a_packed_launch(launches, mask):
    """One more small kernel; no band is told.  Nine key tiles of four kv heads leave multiprocessors of 132
    without an item, so that the two query heads of each are apart.
    """
    launch(problem(s_q=1000, s_k=1100, mask=mask), Config(64, 2, 2, 2))
    ((grid, (data, intervals, *sizes), _, options),) = launches.intervals
    assert (grid, sizes, options) == ((9, 1), [1000, 1100, 1116], {"block": 128})
    assert data.tolist()[:3] == [1000, 100, 3]
    assert intervals.shape == (1, 1100 + 16, 2)
    ((_, args, params, _),) = launches.preprocess
    assert params.kPacked
    assert args.intervals is intervals
    ((_, args, params, _),) = launches.parts
    assert params.kPacked
    assert args.intervals is intervals
    assert (args.left, args.right, args.parts) == (-1, -1, 2)
    assert len(launches.sums) == 1
    assert launches.postprocess[0][1].intervals is intervals


def test_a_launch_of_other_documents_in_each_row_of_the_batch(launches):
    launch(problem(s_q=1000, s_k=1100, batch=3, mask=by_rows(50, 700, 2000, also=masks.causal())), Config(64, 2, 2, 2))
    ((grid, (_, intervals, *sizes), _, options),) = launches.intervals
    assert (grid, sizes, options) == ((9, 3), [1000, 1100, 1116], {"block": 128})
    assert intervals.shape == (3, 1116, 2)
    for ((_, args, params, _),) in (launches.preprocess, launches.parts, launches.postprocess):
        assert params.kPacked
        assert params.kByBatch
        assert args.intervals is intervals


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (100, 0)])
def test_tiles_of_like_work_come_in_one_direction(launches, left, right):
    launch(problem(left=left, right=right, kv_heads=4), Config(64, 2, 2, 2))
    assert launches.main[0][1].alternate is False


def test_bounds_beyond_all_keys_do_not_overflow(launches):
    launch(problem(left=2**31 - 1, right=2**31 - 1, kv_heads=4), Config(64, 2, 2, 2))
    args = launches.main[0][1]
    assert (args.left, args.right) == (743, 743)


# ----------------------------------------------------------------------------------------------- what it compiles

EVERYTHING = {"softcap": 3.0, "slopes": True}
SIZES = ((16, 16), (64, 64), (80, 80), (128, 128), (128, 64), (64, 128))


@pytest.mark.parametrize(("d", "d_v"), SIZES)
@pytest.mark.parametrize("extras", [0, SOFTCAP])
def test_every_config_fits_shared_memory(d, d_v, extras):
    bucket = bucket_of(d, d_v, extras)
    assert backward.candidates(bucket, bf16)[0] == backward.configure(bucket, bf16)
    for config in backward.candidates(bucket, bf16):
        assert config in backward.CONFIGS
        made = problem(9, 9, d, d_v, softcap=float(extras), slopes=True, mask=sequences([9]))
        params = backward._params(made.args(made.do, torch.empty(made.do.shape[:3])), config)
        assert backward.shared_bytes(params) + 1024 <= SHARED_LIMIT


INSTANCES = [
    (d, d_v, change, config)
    for d, d_v in SIZES
    for change in (
        {},
        {"slopes": True},
        {"dtype": fp16, **EVERYTHING},
        {"mask": sequences([100])},
        {"mask": by_rows(50, 70)},
    )
    for config in backward.candidates(bucket_of(d, d_v, int("softcap" in change)), bf16)
]


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize(("d", "d_v", "change", "config"), INSTANCES)
def test_instances_use_the_matrix_units_and_spill_little(monkeypatch, d, d_v, change, config):
    as_on_an_h200(monkeypatch)
    monkeypatch.setattr(divisions, "parts", lambda *_: 1)
    monkeypatch.setattr(divisions, "parts_of_packed", lambda *_: 1)
    made = problem(d=d, d_v=d_v, right=0, **change)  # a mask has a kernel of its own
    with collect("sm_90") as collector:
        launch(made, config)
    *small, main, queries = (job.compile().info for job in collector.jobs)
    assert len(small) == 1 + ("mask" in change)
    assert all(info["spill_stores"] == 0 for info in (*small, queries))
    steps, steps_v, of_m = -(-d // 16), -(-d_v // 16), config.block_m // 16
    # S of the first tile, of the next in the loop; dP, dV, dK and dQ in the loop and before or behind it
    assert main["instructions"]["HGMMA"] == 2 * (steps + steps_v + 2 * of_m + 8)
    assert main["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"
    assert main["spill_stores"] <= 64, "words of those who move, which have 24 registers"
    assert main["shared_bytes"] <= 1024


@pytest.mark.compile
@pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
@pytest.mark.parametrize("change", [{"right": 0}, {"mask": sequences([100])}], ids=["causal", "packed"])
@pytest.mark.parametrize("d", [64, 128])
def test_divided_groups_compile_alike(monkeypatch, d, change):
    as_on_an_h200(monkeypatch)
    monkeypatch.setattr(divisions, "parts" if "right" in change else "parts_of_packed", lambda *_: 2)
    for config in backward.candidates(bucket_of(d), bf16):
        made = problem(d=d, **change)  # a mask has a kernel of its own
        with collect("sm_90") as collector:
            launch(made, config)
        *before, main, total, after = (job.compile().info for job in collector.jobs)
        assert main["instructions"]["HGMMA"] == 2 * (d // 8 + 2 * config.block_m // 16 + 8)
        assert main["warnings"] == []
        assert main["spill_stores"] <= 64
        assert all(info["spill_stores"] == 0 for info in (*before, total, after))
