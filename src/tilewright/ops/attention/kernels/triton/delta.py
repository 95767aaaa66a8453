"""delta of each row, and the gradient of the sinks: what every backward of attention needs besides the matmuls.

    delta  = rowsum(dO * O) - dlse
    dsinks = -sum over batch and queries of exp(sink - lse) * delta

delta reads do and o once, 4 * B * H * S_q * D_v bytes in bf16.
"""

import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel

_ROWS, _COLUMNS, _STEP = 32, 64, 2048


@triton.jit
def delta_kernel(
    out, do, o, dlse, H, S, stride_dob, stride_doh, stride_dos, stride_ob, stride_oh, stride_os,
    D_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip  # out, dlse: (B, H, S) fp32   do, o: (B, H, S, D_V) by stride
    """out = rowsum(do * o) - dlse."""
    tiles = tl.cdiv(S, ROWS)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    offs = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    in_range = offs < S
    do_head = do + (head // H * stride_dob + head % H * stride_doh)
    o_head = o + (head // H * stride_ob + head % H * stride_oh)
    acc = tl.zeros((ROWS,), tl.float32)
    for start in tl.static_range(0, D_V, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        mask = in_range[:, None] & (columns < D_V)[None, :]
        x = tl.load(do_head + (offs[:, None] * stride_dos + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
        y = tl.load(o_head + (offs[:, None] * stride_os + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(x * y, 1)
    if dlse is not None:
        acc -= tl.load(dlse + head * S + offs, mask=in_range, other=0.0)
    tl.store(out + head * S + offs, acc, mask=in_range)


@triton.jit
def sink_kernel(dsinks, delta, dlse, lse, sinks, B, H, S, STEP: tl.constexpr):
    """dsinks[h] = -sum of e^(sinks[h] - lse) * (delta - dlse) over batch and queries, always in one order."""
    h = tl.program_id(0)
    sink = tl.load(sinks + h)
    acc = tl.zeros((STEP,), tl.float32)
    for b in range(B):
        row = (b * H + h).to(tl.int64) * S
        for start in range(0, S, STEP):
            offs = start + tl.arange(0, STEP)
            # lse >= sink.  A row beyond S, or with only a sink of -inf, has probability 0
            row_lse = tl.load(lse + row + offs, mask=offs < S, other=float("inf"))
            p_sink = tl.where(row_lse == float("-inf"), 0.0, tl.exp(sink - row_lse))
            row_sum = tl.load(delta + row + offs, mask=offs < S, other=0.0)
            if dlse is not None:
                row_sum -= tl.load(dlse + row + offs, mask=offs < S, other=0.0)
            acc += p_sink * row_sum
    tl.store(dsinks + h, -tl.sum(acc, 0))


_delta, _sink = TritonKernel(delta_kernel), TritonKernel(sink_kernel)


def delta(out: Tensor, do: Tensor, o: Tensor, dlse: Tensor | None) -> None:
    """out (B, H, S_q) float32 = rowsum(do * o) - dlse, of do and o (B, H, S_q, D_v) with unit last strides."""
    batch, heads, s_q, d_v = do.shape
    grid = (batch * heads * triton.cdiv(s_q, _ROWS),)
    args = (out, do, o, dlse, heads, s_q, *do.stride()[:3], *o.stride()[:3])
    _delta(grid, args, (d_v, _ROWS, _COLUMNS), num_warps=4)


def sink_gradient(dsinks: Tensor, delta: Tensor, lse: Tensor, sinks: Tensor, dlse: Tensor | None = None) -> None:
    """dsinks (H,) float32 = -sum of exp(sinks - lse) * (delta - dlse) over batch and queries; the others (B, H, S_q).

    dlse: given if delta does not include it.
    """
    batch, heads, s_q = lse.shape
    _sink((heads,), (dsinks, delta, dlse, lse, sinks, batch, heads, s_q), (_STEP,), num_warps=8)
