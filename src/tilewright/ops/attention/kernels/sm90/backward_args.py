"""Compile-time parameters and arguments of the kernels of attention's backward, named as in their sources."""

from typing import NamedTuple

import torch

from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer


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
    kByBatch: bool
    Element: torch.dtype


class PreprocessParams(NamedTuple):
    """What sm90_fmha_preprocess is compiled for."""

    kBlockM: int
    kPacked: bool
    kByBatch: bool
    Element: torch.dtype


class IntervalsParams(NamedTuple):
    """What sm90_fmha_intervals is compiled for: it has no parameters."""


class Args(NamedTuple):
    map_q: Map
    map_k: Map
    map_v: Map
    map_do: Map
    map_dk: Map
    map_dv: Map
    map_stats: Map
    dq_acc: Pointer
    flags: Pointer
    slopes: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    section_heads: I32
    alternate: bool
    scale: F32
    softcap: F32
    intervals: Pointer


class PartsArgs(NamedTuple):
    map_q: Map
    map_k: Map
    map_v: Map
    map_do: Map
    map_dk: Map
    map_dv: Map
    map_stats: Map
    dq_acc: Pointer
    flags: Pointer
    slopes: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    heads_per_kv: I32
    left: I32
    right: I32
    section_heads: I32
    alternate: bool
    scale: F32
    softcap: F32
    intervals: Pointer
    parts: I32


class PreprocessArgs(NamedTuple):
    d_o: Pointer
    o: Pointer
    lse: Pointer
    dlse: Pointer
    stats: Pointer
    flags: Pointer
    s_q: I32
    d_v: I32
    heads: I32
    do_batch: I64
    do_head: I64
    do_row: I64
    o_batch: I64
    o_head: I64
    o_row: I64
    intervals: Pointer
    s_k: I32


class PostprocessArgs(NamedTuple):
    dq_acc: Pointer
    dq: Pointer
    s_q: I32
    s_k: I32
    d: I32
    heads: I32
    left: I32
    right: I32
    scale: F32
    dq_batch: I64
    dq_head: I64
    dq_row: I64
    intervals: Pointer


class IntervalsArgs(NamedTuple):
    mask_data: Pointer
    intervals: Pointer
    s_q: I32
    s_k: I32
    batch_stride: I32


class SumArgs(NamedTuple):
    dk_parts: Pointer
    dv_parts: Pointer
    dk: Pointer
    dv: Pointer
    kv_heads: I32
    all_heads: I32
    s_k: I32
    d: I32
    d_v: I32
    parts: I32
    dk_batch: I64
    dk_head: I64
    dk_row: I64
    dv_batch: I64
    dv_head: I64
    dv_row: I64


class SumParams(NamedTuple):
    """What sm90_fmha_sum_parts is compiled for."""

    Element: torch.dtype
