"""What every backward of attention needs besides the products: delta by row, and the gradient of the sinks.

delta = rowsum(do * o) - dlse: one read of do and o, 4 * B * H * S_q * D_v bytes in bf16.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

_ROWS, _COLUMNS, _STEP = 32, 64, 2048


@triton.jit
def delta_kernel(  # type: ignore[no-untyped-def]
    out, do, o, dlse, H, S, stride_dob, stride_doh, stride_dos, stride_ob, stride_oh, stride_os,
    D_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # out, dlse: (B, H, S) fp32   do, o: (B, H, S, D_V) by stride
    """out = rowsum(do * o) - dlse."""
    tiles = tl.cdiv(S, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = offs < S
    at_do = do + (head // H * stride_dob + head % H * stride_doh)
    at_o = o + (head // H * stride_ob + head % H * stride_oh)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, D_V, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < D_V)[None, :]
        x = tl.load(at_do + (offs[:, None] * stride_dos + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at_o + (offs[:, None] * stride_os + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x * y, 1)
    if dlse is not None:
        total -= tl.load(dlse + head * S + offs, mask=inside, other=0.0)
    tl.store(out + head * S + offs, total, mask=inside)


@triton.jit
def sink_kernel(dsinks, delta, dlse, lse, sinks, B, H, S, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """dsinks[h] = -sum of e^(sinks[h] - lse) * (delta - dlse) over batch and queries, in one order."""
    h = tl.program_id(0)
    sink = tl.load(sinks + h)
    total = tl.zeros((STEP,), tl.float32)
    for b in range(B):
        line = (b * H + h).to(tl.int64) * S
        for start in range(0, S, STEP):
            offs = start + tl.arange(0, STEP)
            # lse is at least the sink: a row that is not there, or has only a sink of -inf, gets no share
            log = tl.load(lse + line + offs, mask=offs < S, other=float("inf"))
            share = tl.where(log == float("-inf"), 0.0, tl.exp(sink - log))
            mean = tl.load(delta + line + offs, mask=offs < S, other=0.0)
            if dlse is not None:
                mean -= tl.load(dlse + line + offs, mask=offs < S, other=0.0)
            total += share * mean
    tl.store(dsinks + h, -tl.sum(total, 0))


_delta, _sink = TritonKernel(delta_kernel), TritonKernel(sink_kernel)


def delta(out: Tensor, do: Tensor, o: Tensor, dlse: Tensor | None) -> None:
    """out (B, H, S_q) float32 = rowsum(do * o) - dlse, of do and o (B, H, S_q, D_v) with unit last strides."""
    batch, heads, s_q, d_v = do.shape
    grid = (batch * heads * triton.cdiv(s_q, _ROWS),)
    args = (out, do, o, dlse, heads, s_q, *do.stride()[:3], *o.stride()[:3])
    _delta(grid, args, (d_v, _ROWS, _COLUMNS), num_warps=4)


def sink_gradient(dsinks: Tensor, delta: Tensor, lse: Tensor, sinks: Tensor, dlse: Tensor | None = None) -> None:
    """dsinks (H,) float32 = -sum of exp(sinks - lse) * (delta - dlse) over batch and queries; the others (B, H, S_q).

    dlse: where delta does not hold it already.
    """
    batch, heads, s_q = lse.shape
    _sink((heads,), (dsinks, delta, dlse, lse, sinks, batch, heads, s_q), (_STEP,), num_warps=8)
