"""Attention backward in CUDA C++ for Hopper: one kernel for dq, dk and dv, 10 * B * H * pairs * D flops of products.

`sm90_fmha_backward.cuh` walks over queries for each tile of keys, and adds dq up in float32 in global memory, in an
order that does not change from run to run.  A small kernel before it makes two floats a query and lowers the flags of
that order; one after it rounds dq.  Masks are bands (causal, windows, none) and packed sequences, of which one more
kernel finds which queries see a key.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.jit.tensor_map import tensor_map
from tilewright.ops.attention.band import within
from tilewright.ops.attention.engines.triton_delta import delta, sink_gradient

# As in the headers: bytes of a row of a box; keys of a warpgroup and of a block; warpgroups
_SPAN, _ROWS, _KEYS, _GROUPS = 128, 64, 128, 2
_WIDE = _SPAN // 2  # elements of 16 bits
_MAX_D = 128
_L2_BYTES = 32 << 20  # of queries, their gradients and sums that blocks of other keys use again before they are gone
_THREADS, _INTERVALS_THREADS = 256, 128  # of the small kernels


class Config(NamedTuple):
    """block_m: queries of a tile.  stages: of the rings of Q and dO.  ds_stages: of dS between the warpgroups.
    out_stages: tiles of dQ that wait to leave.
    """

    block_m: int
    stages: int
    ds_stages: int
    out_stages: int


class Params(NamedTuple):
    """What sm90_fmha_backward is compiled for."""

    kD: int
    kDv: int
    kBlockM: int
    kStages: int
    kDsStages: int
    kOutStages: int
    kSoftcap: bool
    kSlope: bool
    kPacked: bool
    Element: torch.dtype


class PreprocessParams(NamedTuple):
    """What sm90_fmha_preprocess is compiled for."""

    kBlockM: int
    kPacked: bool
    Element: torch.dtype


class IntervalsParams(NamedTuple):
    """What sm90_fmha_intervals is compiled for: nothing that changes."""


_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    _FOLDER / "sm90_fmha_backward.cuh",
    "sm90_fmha_backward",
    "TTTTTTTPPPiiiiiiii?ffP",
    archs=("sm_90a",),
    dependent=True,
)
PREPROCESS = CudaKernel(
    _FOLDER / "sm90_fmha_preprocess.cuh", "sm90_fmha_preprocess", "PPPPPPiiiqqqqqqPi", archs=("sm_90a",), dependent=True
)
POSTPROCESS = CudaKernel(
    _FOLDER / "sm90_fmha_postprocess.cuh", "sm90_fmha_postprocess", "PPiiiiiifqqqP", archs=("sm_90a",), dependent=True
)
INTERVALS = CudaKernel(_FOLDER / "sm90_fmha_preprocess.cuh", "sm90_fmha_intervals", "PPii", archs=("sm_90a",), dependent=True)


def backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    config: Config,
) -> None:
    """dq, dk, dv and dsinks as the raw op `_fmha_bwd` describes them; S_k > 0.

    left, right: the band, -1 unlimited; program: "", or that of packed sequences alone.  See `fmha/raw.py`.
    """
    batch, heads, s_q, d = q.shape
    s_k, d_v = v.shape[2:]
    sharing = heads // k.shape[1]
    left, right = within(left, right, s_q, s_k)
    params = _params(d, d_v, softcap > 0, slopes is not None, bool(program), q.dtype, config)
    tiles = batch * heads * -(-s_q // config.block_m)
    rows = scratch((tiles, 2 * config.block_m), torch.float32, q.device)
    sums = scratch((tiles, config.block_m, _columns(params)), torch.float32, q.device)
    flags = scratch((tiles + 1,), torch.int32, q.device)
    spans = _spans(mask_data, s_q, s_k, config) if program else 0
    PREPROCESS(
        (tiles,),
        (
            *(do, o, lse, 0 if dlse is None else dlse, rows, flags),
            *(s_q, d_v, heads),
            *do.stride()[:3],
            *o.stride()[:3],
            *(spans, s_k),
        ),
        PreprocessParams(config.block_m, bool(program), q.dtype),
        block=_THREADS,
    )
    lines, keys, part = (1, 1, config.block_m, _WIDE), (1, 1, _KEYS, _WIDE), (1, 1, _ROWS, _WIDE)
    boxes = ((q, lines), (k, keys), (v, keys), (do, lines), (dk, part), (dv, part))
    of_head = s_q * sharing * ((d + d_v) * q.itemsize + d * sums.itemsize)
    kv_heads, of_keys, processors = batch * k.shape[1], -(-s_k // _KEYS), usable_sms(q.device)
    together = max(_L2_BYTES // of_head, -(-processors // of_keys))  # sections that occupy the GPU alternate best
    KERNEL(
        (min(of_keys * kv_heads, processors),),
        (
            *(tensor_map(t, box, swizzle=_SPAN) for t, box in boxes),
            tensor_map(rows, (1, 2 * config.block_m), swizzle=0),
            *(sums, flags, 0 if slopes is None else slopes),
            *(s_q, s_k, heads, batch, sharing, left, right, min(kv_heads, together)),
            (left < 0) != (right < 0),  # tiles of keys differ in work
            scale,
            softcap,
            spans,
        ),
        params,
        block=_SPAN * (_GROUPS + 1),
        shared_bytes=shared_bytes(params),
    )
    POSTPROCESS(
        (tiles,),
        (sums, dq, s_q, s_k, d, heads, left, right, scale, *dq.stride()[:3], spans),
        params,
        block=_THREADS,
    )
    if sinks is not None:
        shift = scratch(tuple(lse.shape), torch.float32, lse.device)
        delta(shift, do, o, dlse)
        sink_gradient(dsinks, shift, lse, sinks)


def _spans(mask_data: Tensor | None, s_q: int, s_k: int, config: Config) -> Tensor:
    """(S_k + tiles of queries, 2) int32: of each key the queries that see it, and room for what sm90_fmha_preprocess adds."""
    assert mask_data is not None, "a program has numbers"
    spans = scratch((s_k + -(-s_q // config.block_m), 2), torch.int32, mask_data.device)
    INTERVALS((-(-s_k // _INTERVALS_THREADS),), (mask_data, spans, s_q, s_k), IntervalsParams(), block=_INTERVALS_THREADS)
    return spans


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why this engine cannot run such masks over these operands; None if it can."""
    arch, d, d_v = device_info(q.device).arch, q.shape[3], v.shape[3]
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {q.dtype}"
    if max(d, d_v) > _MAX_D or d % 8 or d_v % 8:
        return f"has head dimensions up to {_MAX_D} that are multiples of 8, got D={d}, D_v={d_v}"
    return None


def shared_bytes(params: Params) -> int:
    """Of K and V, the rings of Q, dO and the floats of their rows, dS, and what leaves."""
    m, boxes, boxes_v = params.kBlockM, -(-params.kD // _WIDE), -(-params.kDv // _WIDE)
    ring = params.kStages * ((boxes + boxes_v) * m * _SPAN + 8 * m)
    half = max(m // _GROUPS * _columns(params) * 4, max(boxes, boxes_v) * _ROWS * _SPAN)
    keys, ds = (boxes + boxes_v) * _KEYS * _SPAN, params.kDsStages * _KEYS * m * 2
    return keys + ring + ds + params.kOutStages * _GROUPS * half


def _columns(params: Params) -> int:
    """Of the sums of dq: warpgroups share columns, in halves or pairs of boxes, or the rows."""
    if params.kBlockM == _KEYS:
        return params.kD
    return _WIDE if params.kD <= _WIDE else _GROUPS * _WIDE


def _params(d: int, d_v: int, softcap: bool, slope: bool, spans: bool, dtype: torch.dtype, config: Config) -> Params:
    return Params(
        kD=-(-d // 16) * 16,
        kDv=-(-d_v // 16) * 16,
        kBlockM=config.block_m,
        kStages=config.stages,
        kDsStages=config.ds_stages,
        kOutStages=config.out_stages,
        kSoftcap=softcap,
        kSlope=slope,
        kPacked=spans,
        Element=dtype,
    )


# ------------------------------------------------------------------------------------------------------- what to choose

_WIDE_TILES = (Config(64, 2, 2, 2),)
_NARROW_TILES = (Config(128, 2, 2, 2), Config(64, 3, 2, 2))
_NARROW_SOFTCAP = (Config(64, 3, 2, 2),)  # 128 queries leave no registers for the derivative of the cap


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """The tile for a bucket of `fmha/raw.py`."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at these head dimensions."""
    if max(bucket[4:6]) > _WIDE:
        return _WIDE_TILES
    return _NARROW_SOFTCAP if bucket[7] & 1 else _NARROW_TILES


CONFIGS: tuple[Config, ...] = (*_WIDE_TILES, *_NARROW_TILES)
"""Every config that `configure` and `candidates` can return."""
