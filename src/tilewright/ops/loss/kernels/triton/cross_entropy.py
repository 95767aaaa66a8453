"""Cross entropy in Triton: a program reads a row once; the backward is one pass over the logits.

Maximum and sum run along the row in every lane (online softmax), so the forward reads the logits and writes two numbers
a row; a second launch of one program adds up the batch.  The backward has a program for each part of a row.

Traffic: forward 2*M*V bytes at bf16, so 4096x128256 cannot beat 239 us at 4.4 TB/s; backward 4*M*V, 500 us.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.loss.arguments import CrossEntropyArgs
from tilewright.ops.loss.cross_entropy import BACKWARD, FORWARD, CrossEntropyBackwardArgs
from tilewright.ops.loss.entropy import Options
from tilewright.ops.loss.kernels.triton.cross_entropy_kernel import (
    cross_entropy_gradient_kernel,
    cross_entropy_rows_kernel,
)
from tilewright.ops.loss.kernels.triton.rows_launch import (
    RowConfig,
    count_rows,
    flags,
    is_aligned,
    lanes,
    reduce_rows,
    row_candidates,
    row_config,
)
from tilewright.ops.rows import RowsBucket, as_rows, no_float64

_FEW_ROWS, _LONG = 512, 16384
_rows = TritonKernel(cross_entropy_rows_kernel)
_gradient = TritonKernel(cross_entropy_gradient_kernel)


class PartConfig(NamedTuple):
    block: int  # columns of a program
    num_warps: int


def configure(bucket: RowsBucket, dtype: torch.dtype) -> RowConfig:
    # H200, 2026-11: 249 us at 4096 x 128256, 8192 x 32000 129; 8 warps with as many bytes in flight take 1 and 6 %
    # longer, fewer bytes in flight up to 70 %.  A few rows leave multiprocessors with a program or two: 256 x 256000 in
    # float32 with a soft cap 203 us, 108 in 16 warps of 4 vectors; 512 x 128256 136 and 108
    if bucket.M <= _FEW_ROWS and bucket.N >= _LONG:
        return row_config(bucket, dtype, steps=4, num_warps=16)
    return row_config(bucket, dtype, steps=8, num_warps=4 if bucket.N >= 4096 else 2)


def configure_backward(bucket: RowsBucket, dtype: torch.dtype) -> PartConfig:
    # H200, 2026-11: one warp with four vectors a thread is the fastest of five forms from 1000 to 128256 columns
    return PartConfig(min(triton.next_power_of_2(bucket.N), 1024 if dtype.itemsize == 2 else 512), 1)


def candidates_backward(bucket: RowsBucket, dtype: torch.dtype) -> tuple[PartConfig, ...]:
    return tuple(
        PartConfig(block, warps)
        for block in (256, 512, 1024, 2048, 4096, 8192, 16384)
        for warps in (1, 2, 4, 8, 16)
        if block < 2 * bucket.N and 4 <= block // (32 * warps) <= 64
    )


_WIDTHS = tuple(1 << k for k in range(18))
CONFIGS = tuple(
    dict.fromkeys(
        configure(RowsBucket(m, n), d) for m in (1, 4096) for n in _WIDTHS for d in (torch.bfloat16, torch.float32)
    )
)
BACKWARD_CONFIGS = tuple(
    dict.fromkeys(configure_backward(RowsBucket(4096, n), d) for n in _WIDTHS for d in (torch.bfloat16, torch.float32))
)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=RowConfig,
    configs=CONFIGS,
    candidates=row_candidates,
    why_not=lambda args: no_float64(*args[:3]),
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, ...], args: CrossEntropyArgs, config: RowConfig) -> None:
    loss, lse, rest, totals = outs
    x, options = as_rows(args.logits), Options(*args[3:])
    m, n = x.shape
    target, weight = args.target.contiguous(), None if args.weight is None else args.weight.contiguous()
    softcap, smooth, weighted = flags(options, weight)
    reduced = options.reduction != "none"
    rows = scratch((m,), torch.float32, x.device) if reduced else loss
    parameters = (
        rows, lse, rest, x, target, totals if weight is None else weight, n, x.stride(0), options.ignore_index,
        options.label_smoothing, options.z_loss, options.softcap,
    )  # fmt: skip
    z = options.z_loss != 0 and not reduced
    constants = (
        config.steps,
        lanes(config.num_warps, x.dtype),
        config.num_stages,
        is_aligned(x),
        softcap,
        smooth,
        weighted,
        z,
    )
    _rows((m,), parameters, constants, num_warps=config.num_warps)
    if reduced:
        reduce_rows(loss, totals, rows, lse, target, weight, n, options, count=True)
    else:
        count_rows(totals, target, weight, n, options)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=PartConfig,
    configs=BACKWARD_CONFIGS,
    candidates=candidates_backward,
    why_not=lambda args: no_float64(*args[:8]),
    batch_invariant=False,
)
def launch_backward(outs: tuple[Tensor], args: CrossEntropyBackwardArgs, config: PartConfig) -> None:
    x, dx, options = as_rows(args.logits), outs[0], Options(*args[8:])
    m, n = x.shape
    target, weight = args.target.contiguous(), None if args.weight is None else args.weight.contiguous()
    dloss, dlse = (None if t is None else t.contiguous() for t in (args.dloss, args.dlse))
    softcap, smooth, weighted = flags(options, weight)
    vector = 16 // x.itemsize
    alike = m == 1 or (x.stride(0) - dx.stride(0)) % vector == 0
    aligned = is_aligned(x, dx)
    parts = -(-n // config.block)
    parameters = (
        dx, x, target, args.totals if weight is None else weight, args.lse.contiguous(),
        args.lse if args.rest is None else args.rest.contiguous(), args.totals,
        args.totals if dloss is None else dloss, args.totals if dlse is None else dlse, n, parts, dx.stride(0),
        x.stride(0), options.ignore_index, options.label_smoothing, options.z_loss, options.softcap,
    )  # fmt: skip
    has_dloss = dloss is not None
    constants = (
        config.block, aligned, alike, softcap, smooth, weighted, options.reduction == "mean",
        options.reduction == "none", has_dloss, dlse is not None, options.z_loss != 0,
        args.rest is not None,
    )  # fmt: skip
    _gradient((m * parts,), parameters, constants, num_warps=config.num_warps)
