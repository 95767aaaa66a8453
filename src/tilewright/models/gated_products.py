"""Choose between a GEMM with a gated epilogue and an unfused GEMM followed by the gate, from the tuning tables.

The gated product's own row compares it with torch, which gates in float32. Unfused, a model runs the best product of
that size and then the best gate, and both have rows. So the comparison is with the sum of their times.
"""

import torch
from torch import Tensor

from tilewright.dispatch import contract
from tilewright.dispatch.bucket import row_bucket
from tilewright.dispatch.tables.measured import by_rows
from tilewright.models.linears import forward_op, product_us, sizes


def measured_faster(x: Tensor, weight: Tensor) -> bool:
    """True if the gated x (..., K) @ weight (2N, K).T runs on this machine and was measured faster than unfused."""
    fused = product_us(x, weight, "swiglu")
    if fused is None:
        return False
    n, k = weight.shape
    unfused = unfused_us(n, k, x.dtype, x.device)
    return fused < unfused.get(row_bucket(x.numel() // x.shape[-1]), 0.0)


def won(n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """Microseconds saved by the gated product (M, K) @ (N, K).T, for each bucket of rows where it is faster."""
    unfused = unfused_us(n, k, dtype, device)
    rows = by_rows(forward_op(), sizes(n, k, dtype, gated=True), dtype, device)
    saved = {m: unfused[m] - row.us for m, row in rows.items() if m in unfused and row.backend != "torch"}
    return {m: us for m, us in saved.items() if us > 0}


def unfused_us(n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """Microseconds of product plus gate, for each bucket of rows at which the product was measured.

    The gate takes longer the more rows there are: where it was not measured, the largest smaller M is its lower bound.
    """
    products = by_rows(forward_op(), sizes(n, k, dtype), dtype, device)
    gates = by_rows(contract("swiglu").forward, (n // 2, 1), dtype, device)  # 1: without a multiplier and a limit
    return {
        m: row.us + max((g.us for rows, g in gates.items() if rows <= m), default=0.0) for m, row in products.items()
    }
