"""mla's forward for Hopper: what it refuses, launches and compiles; on a Hopper GPU, what it computes."""

from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention.test_fmha_cuda import (
    ALL_LEAVES,
    DOCUMENTS,
    PACKED,
    PROGRAMS,
    SHARED_LIMIT,
    Launches,
    near,
    needs_nvrtc,
    on_hopper,
)
from torch import Tensor

from tilewright.hardware.device import DeviceInfo
from tilewright.jit.collect import collect
from tilewright.ops.attention.kernels.sm90 import forward
from tilewright.ops.attention.kernels.sm90 import mla as cuda
from tilewright.ops.attention.kernels.sm90.forward import Config
from tilewright.ops.attention.mla.args import MlaArgs, MlaBucket, bucket
from tilewright.ops.attention.reference import attention

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
DEEPSEEK = {"d": 128, "d_pe": 64, "d_v": 128}
WIDTHS = ((128, 64, 128), (128, 32, 128), (64, 32, 64), (64, 64, 128), (80, 24, 48), (16, 64, 64), (192, 64, 128))
"""D, D_pe, D_v"""


class Problem(NamedTuple):
    """q, q_pe, k, k_pe, v, and what follows them in a raw call."""

    tensors: tuple[Tensor, ...]
    options: tuple[Any, ...]

    @property
    def args(self) -> MlaArgs:
        return MlaArgs(*self.tensors, *self.options)


def problem(
    s_q=333, s_k=410, d=128, d_pe=64, d_v=128, heads=4, batch=2, dtype=bf16, device="cpu", views=False, **options
) -> Problem:
    """views: q and q_pe of one projection, k and v of another, by token.  options: left, right, scale, mask."""
    generator = torch.Generator(device).manual_seed(0)

    def made(rows, count, *widths):
        shape = (batch, rows, count, sum(widths)) if views else (batch, count, rows, sum(widths))
        t = torch.randn(shape, generator=generator, device=device).to(dtype)
        parts = (t.transpose(1, 2) if views else t).split(widths, -1)
        return parts if views else [part.contiguous() for part in parts]

    (q, q_pe), (k, v), (k_pe,) = made(s_q, heads, d, d_pe), made(s_k, heads, d, d_v), made(s_k, 1, d_pe)
    program, data = options["mask"].program(device) if "mask" in options else ("", None)
    scale = options.get("scale", (d + d_pe) ** -0.5)
    return Problem((q, q_pe, k, k_pe, v), (data, program, options.get("left", -1), options.get("right", -1), scale))


def run(p: Problem, config: Config) -> tuple[Tensor, Tensor]:
    q, *_, v = p.tensors
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    cuda.launch((o, lse), p.args, config)
    return o, lse


def candidates(p: Problem) -> tuple[Config, ...]:
    return cuda.candidates(bucket(p.args), bf16)


# ----------------------------------------------------------------------------------------------- what it refuses

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "another GPU": ("sm_90", "sm_100", {}),
    "float32": ("bf16 or fp16", "sm_90", {"dtype": fp32}),
    "a rotated part of two boxes": ("up to 64 numbers, got D_pe=72", "sm_90", {"d_pe": 72}),
    "more than fits beside it": ("got 264 (D=256 in whole 64s, D_pe=8)", "sm_90", {"d": 256, "d_pe": 8}),
    "values wider than keys": ("D_v at most D", "sm_90", {"d": 64, "d_pe": 16, "d_v": 128}),
    "rows of values that are no vectors": ("16 bytes", "sm_90", {"d_v": 60}),
    "rows of rotated parts that are no vectors": ("16 bytes", "sm_90", {"d_pe": 12}),
    "no keys": ("no keys", "sm_90", {"s_k": 0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_do_is_said(monkeypatch, case):
    words, arch, change = REFUSED[case]
    monkeypatch.setattr(forward, "device_info", lambda _: DeviceInfo("a GPU", arch, 132, 0, 0))
    p = problem(**change)
    assert words in str(cuda.why_not(p.args))
    p = problem()
    assert (cuda.why_not(p.args) is None) == (arch == "sm_90")


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("views", [False, True])
def test_what_it_can_do(monkeypatch, widths, views):
    monkeypatch.setattr(forward, "device_info", lambda _: DeviceInfo("a GPU", "sm_90", 132, 0, 0))
    p = problem(7, 9, *widths, views=views)
    assert cuda.why_not(p.args) is None


# ----------------------------------------------------------------------------------------------- what it launches


def test_a_launch(monkeypatch):
    launches = Launches(monkeypatch, "KERNEL_PE")
    run(problem(s_q=1000, s_k=1100, heads=32, right=0), Config(2, 128, 2, 1))
    queries, keys = (1, 1, 64, 64), (1, 1, 128, 64)
    assert launches.maps == [
        ((2, 32, 1000, 128), queries, 128),
        ((2, 32, 1100, 128), keys, 128),
        ((2, 32, 1100, 128), keys, 128),
        ((2, 32, 1000, 128), queries, 128),
        ((2, 32, 1000, 64), queries, 128),
        ((2, 1, 1100, 64), keys, 128),
    ]
    (grid, args, params, options) = launches.calls[0]
    assert grid == (132,)
    assert (args.s_q, args.s_k, args.heads, args.batches, args.heads_per_kv) == (1000, 1100, 32, 2, 1)
    assert (args.left, args.right, args.paired) == (-1, 0, True)
    assert (params.kD, params.kDv, params.kModify) == (192, 128, False)
    assert options["shared_bytes"] == 2 * 3 * 64 * 128 + 2 * (3 + 2) * 128 * 128


@pytest.mark.parametrize(
    ("d", "d_pe", "columns"), [(128, 64, 192), (128, 24, 160), (80, 24, 160), (16, 64, 128), (64, 1, 80)]
)
def test_rotated_columns_begin_with_a_box(monkeypatch, d, d_pe, columns):
    launches = Launches(monkeypatch, "KERNEL_PE")
    run(problem(9, 9, d, d_pe, 16), Config(2, 128, 2, 1))
    assert launches.calls[0][2].kD == columns


def test_every_config_fits_shared_memory():
    for d, d_pe, d_v in WIDTHS:
        for mask in range(4):
            sizes = MlaBucket(8, 512, 512, d, d_pe, d_v, mask, 1)
            assert cuda.candidates(sizes, bf16)[0] == cuda.configure(sizes, bf16)
            for config in cuda.candidates(sizes, bf16):
                assert config in cuda.CONFIGS
                assert forward.shared_bytes(forward.columns(d, d_pe), d_v, config) + 1024 <= SHARED_LIMIT


# ----------------------------------------------------------------------------------------------- what it compiles


def compiled(p: Problem, config: Config) -> dict[str, Any]:
    with collect("sm_90") as collector:
        run(p, config)
    (job,) = collector.jobs
    return job.compile().info


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("widths", WIDTHS)
def test_bands_use_the_matrix_units_and_spill_nothing(widths):
    p = problem(333, 410, *widths, right=0)
    for config in candidates(p):
        info = compiled(p, config)
        steps = -(-forward.columns(*widths[:2]) // 16)
        assert info["instructions"]["HGMMA"] == 2 * steps + 2 * config.block_n // 16
        assert info["spill_stores"] == 0
        assert info["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"


@pytest.mark.compile
@needs_nvrtc
@pytest.mark.parametrize("mask", [DOCUMENTS, PACKED, ALL_LEAVES], ids=["documents", "packed", "all leaves"])
@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_programs_at_deepseeks_widths_spill_nothing(dtype, mask):
    p = problem(**DEEPSEEK, mask=mask, dtype=dtype)
    info = compiled(p, candidates(p)[0])
    assert info["warnings"] == []
    assert info["spill_stores"] == 0


# ----------------------------------------------------------------------------------------------- what it computes

COMPUTED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"right": 0},
    "one tile": {"s_q": 128, "s_k": 128, "right": 0},
    "one query": {"s_q": 1, "s_k": 1000, "right": 0},
    "one key": {"s_q": 70, "s_k": 1},
    "rows without keys": {"s_q": 500, "s_k": 123, "right": 0},
    "window": {"s_q": 900, "s_k": 1000, "left": 70, "right": 33},
    "to the left alone": {"s_q": 700, "s_k": 900, "left": 200},
    "views of two projections": {"views": True, "right": 0},
    "fp16": {"dtype": fp16, "right": 0},
    "many tiles": {"s_q": 1111, "s_k": 1111, "batch": 4, "heads": 8, "right": 0},
    "an odd number of heads": {"s_q": 1700, "s_k": 1700, "batch": 3, "heads": 5, "right": 0},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -0.3, "right": 0},
    **{str(widths): dict(zip(DEEPSEEK, widths, strict=True)) | {"right": 0} for widths in WIDTHS[1:]},
    "a box and a bit, views": {"d": 80, "d_pe": 24, "d_v": 48, "views": True},
}


def judged(p: Problem, config: Config) -> None:
    exact = attention(MlaArgs(*(t.double() for t in p.tensors), *p.options).joined)
    near(lambda o, lse: cuda.launch((o, lse), p.args, config), exact, p.tensors[4])


@pytest.mark.gpu
@pytest.mark.parametrize("case", COMPUTED)
def test_bands(case):
    on_hopper()
    p = problem(device="cuda", **COMPUTED[case])
    for config in candidates(p):
        judged(p, config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    on_hopper()
    s_k = 1111
    p = problem(device="cuda", s_q=900, s_k=s_k, mask=PROGRAMS[name](s_k))
    judged(p, candidates(p)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["k", "k_pe"])
def test_keys_that_are_not_allowed_may_be_nan(part):
    on_hopper()
    p = problem(device="cuda", s_q=410, right=0)
    config = candidates(p)[0]
    expected, expected_lse = run(p, config)
    p.tensors[2 if part == "k" else 3][:, :, 409] = torch.nan  # the last query alone sees it
    o, lse = run(p, config)
    assert torch.equal(o[:, :, :409], expected[:, :, :409])
    assert torch.equal(lse[:, :, :409], expected_lse[:, :, :409])
    assert o[:, :, 409].isnan().all()
