"""mla in CUDA C++ for Hopper, backward: the kernel of `fmha` with two more operands (`backward.py`).

q with q_pe and k with k_pe are joined in shared memory only, and dq is divided when it is rounded.  At DeepSeek's
widths a tile of 64 queries and 128 keys is 13.6 MFLOP, 3328 cycles of the tensor cores.  dk_pe of each head is written
in float32, 4 * B * H * S_k * D_pe bytes, then summed in the order of the heads.

Registers, of 240: dK and dV of 64 keys take 160.  What else lives at once takes up to 64: S^T and P rounded while the
exponentials run; dP^T and P; two parts of dQ.  So dS is computed from P rounded and lives in shared memory alone, from
where dK reads it.  That frees dK to run behind S^T of the next tile, during its exponentials.
Shared memory: K and V 80 KB, two stages of Q and dO 80, dS 16, dQ 48, lse and delta 1.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.compilers.kernel_args import F32, I32, I64, Map, Pointer
from tilewright.jit.cuda_launch import CudaKernel
from tilewright.jit.tape import scratch
from tilewright.mask.packed import PACKED_PROGRAMS
from tilewright.ops.attention.kernels.sm90 import backward as fmha
from tilewright.ops.attention.kernels.sm90 import backward_schedule as divisions
from tilewright.ops.attention.kernels.sm90.backward import Config, Shared
from tilewright.ops.attention.kernels.sm90.backward_args import Params
from tilewright.ops.attention.kernels.sm90.forward import columns
from tilewright.ops.attention.kernels.triton.latent.head_sum import head_sum
from tilewright.ops.attention.layout import addressable
from tilewright.ops.attention.mla import BACKWARD
from tilewright.ops.attention.mla.args import MlaBackwardArgs, MlaBucket, backward_bucket, of_fmha


class Args(NamedTuple):
    map_q: Map
    map_q_pe: Map
    map_k: Map
    map_k_pe: Map
    map_v: Map
    map_do: Map
    map_dk: Map
    map_dv: Map
    map_stats: Map
    dk_pe: Pointer
    dq_acc: Pointer
    flags: Pointer
    s_q: I32
    s_k: I32
    heads: I32
    batches: I32
    d_pe: I32
    left: I32
    right: I32
    section_heads: I32
    alternate: bool
    scale: F32
    intervals: Pointer


class PostprocessArgs(NamedTuple):
    dq_acc: Pointer
    dq: Pointer
    dq_pe: Pointer
    s_q: I32
    s_k: I32
    d: I32
    d_pe: I32
    heads: I32
    left: I32
    right: I32
    scale: F32
    dq_batch: I64
    dq_head: I64
    dq_row: I64
    dq_pe_batch: I64
    dq_pe_head: I64
    dq_pe_row: I64
    intervals: Pointer


_FOLDER, _ARCHS = Path(__file__).parent, ("sm_90a",)
KERNEL = CudaKernel(_FOLDER / "backward.cuh", "sm90_mla_backward", Args, archs=_ARCHS, dependent=True)
POSTPROCESS = CudaKernel(
    _FOLDER / "postprocess.cuh", "sm90_mla_postprocess", PostprocessArgs, archs=_ARCHS, dependent=True
)


def backward(outs: tuple[Tensor, ...], args: MlaBackwardArgs, config: Config) -> None:
    """Write dq, dq_pe, dk, dk_pe and dv; S_k > 0.  The mask is a band or packed sequences."""
    dq, dq_pe, dk, dk_pe, dv = outs
    (batch, heads, s_q, _), (s_k, d_pe) = args.q.shape, args.k_pe.shape[2:]
    params, tiles = _params(args, config), batch * heads * -(-s_q // config.block_m)
    dk_pe_per_head = scratch((batch, heads, s_k, d_pe), torch.float32, dk.device)
    shared = fmha.preprocess(args.backward_of(args.forward.without_rope), tiles, params)
    _products((dk, dk_pe_per_head, dv), args, shared, params)
    _postprocess(dq, dq_pe, args, shared, tiles, params)
    head_sum(dk_pe, dk_pe_per_head)


def _products(dkv: tuple[Tensor, Tensor, Tensor], args: MlaBackwardArgs, shared: Shared, params: Params) -> None:
    """Write dk, dk_pe of each head and dv, and add up dq in float32."""
    dk, dk_pe, dv = dkv
    (batch, heads, s_q, _), s_k = args.q.shape, args.k.shape[2]
    left, right = shared.band
    rows = params.kBlockM
    tensors = {
        "q": (args.q, rows),
        "q_pe": (args.q_pe, rows),
        "k": (args.k, divisions.KEYS),
        "k_pe": (args.k_pe, divisions.KEYS),
        "v": (args.v, divisions.KEYS),
        "do": (args.do, rows),
        "dk": (dk, fmha.WARPGROUP_M),
        "dv": (dv, fmha.WARPGROUP_M),
    }
    grid, section_heads = divisions.schedule(batch * heads, s_k, s_q * (params.kD * 6 + params.kDv * 2), args.q.device)
    KERNEL(
        (grid,),
        Args(
            **fmha.maps(tensors, shared, params),
            dk_pe=dk_pe,
            dq_acc=shared.dq_acc,
            flags=shared.flags,
            s_q=s_q,
            s_k=s_k,
            heads=heads,
            batches=batch,
            d_pe=dk_pe.shape[3],
            left=left,
            right=right,
            section_heads=section_heads,
            alternate=divisions.differ_in_work(shared.band),
            scale=args.scale,
            intervals=shared.intervals,
        ),
        params,
        block=fmha.THREADS,
        shared_bytes=fmha.shared_bytes(params),
    )


def _postprocess(dq: Tensor, dq_pe: Tensor, args: MlaBackwardArgs, shared: Shared, tiles: int, params: Params) -> None:
    """Scale and round dq and dq_pe."""
    _, heads, s_q, d = args.q.shape
    (left, right), (dq_batch, dq_head, dq_row, _) = shared.band, dq.stride()
    dq_pe_batch, dq_pe_head, dq_pe_row, _ = dq_pe.stride()
    POSTPROCESS(
        (tiles,),
        PostprocessArgs(
            dq_acc=shared.dq_acc,
            dq=dq,
            dq_pe=dq_pe,
            s_q=s_q,
            s_k=args.k.shape[2],
            d=d,
            d_pe=dq_pe.shape[3],
            heads=heads,
            left=left,
            right=right,
            scale=args.scale,
            dq_batch=dq_batch,
            dq_head=dq_head,
            dq_row=dq_row,
            dq_pe_batch=dq_pe_batch,
            dq_pe_head=dq_pe_head,
            dq_pe_row=dq_pe_row,
            intervals=shared.intervals,
        ),
        params,
        block=fmha.POINTWISE_THREADS,
    )


def _params(args: MlaBackwardArgs, config: Config) -> Params:
    return Params(
        kD=-(-columns(args.q.shape[3], args.q_pe.shape[3]) // 16) * 16,
        kDv=-(-args.v.shape[3] // 16) * 16,
        kBlockM=config.block_m,
        kStages=config.stages,
        kDsStages=config.ds_stages,
        kOutStages=config.out_stages,
        kSoftcap=False,
        kSlope=False,
        kPacked=bool(args.program),
        kByBatch=fmha.by_batch(args.program),
        Element=args.q.dtype,
    )


# ------------------------------------------------------------------------------------------------------- what to choose

_LATENT = (Config(64, 2, 1, 1),)
"""For three boxes of q and k, as in DeepSeek: 230400 of 232448 bytes, with one stage of dS and of results."""

CONFIGS: tuple[Config, ...] = tuple(dict.fromkeys((*_LATENT, *fmha.CONFIGS)))
"""Every config that `configure` and `candidates` can return."""


def configure(bucket: MlaBucket, dtype: torch.dtype) -> Config:
    """The first candidate."""
    return candidates(bucket, dtype)[0]


def candidates(bucket: MlaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit registers and shared memory at these widths."""
    width = columns(bucket.D, bucket.D_pe)
    return _LATENT if width > 128 else fmha.candidates(of_fmha(bucket)._replace(D=width), dtype)


_MAX_D, _MAX_D_V = 192, 128


def why_not(args: MlaBackwardArgs) -> str | None:
    sizes, (d, d_pe, d_v) = backward_bucket(args), (t.shape[3] for t in (args.q, args.q_pe, args.v))
    width = columns(d, d_pe)
    if not sizes.S_k:
        return "has no keys to read"
    if args.program not in ("", *PACKED_PROGRAMS):
        return "has causal masks, windows and packed sequences; others are programs, which triton evaluates"
    if not sizes.aligned or not addressable(args.o):
        return "needs addresses and strides of q, q_pe, k, k_pe, v, do and o that are multiples of 16 bytes"
    if any(n % 8 for n in (d, d_pe, d_v)):
        return f"has head dimensions that are multiples of 8, got D={d}, D_pe={d_pe}, D_v={d_v}"
    if d_pe > fmha.BOX_COLUMNS or width > _MAX_D or d_v > _MAX_D_V:
        return (
            f"has rotated parts of up to {fmha.BOX_COLUMNS} numbers, {_MAX_D} with D in whole {fmha.BOX_COLUMNS}s, and "
            f"D_v up to {_MAX_D_V}, got D={d}, D_pe={d_pe}, D_v={d_v}"
        )
    return fmha.why_not_device(args.q)


@register_kernel(
    BACKWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, ...], args: MlaBackwardArgs, config: Config) -> None:
    backward(outs, args, config)
