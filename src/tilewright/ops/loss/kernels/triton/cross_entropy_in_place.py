"""Cross entropy with the gradient written over the logits, in Triton: a program reads its row, then reads it again
backwards, in part from the L2, and writes the gradient.

Traffic: 4*M*V bytes at bf16, so 4096x128256 cannot beat 489 us at 4.3 TB/s; what of the second reading has left the L2
comes on top.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel, target_of
from tilewright.ops.loss.entropy import TOTALS, Options
from tilewright.ops.loss.in_place import IN_PLACE, InPlaceArgs, InPlaceBucket
from tilewright.ops.loss.kernels.triton.cross_entropy_kernel import cross_entropy_in_place_kernel
from tilewright.ops.loss.kernels.triton.rows_launch import (
    count_rows,
    flags,
    is_aligned,
    lanes,
    reduce_rows,
    row_candidates,
    row_config,
)
from tilewright.ops.rows import no_float64

_rows = TritonKernel(cross_entropy_in_place_kernel)


class InPlaceConfig(NamedTuple):
    steps: int  # 16-byte vectors of a thread in one step of the loops over a row
    num_warps: int
    num_stages: int = 1
    held: int = 0  # columns in registers between the passes, a multiple of a step's lanes
    packed: bool = False  # elements of 16 bits stay packed in pairs (NVIDIA)


def configure(bucket: InPlaceBucket, dtype: torch.dtype) -> InPlaceConfig:
    # H200, 2026-11, a seventh of the rows ignored: 4096 x 128256 by 8 warps 691 us, 16 warps 616, 32 warps 714; 8192
    # x 32000 by 8 warps 296, 16 warps 329.  Columns held in registers cost programs: 680 to 875 us
    return InPlaceConfig(*row_config(bucket, dtype, steps=4, num_warps=16 if bucket.N > 65536 else 8))


def candidates(bucket: InPlaceBucket, dtype: torch.dtype) -> tuple[InPlaceConfig, ...]:
    """Those of the forward, and 16 to 128 columns a thread held."""
    plain = tuple(InPlaceConfig(*config) for config in row_candidates(bucket, dtype))
    held = tuple(
        InPlaceConfig(steps, warps, 1, columns * 32 * warps, dtype.itemsize == 2)
        for warps in (4, 8, 16, 32)
        for steps in (1, 2, 4)
        for columns in (16, 32, 64, 128)
        if columns * 32 * warps < 2 * bucket.N and columns * dtype.itemsize * warps <= 4096
    )
    return plain + held


_WIDTHS = tuple(1 << k for k in range(18))
CONFIGS = tuple(
    dict.fromkeys(configure(InPlaceBucket(4096, n, 0, 1), d) for n in _WIDTHS for d in (torch.bfloat16, torch.float32))
)


@register_kernel(
    IN_PLACE,
    configure=configure,
    config_type=InPlaceConfig,
    configs=CONFIGS,
    candidates=candidates,
    why_not=lambda args: no_float64(*args[:5]),
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, ...], args: InPlaceArgs, config: InPlaceConfig) -> None:
    loss, lse = outs
    x, options = args.logits, Options(*args[5:])
    m, n = x.shape
    target, weight = args.target.contiguous(), None if args.weight is None else args.weight.contiguous()
    dloss = None if args.dloss is None else args.dloss.contiguous()
    softcap, smooth, weighted = flags(options, weight)
    reduced, mean = options.reduction != "none", options.reduction == "mean"
    rows = scratch((m,), torch.float32, x.device) if reduced else loss
    totals = args.totals.contiguous() if args.totals is not None else scratch((TOTALS,), torch.float32, x.device)
    if mean and args.totals is None:
        count_rows(totals, target, weight, n, options)
    parameters = (
        rows, lse, x, target, totals if weight is None else weight, totals, totals if dloss is None else dloss, n,
        x.stride(0), options.ignore_index, options.label_smoothing, options.z_loss, options.softcap,
    )  # fmt: skip
    z = options.z_loss != 0
    packed = config.packed and x.itemsize == 2 and target_of(x).startswith("sm_")
    constants = (
        config.steps, lanes(config.num_warps, x.dtype), config.num_stages, is_aligned(x), softcap, smooth, weighted,
        z and not reduced, mean, not reduced, dloss is not None, z, config.held, packed,
    )  # fmt: skip
    _rows((m,), parameters, constants, num_warps=config.num_warps)
    if reduced:
        reduce_rows(loss, totals, rows, lse, target, weight, n, options, count=False)
