"""The forward for Hopper's tensor cores: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright import mask as masks
from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.jit.compilers import nvrtc
from tilewright.ops.attention.arguments import FmhaArgs
from tilewright.ops.attention.bucket import FmhaBucket, forward_bucket
from tilewright.ops.attention.kernels.sm90 import forward
from tilewright.ops.attention.kernels.sm90.forward import Config
from tilewright.ops.attention.reference import attention

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SHARED_LIMIT = 232448  # bytes a block may have on sm_90, 1 KB of it for barriers
POISON = 7.0


class Problem(NamedTuple):
    """q, k, v and what follows them in a raw call."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: tuple[Any, ...]

    @property
    def args(self) -> FmhaArgs:
        return FmhaArgs(*self.tensors, *self.options)


def problem(
    s_q=333, s_k=410, d=128, d_v=None, heads=4, kv_heads=2, batch=2, dtype=bf16, device="cpu", by_token=False, **options
) -> Problem:
    """options: left, right, scale, softcap; mask; sinks, slopes: True for some."""
    generator = torch.Generator(device).manual_seed(0)

    def made(rows, count, width):
        shape = (batch, rows, count, width) if by_token else (batch, count, rows, width)
        t = torch.randn(shape, generator=generator, device=device).to(dtype)
        return t.transpose(1, 2) if by_token else t

    per_head = {n: torch.rand(heads, device=device) if options.get(n) else None for n in ("sinks", "slopes")}
    program, data = options["mask"].program(device) if "mask" in options else ("", None)
    scalars = (options.get("left", -1), options.get("right", -1), options.get("scale", d**-0.5))
    tensors = made(s_q, heads, d), made(s_k, kv_heads, d), made(s_k, kv_heads, d_v or d)
    return Problem(tensors, (*per_head.values(), data, program, *scalars, options.get("softcap", 0.0)))


def run(p: Problem, config: Config) -> tuple[Tensor, Tensor]:
    q, _, v = p.tensors
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3], device=q.device)
    forward.forward((o, lse), p.args, config)
    return o, lse


def default(p: Problem) -> Config:
    return forward.configure(forward_bucket(p.args), p.tensors[0].dtype)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED = {
    "another GPU": ("sm_90", "sm_100", {}),
    "float32": ("bf16 or fp16", "sm_90", {"dtype": fp32}),
    "wide heads": ("up to 256", "sm_90", {"d": 264}),
    "values wider than keys": ("D_v at most D", "sm_90", {"d": 64, "d_v": 128}),
    "rows of values that are no vectors": ("multiple of 8", "sm_90", {"d": 64, "d_v": 60}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(forward, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    q, _, v = problem(**change).tensors
    assert words in str(forward.why_not_operands(q, v))
    q, _, v = problem().tensors
    assert (forward.why_not_operands(q, v) is None) == (arch == "sm_90")


# ----------------------------------------------------------------------------------------------- what it launches


class Launches:
    """Stands where the kernel and the maps are, and notes what they are given."""

    def __init__(self, monkeypatch, kernel="KERNEL"):
        self.maps, self.calls = [], []
        monkeypatch.setattr(
            forward, "tensor_map", lambda t, box, swizzle: self.maps.append((tuple(t.shape), box, swizzle))
        )
        monkeypatch.setattr(forward, "usable_sms", lambda _: 132)
        monkeypatch.setattr(forward, kernel, lambda *args, **options: self.calls.append((*args, options)))


@pytest.fixture
def launches(monkeypatch):
    return Launches(monkeypatch)


def test_a_causal_launch(launches):
    run(problem(s_q=1000, s_k=1100, heads=32, kv_heads=8, right=0), Config(2, 128, 2, 2))
    assert launches.maps == [
        ((2, 32, 1000, 128), (1, 1, 64, 64), 128),
        ((2, 8, 1100, 128), (1, 1, 128, 64), 128),
        ((2, 8, 1100, 128), (1, 1, 128, 64), 128),
        ((2, 32, 1000, 128), (1, 1, 64, 64), 128),
    ], "O of a warpgroup leaves where its Q came"
    (grid, args, params, options) = launches.calls[0]
    assert grid == (132,)
    assert args[5:10] == (None,) * 5, "no sinks, slopes, program and lists"
    assert (args.s_q, args.s_k, args.heads, args.batches, args.heads_per_kv) == (1000, 1100, 32, 2, 4)
    assert (args.left, args.right, args.paired) == (-1, 0, True)
    assert (params.Mask, params.kModify) == ("tilewright::BandOnly", False)
    assert options["block"] == 384
    assert options["shared_bytes"] == 2 * 2 * 2 * 64 * 128 + 2 * 2 * 2 * 128 * 128


def test_a_side_that_no_distance_reaches_stays_in_int32(launches):
    run(problem(s_q=1000, s_k=1100, heads=32, kv_heads=8, left=2**31 - 1, right=2**31 - 1), Config(2, 128, 2, 2))
    args = launches.calls[0][1]
    assert (args.left, args.right) == (2100, 2100)


@pytest.mark.parametrize(
    ("band", "heads", "paired"),
    [
        ({"right": 0}, 32, True),
        ({"left": 100}, 32, True),
        ({}, 32, False),
        ({"left": 100, "right": 0}, 32, False),
        ({"right": 0}, 16, False),  # a tile a block: a pair would leave half of them without
    ],
)
def test_tiles_come_in_pairs_where_late_queries_see_more(launches, band, heads, paired):
    run(problem(s_q=512, s_k=512, heads=heads, kv_heads=8, **band), Config(2, 128, 2, 2))
    (grid, args, *_) = launches.calls[0]
    assert grid == (min(132, 2 * heads * 4),)
    assert args.paired is paired


@pytest.mark.parametrize(
    ("mask", "steps"),
    [
        (masks.document(torch.arange(410) // 50) & masks.causal(), (0, 0, 4)),
        (masks.causal() | masks.prefix(torch.tensor([3, 200])), (3, 0, 4)),
        (masks.block(torch.ones(1, 4, 7, 7, dtype=torch.bool), 64), (0, 3, 4)),
        (masks.block(torch.ones(2, 4, 7, 7, dtype=torch.bool), 64), (12, 3, 4)),
    ],
)
def test_a_program_brings_lists_of_tiles(launches, mask, steps):
    p = problem(mask=mask)
    run(p, Config(2, 128, 2, 2))
    (_, args, params, _) = launches.calls[0]
    assert args.mask_data is p.args.mask_data
    assert args.counts.shape == (*args.indices.shape[:3], 2)
    # From batch to batch and head to head in rows, from row to row in indices
    assert (args.batch_stride, args.head_stride, args.row_stride) == steps
    assert params.Mask.startswith("tilewright::Mask")
    assert params.Index == "short"


@pytest.mark.parametrize("by_batch", [False, True])
def test_packed_sequences_bring_their_intervals_and_no_lists(launches, by_batch):
    p = problem(mask=ROWS if by_batch else PACKED)
    run(p, Config(2, 128, 2, 2))
    ((_, args, params, _),) = launches.calls
    assert args.mask_data is p.args.mask_data
    assert (args.counts, args.indices, args.batch_stride, args.head_stride, args.row_stride) == (None, None, 0, 0, 0)
    assert params.Mask == f"tilewright::MaskSequences<0, {str(by_batch).lower()}>"


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"slopes": True}, {"scale": 0.0}, {"scale": -1.0}])
def test_scores_are_brought_to_their_units_where_a_scale_alone_is_not_enough(launches, change):
    run(problem(**change), Config(2, 128, 2, 2))
    assert launches.calls[0][2].kModify


# ----------------------------------------------------------------------------------------------- what it compiles

DOCUMENTS = masks.document(torch.arange(410) // 50) & masks.causal()
ALL_LEAVES = (
    (DOCUMENTS | masks.prefix(torch.tensor([3, 40])) | masks.global_tokens(3))
    & ~masks.strided(3) & (masks.dilated(2) | masks.block(torch.ones(2, 4, 7, 7, dtype=torch.bool), 64))
)  # fmt: skip
PACKED = masks.sequences(
    torch.tensor([0, 100, 333]), torch.tensor([0, 150, 400]), length_q=333, length_k=410, causal=True
)
ROWS = (masks.document(torch.stack([torch.arange(410) // n for n in (50, 77)])) & masks.causal()).fitted(333, 410)
EVERYTHING = {"softcap": 3.0, "slopes": True, "sinks": True}
SIZES = (32, 64, 80, 128, 192, 256)


def test_every_config_fits_shared_memory():
    for d in SIZES:
        for mask in range(4):
            bucket = FmhaBucket(8, 1, 512, 512, d, d, mask, 0, 1)
            assert forward.candidates(bucket, bf16)[0] == forward.configure(bucket, bf16)
            for config in forward.candidates(bucket, bf16):
                assert config in forward.CONFIGS
                assert forward.shared_bytes(d, d, config) + 1024 <= SHARED_LIMIT


def compiled(p: Problem, config: Config) -> dict[str, Any]:
    with collect("sm_90") as collector:
        run(p, config)
    (job,) = collector.jobs
    return job.compile().info


needs_nvrtc = pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install())
BANDS = [
    (d, {}, config) for d in SIZES for config in forward.candidates(FmhaBucket(8, 1, 512, 512, d, d, 0, 0, 1), bf16)
]
BANDS += [(d, EVERYTHING, None) for d in (128, 192, 256)]
BANDS += [(64, {"slopes": True}, None), (64, {"softcap": 3.0}, None), (128, {"dtype": fp16, "scale": -1.0}, None)]
SPILLED_WORDS = 6
"""By each of the 160-register threads of D = 64 under a softcap, beside three passes of its special-function unit."""


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize(("d", "change", "config"), BANDS)
def test_bands_use_the_matrix_units_and_spill_nothing(d, change, config):
    p = problem(d=d, right=0, **change)
    config = config or default(p)
    info = compiled(p, config)
    # The first tile, the loop, and P V of the last
    assert info["instructions"]["HGMMA"] == 2 * (-(-d // 16)) + 2 * config.block_n // 16
    assert info["spill_stores"] <= (4 * SPILLED_WORDS if d == 64 and "softcap" in change else 0)
    assert info["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("mask", [DOCUMENTS, PACKED, ROWS, ALL_LEAVES], ids=["documents", "packed", "rows", "all"])
@pytest.mark.parametrize("d", SIZES)
def test_programs_leave_the_products_as_they_are(d, mask):
    p = problem(d=d, mask=mask)
    info = compiled(p, default(p))
    assert info["warnings"] == []
    if d in (80, 128):
        assert info["spill_stores"] == 0
    # Elsewhere what a tile of queries keeps waits in local memory: words for each thread, beside 128 sums and scores
    assert info["spill_stores"] <= 128


# ----------------------------------------------------------------------------------------------- what it computes


def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def documents(length, device="cuda"):
    """Ten documents, of one token and more."""
    starts = torch.zeros(length, dtype=torch.int32, device=device)
    starts[[length * n * n // 101 for n in range(1, 10)]] = 1
    return starts.cumsum(0).int()


def packed(length_k, length_q=900, device="cuda", **band):
    """Empty ones at each end and within, one of a token, one of more keys than queries; and tokens behind the last."""
    ends = torch.tensor([0, 0, 1, 40, 40, 41, 300, 505, 505, length_q - 70], dtype=torch.int32, device=device)
    return masks.sequences(ends, ends + 150 * (ends > 300), length_q=length_q, length_k=length_k, **band)


def table(rows, columns):
    return torch.rand(2, 4, rows, columns, generator=torch.Generator().manual_seed(1)).cuda() > 0.6


COMPUTED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "one tile": {"s_q": 128, "s_k": 128, "right": 0},
    "one query": {"s_q": 1, "s_k": 1000, "right": 0},
    "one key": {"s_q": 70, "s_k": 1},
    "rows without keys": {"s_q": 500, "s_k": 123, "right": 0},
    "rows of nothing but a sink": {"s_q": 500, "s_k": 123, "right": 0, "sinks": True},
    "window": {"s_q": 900, "s_k": 1000, "left": 70, "right": 33},
    "to the left alone": {"s_q": 700, "s_k": 900, "left": 200},
    "to the right alone": {"s_q": 700, "s_k": 500, "right": 64},
    "by token": {"by_token": True, "right": 0},
    "fp16": {"dtype": fp16, "right": 0},
    "many tiles": {"s_q": 1111, "s_k": 1111, "batch": 4, "heads": 8, "right": 0},
    "an odd number of heads": {"s_q": 1700, "s_k": 1700, "batch": 3, "heads": 5, "kv_heads": 5, "right": 0},
    "softcap": {"softcap": 1.5},
    "everything": {"left": 90, "right": 20, **EVERYTHING},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.3, "right": 0},
    **{f"D = {d}": {"d": d, "right": 0} for d in (32, 64, 72, 80, 96, 192, 256)},
    "values are narrower": {"d": 192, "d_v": 128, "right": 0},
}
PROGRAMS: dict[str, Any] = {
    "documents": lambda s: masks.document(documents(s)) & masks.causal(),
    "documents of a batch": lambda s: masks.document(torch.stack([documents(s), documents(s).flip(0)])),
    "prefix": lambda s: masks.causal() | masks.prefix(s // 3),
    "prefixes": lambda s: masks.causal() | masks.prefix(torch.tensor([s // 2, 3], device="cuda")),
    "global": lambda s: masks.window(s // 8, s // 8) | masks.global_tokens(5),
    "dilated": lambda s: masks.causal() & masks.dilated(3),
    "strided": lambda s: masks.causal() & (masks.window(40) | masks.strided(50)),
    "blocks": lambda s: masks.block(table(-(-s // 50), -(-s // 70)), (50, 70)),
    "outside": lambda s: ~masks.window(s // 4, s // 4),
    "nothing": lambda s: masks.causal() & ~masks.causal(),
    "packed": lambda s: packed(s, causal=True),
    "packed, without a bound": lambda s: packed(s),
    "packed windows": lambda s: packed(s, window=(100, 20)),
}


def judged(p: Problem, config: Config) -> None:
    """Against float64."""
    wide = [None if t is None else t.double() for t in (*p.tensors, *p.options[:2])]
    exact = attention(FmhaArgs(*wide, *p.options[2:]))
    near(lambda o, lse: forward.forward((o, lse), p.args, config), exact, p.tensors[2])


def near(launch: Callable[[Tensor, Tensor], None], wanted: tuple[Tensor, Tensor], v: Tensor) -> None:
    """o and lse, in units of what rounding P costs; in poisoned memory; the same bits again."""
    exact, exact_lse = wanted
    *rows, s_q, d_v = exact.shape
    around = torch.full((*rows, s_q + 3, d_v), POISON, dtype=v.dtype, device="cuda")
    o, lse = around[:, :, :s_q], torch.full((*rows, s_q), torch.nan, device="cuda")
    launch(o, lse)
    assert (around[:, :, s_q:] == POISON).all(), "rows of another head"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-5, atol=2e-5)
    eps = torch.finfo(v.dtype).eps
    error = (o.double() - exact).abs()
    assert error.max() <= 4 * eps * v.abs().max()
    assert error.square().mean().sqrt() <= eps * exact.square().mean().sqrt() + 1e-12
    assert (o[exact_lse == -torch.inf] == 0).all()
    for _ in range(3):
        again, again_lse = torch.empty_like(o), torch.empty_like(lse)
        launch(again, again_lse)
        assert torch.equal(again, o)
        assert torch.equal(again_lse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_bands(case):
    on_hopper()
    p = problem(device="cuda", **COMPUTED[case])
    for config in forward.candidates(forward_bucket(p.args), p.tensors[0].dtype):
        judged(p, config)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, d):
    on_hopper()
    s_k = 1111
    p = problem(device="cuda", s_q=900, s_k=s_k, d=d, mask=PROGRAMS[name](s_k))
    judged(p, default(p))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["documents", "packed"])
def test_a_program_with_all_modifiers(name):
    on_hopper()
    p = problem(device="cuda", s_q=900, s_k=1111, mask=PROGRAMS[name](1111), **EVERYTHING)
    judged(p, default(p))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_many_packed_sequences(d):
    on_hopper()
    ends = (2 * torch.arange(65, device="cuda") ** 2).int()  # of 2, 6, 10, ... 254 tokens
    p = problem(device="cuda", s_q=8192, s_k=8192, d=d, batch=1, mask=masks.sequences(ends, length_q=8192, causal=True))
    judged(p, default(p))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["band", "documents", "packed"])
@pytest.mark.parametrize("d", [64, 128])
def test_keys_that_are_not_allowed_may_be_nan(d, mask):
    on_hopper()
    ends = torch.tensor([0, 70, 331, 410], dtype=torch.int32, device="cuda")
    given = {
        "band": {"right": 0},
        "documents": {"mask": PROGRAMS["documents"](410)},
        "packed": {"mask": masks.sequences(ends, length_q=410, causal=True)},
    }[mask]
    p = problem(device="cuda", s_q=410, d=d, **given)
    config = default(p)
    expected, expected_lse = run(p, config)
    p.tensors[1][:, :, 409] = torch.nan  # the last query alone sees it
    o, lse = run(p, config)
    assert torch.equal(o[:, :, :409], expected[:, :, :409])
    assert torch.equal(lse[:, :, :409], expected_lse[:, :, :409])
    for other in forward.candidates(forward_bucket(p.args), bf16):
        assert run(p, other)[0][:, :, 409].isnan().all(), "whichever unit computes the exponential"
