"""Grouped products in plain torch: the product of each group, and nothing outside of the groups.

On a CPU the sizes of groups are read.  On a GPU nothing may synchronize: torch's own grouped kernel runs if it computes
the same; otherwise every group multiplies all rows and a mask selects its rows, at `G` times the work.  Tracing and
CUDA graphs use the masked form, too.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch.derivatives import level_is_open
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.grouped.args import GroupedArgs, KGroupedArgs
from tilewright.ops.gemm.operands import FP8, Major, apply_epilogue, columns_out, copyable, major_a, major_b
from tilewright.ops.gemm.scaled import cublas as scaled_cublas
from tilewright.ops.gemm.scaled.scaling import Scaling, granularity, scaling_of
from tilewright.ops.quant.numbers import restore


def rows_product(args: GroupedArgs, out: Tensor | None = None) -> Tensor:
    """Returns act(rows of a in group g @ b[g]) for every group; other rows of `out` stay."""
    a, b, scale_a, scale_b, starts, ends, _, activation, out_dtype = args
    a, b = scaled(a, scale_a), _transposed_scaled(b, scale_b)
    if _torch_supports(a, b, starts, activation, out_dtype):
        # With wrong ends torch's kernel would read and write outside of the tensors
        offs = ends.clamp(0, a.shape[1]).cummax(0).values
        computed = torch._grouped_mm(a[0], b, offs=offs, out_dtype=out_dtype)[None]
        if out is None:
            return computed
        mask = torch.arange(a.shape[1], device=a.device) < offs[-1]
        return _merge(computed, mask[:, None], out)
    if a.dtype == torch.float64:
        out_dtype = torch.float64
    count, rows = a.shape[0], a.shape[1]
    first, last = bounds(starts, ends, count, rows)
    row_idx = torch.arange(rows, device=a.device)
    mask = ((row_idx >= first[:, None]) & (row_idx < last[:, None]))[..., None]  # (G, R, 1)
    if count == b.shape[0]:
        return _merge(product(plain_args(_masked(a, mask), b, out_dtype, activation)), mask, out)
    result = a.new_zeros((1, rows, columns_out(b.shape[-1], activation)), dtype=out_dtype) if out is None else out
    if readable(ends):
        for g, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            if start < end:
                result[0, start:end] = product(plain_args(a[0, start:end], b[g], out_dtype, activation))
        return _differentiable(result, a, b, activation)
    total = result
    for g in range(b.shape[0]):
        computed = product(plain_args(_masked(a[0], mask[g]), b[g], out_dtype, activation))
        total = torch.where(mask[g], computed[None], total)
    return _differentiable(total, a, b, activation) if out is None else out.copy_(total)


def _differentiable(result: Tensor, a: Tensor, b: Tensor, activation: str) -> Tensor:
    """Returns `result` (1, R, N) with a gradient if a or b needs one, also if no group has rows: then zeros."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad) and not result.requires_grad:
        # (0, K) @ (K, N): no number of either is read
        no_rows = product(plain_args(a[0, :0], b[:0].sum(0), result.dtype, activation))
        result = torch.cat((no_rows[None], result), 1)
    return result


def product_along_k(args: KGroupedArgs, out: Tensor | None = None) -> Tensor:
    """Returns a[:, group g] @ b[group g, :] + c[g] for every group.

    cuBLAS multiplies scaled float8 on a GPU if it supports the scaling: it accumulates as tensor cores do.
    """
    a, b, scale_a, scale_b, c, ends, out_dtype = args
    if scale_a is not None and scale_b is not None and _cublas_supports(a, b, scale_a, scale_b):
        summed = _scaled_along_k(a, b, scale_a, scale_b, c, ends, out_dtype)
        return summed if out is None else out.copy_(summed)
    a, b = scaled(a, scale_a), _transposed_scaled(b, scale_b)
    if a.dtype == torch.float64:
        out_dtype = torch.float64
    shape = (ends.shape[0], a.shape[0], b.shape[1])
    products = [
        product(plain_args(left, right, out_dtype)._replace(c=None if c is None else c[g]))
        for g, (left, right) in enumerate(_slices_of_k(a, b, ends))
    ]
    result = torch.stack(products) if products else a.new_zeros(shape, dtype=out_dtype)
    return result if out is None else out.copy_(result)


def _cublas_supports(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Returns whether cuBLAS supports these: float8 with a scale for 128 of t, on this GPU."""
    if a.dtype != FP8 or a.device.type != "cuda" or scaling_of(a, b, scale_a, scale_b) is not Scaling.TOKEN_TOKEN:
        return False
    return scaled_cublas.takes(a.device.index or 0, Scaling.TOKEN_TOKEN)


def _scaled_along_k(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, c: Tensor | None, ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiplies each group by cuBLAS, with zeros in place of all others; scale_a (M, T/128), scale_b (N, T/128)."""
    first, last = bounds(None, ends, 1, b.shape[0])
    k_idx = torch.arange(b.shape[0], device=b.device)
    blocks = 128 * torch.arange(scale_a.shape[1], device=b.device)
    products = []
    for g in range(ends.shape[0]):
        mask, scale_mask = (k_idx >= first[g]) & (k_idx < last[g]), (blocks + 128 > first[g]) & (blocks < last[g])
        left, right = (torch.where(mask, t.view(torch.uint8), 0).view(t.dtype) for t in (a, b.mT))
        left_scale, right_scale = (_masked(t, scale_mask) for t in (scale_a, scale_b))
        z = scaled_cublas.product(left, right.mT, left_scale, right_scale, torch.float32)
        assert z is not None, "checked before"
        products.append(apply_epilogue(z, None, None if c is None else c[g], "", out_dtype))
    return torch.stack(products) if products else a.new_zeros((0, a.shape[0], b.shape[1]), dtype=out_dtype)


def _slices_of_k(a: Tensor, b: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    first, last = bounds(None, ends, 1, b.shape[0])
    if readable(ends):
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            yield a[:, start : max(start, end)], b[start : max(start, end)]
        return
    k_idx = torch.arange(b.shape[0], device=b.device)
    for g in range(ends.shape[0]):
        mask = ((k_idx >= first[g]) & (k_idx < last[g]))[:, None]
        yield _masked(a, mask.mT), _masked(b, mask)


def bounds(starts: Tensor | None, ends: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (first row, row after the last) of every group, clamped to 0..rows.  Without starts, groups begin at row
    0 of their batch, or in a single batch at the end of the previous group.
    """
    if starts is None:
        starts = torch.zeros_like(ends)
        if count == 1:
            starts = torch.cat((starts[:1], ends[:-1]))
    return starts.clamp(0, rows), ends.clamp(0, rows)


def readable(ends: Tensor) -> bool:
    """Returns whether the host can read the values without synchronizing or breaking a trace."""
    plain = not (ends.is_meta or is_fake(ends) or torch._C._functorch.is_functorch_wrapped_tensor(ends))
    return ends.device.type == "cpu" and plain and not torch.compiler.is_compiling()


def scaled(q: Tensor, scales: Tensor | None) -> Tensor:
    """Returns q (..., R, K) times its scales in float32 (float64 for float64 q); without scales float8 becomes
    bfloat16, exactly.
    """
    if scales is None:
        return q.to(torch.bfloat16) if q.dtype == FP8 else q
    layout = granularity(scales.shape, *q.shape[-2:])
    assert layout is not None, "the checks allow no other shapes"
    return restore(q, scales, layout, torch.float64 if q.dtype == torch.float64 else torch.float32)


def _transposed_scaled(b: Tensor, scales: Tensor | None) -> Tensor:
    """Returns b (..., K, N) times its scales, which are those of b.mT."""
    return scaled(b, None) if scales is None else scaled(b.mT, scales).mT


def _masked(t: Tensor, mask: Tensor) -> Tensor:
    """Returns `t` with zeros outside of the mask, also where it is NaN."""
    return torch.where(mask, t, torch.zeros((), dtype=t.dtype, device=t.device))


def _merge(computed: Tensor, mask: Tensor, out: Tensor | None) -> Tensor:
    """Returns `computed` where the mask is set; elsewhere zeros, or the values of `out`, which is written."""
    return _masked(computed, mask) if out is None else out.copy_(torch.where(mask, computed, out))


def _torch_supports(a: Tensor, b: Tensor, starts: Tensor | None, activation: str, out_dtype: torch.dtype) -> bool:
    """Returns whether torch's grouped kernel computes this: it takes aligned bfloat16, and rounds once."""
    if a.device.type != "cuda" or torch.version.hip is not None or not a.dtype == out_dtype == torch.bfloat16:
        return False
    differentiated = level_is_open() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))
    plain = a.shape[0] == 1 and starts is None and activation == "" and not differentiated
    fits = copyable(a) and copyable(b) and major_a(a) is Major.K and major_b(b) is not None
    fits = fits and b.shape[-1] % 8 == 0 and a.numel() > 0 and b.numel() > 0
    return plain and fits and hasattr(torch, "_grouped_mm")
