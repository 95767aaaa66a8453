"""Grouped products on the kernels of `dense.py` and `fp8.py`: what both refuse, the groups that they read, and results
that they do not write themselves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs, whole_blocks
from tilewright.ops.gemm.grouped.reference import bounds
from tilewright.ops.gemm.kernels.sm90.dense_kernel import GemmType, Groups
from tilewright.ops.gemm.kernels.sm90.operands import why_not_16_bit, why_not_arch, why_not_machine, why_not_scaled
from tilewright.ops.gemm.operands import Major, copyable, major_a, major_b


def why_not_rows(args: GroupedArgs) -> str | None:
    """Why neither kernel can run these groups of rows; None if one can."""
    reason = why_not_machine(args.a)
    if reason is not None:
        return reason
    if args.scale_a is None or args.scale_b is None:
        if major_a(args.a) is not Major.K:  # groups begin at any row, and a copy at multiples of 16 bytes of a line
            return "needs a contiguous along K"
        return _why_not_16_bit(args.a, args.b, None, args.activation, args.out_dtype)
    return why_not_scaled(
        args.a, args.b, args.scale_a, args.scale_b, None, None, args.activation, args.out_dtype
    )  # fmt: skip


def why_not_along_k(args: KGroupedArgs) -> str | None:
    """Why neither kernel can run these groups along K; None if one can."""
    a, b, scale_a, scale_b, c, _, out_dtype = args
    reason = why_not_arch(a)
    if reason is not None:
        return reason
    if c is not None and c.shape[-1] > 1 and c.stride(-1) != 1:
        return "needs c contiguous along N"
    if scale_a is None or scale_b is None:
        if major_a(a) is not Major.MN or major_b(b) is not Major.MN:
            # Groups begin at any K, TMA boxes at multiples of 16 bytes along the contiguous dimension
            return "needs a contiguous along M and b along N"
        return _why_not_16_bit(a, b, c, "", out_dtype)
    return why_not_scaled(a, b, scale_a, scale_b, None, c, "", out_dtype) or whole_blocks(args)


def _why_not_16_bit(a: Tensor, b: Tensor, c: Tensor | None, activation: str, out_dtype: torch.dtype) -> str | None:
    if major_a(a) is None or major_b(b) is None:
        return "needs a and b contiguous along one of their last two dimensions"
    return why_not_16_bit(a, b, None, c, activation, out_dtype)


def why_not_with_scales(args: GroupedArgs | KGroupedArgs) -> str | None:
    """Why the kernel for scaled operands cannot run these: they have no scales."""
    return "multiplies operands with scales" if args.scale_a is None or args.scale_b is None else None


def why_not_without_scales(args: GroupedArgs | KGroupedArgs) -> str | None:
    """Why the kernel for 16-bit operands cannot run these: they have scales."""
    return None if args.scale_a is None or args.scale_b is None else "multiplies operands without scales"


def groups_of_rows(args: GroupedArgs) -> Groups:
    """Returns the groups of rows of a; a single group begins at row 0 of the only matrix whether masked or not."""
    masked = args.a.shape[0] == args.b.shape[0]
    return Groups(GemmType.GROUPED_M, args.b.shape[0], args.starts, args.ends, masked)


def groups_along_k(args: KGroupedArgs) -> Groups:
    """Returns the groups along K."""
    return Groups(GemmType.GROUPED_K, args.ends.shape[0], None, args.ends)


def write_rows(d: Tensor, args: GroupedArgs, gemm: Callable[[Tensor], None]) -> None:
    """Has `gemm` write the rows of the groups to d; through other memory if TMA cannot write d."""
    if copyable(d):
        gemm(d)
        return
    source = torch.empty_like(d, memory_format=torch.contiguous_format)
    gemm(source)
    copy_rows(d, source, args.starts, args.ends)


def copy_rows(d: Tensor, source: Tensor, starts: Tensor | None, ends: Tensor) -> None:
    """Copies the rows of the groups from `source` (Ba, R, N) to `d`, and no others."""
    count, rows = d.shape[:2]
    first, last = bounds(starts, ends, count, rows)
    row_idx = torch.arange(rows, device=d.device)
    mask = (row_idx >= first[:, None]) & (row_idx < last[:, None])
    mask = mask if count == ends.shape[0] else mask.any(0, keepdim=True)
    d.copy_(torch.where(mask[..., None], source, d))


def is_done_along_k(d: Tensor, args: KGroupedArgs) -> bool:
    """Returns whether nothing is left to launch: d is empty, or is set to c as no tensor map describes K = 0."""
    if not d.numel():
        return True
    if args.b.shape[0]:
        return False
    if args.c is None:
        d.zero_()
    else:
        d.copy_(args.c)
    return True
