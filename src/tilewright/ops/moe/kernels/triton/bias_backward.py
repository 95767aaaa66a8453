"""The gate of `fused_moe_bias`, backwards, and the gradients of its biases.

With h = gate(product + bias), a row's gradient before its weight dh, and its weight w: dweight = sum(h dh) + sum of the
second bias times dy; the gradients of gate and up get w dh; w h is what dw2 is made of.  A program takes a row.
Gradients of biases are sums over the rows of an expert, by programs that take some columns of one expert: nothing is
added atomically.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.activation.kernels.triton.activations import activate, clamped
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs
from tilewright.ops.moe.kernels.pipeline import Order
from tilewright.ops.moe.kernels.triton.bias_steps import local_expert

BLOCK_N, BLOCK_ROWS, BLOCK_COLUMNS = 1024, 32, 64


@triton.jit
def _gate_backward_kernel(
    dboth, weighted, dweights, both, dhidden, dy, bias, second_bias, weights, ids, expert_map, slots, positions, N, H,
    alpha, limit,  # both: (S, 2 N)  dhidden: (S, N)  dy: (S, H)  bias: (E, 2 N)  second_bias: (E, H)
    ACT: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if tl.load(positions + slot) < 0:
        tl.store(dweights + slot, 0.0)
        return
    dtype: tl.constexpr = dboth.dtype.element_ty
    expert = local_expert(ids, expert_map, slot)
    weight = tl.load(weights + slot).to(tl.float32)
    both += row * 2 * N
    dboth += row * 2 * N
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask = offs_n < N
        if INTERLEAVED:
            offs_gate, offs_up = 2 * offs_n, 2 * offs_n + 1
        else:
            offs_gate, offs_up = offs_n, N + offs_n
        gate = tl.load(both + offs_gate, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(both + offs_up, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            gate += tl.load(bias + expert * 2 * N + offs_gate, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * 2 * N + offs_up, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(dhidden + row * N + offs_n, mask=mask, other=0.0).to(tl.float32)
        if ACT == "swigluoai":
            act, up, slope, gate_passes, up_passes = clamped(gate, up, alpha, limit, PRECISE)
        else:
            act, slope = activate(gate, ACT, PRECISE)
        acc += act * up * dh
        dh *= weight
        dgate, dup = dh * up * slope, dh * act
        if ACT == "swigluoai":
            dgate, dup = tl.where(gate_passes, dgate, 0.0), tl.where(up_passes, dup, 0.0)
        tl.store(dboth + offs_gate, dgate.to(dtype), mask=mask)
        tl.store(dboth + offs_up, dup.to(dtype), mask=mask)
        tl.store(weighted + row * N + offs_n, (weight * act * up).to(dtype), mask=mask)
    if second_bias is not None:
        for start in range(0, H, BLOCK_N):
            offs_h = start + tl.arange(0, BLOCK_N)
            dy_row = tl.load(dy + row * H + offs_h, mask=offs_h < H, other=0.0).to(tl.float32)
            acc += dy_row * tl.load(second_bias + expert * H + offs_h, mask=offs_h < H, other=0.0).to(tl.float32)
    tl.store(dweights + slot, tl.sum(acc, 0).to(dweights.dtype.element_ty))


@triton.jit
def _sum_rows_kernel(
    total, rows, weights, slots, starts, ends, N,  # total: (E, N)  rows: (S, N)
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total[e] = the sum of the rows of expert e, each times the weight of its slot if there are weights."""
    expert = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, last = tl.load(starts + expert), tl.load(ends + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        mask = (row < last)[:, None] & (offs_n < N)[None, :]
        value = tl.load(rows + row.to(tl.int64)[:, None] * N + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights is not None:
            slot = tl.load(slots + row, mask=row < last, other=0)
            value *= tl.load(weights + slot, mask=row < last, other=0.0).to(tl.float32)[:, None]
        acc += value
    tl.store(total + expert * N + offs_n, tl.sum(acc, 0).to(total.dtype.element_ty), mask=offs_n < N)


_gate_backward = TritonKernel(_gate_backward_kernel)
_sum_rows = TritonKernel(_sum_rows_kernel)


def gate_backward(
    outs: tuple[Tensor, Tensor, Tensor], both: Tensor, dhidden: Tensor, dy: Tensor, args: FusedMoeBiasArgs, rows: Order
) -> None:
    """outs: the gradient of both (S, 2 I) after its bias, the weighted gated rows (S, I), the gradient of weights.

    dy: (S, H), in the order of experts.  Rows of dropped slots are neither read nor written; gradients of their weights
    are 0.
    """
    count, inner = dhidden.shape
    biases = (None if b is None else b.contiguous() for b in (args.w1_bias, args.w2_bias))
    expert_map = None if args.expert_map is None else args.expert_map.contiguous()
    act = "gelu_tanh" if args.activation == "gelu" else args.activation
    _gate_backward(
        (count,),
        (
            *outs, both, dhidden, dy, *biases, args.topk_weights.contiguous(), args.topk_ids.contiguous(), expert_map,
            rows.slots, rows.positions, inner, dy.shape[1], float(args.alpha), float(args.limit),
        ),
        (
            act, bool(args.interleaved), both.dtype == torch.float32,
            min(BLOCK_N, max(128, triton.next_power_of_2(inner))),
        ),
        num_warps=4,
    )  # fmt: skip


def sum_rows(total: Tensor, values: Tensor, weights: Tensor | None, rows: Order) -> None:
    """total (E, N) = sums of values (S, N) over the rows of each expert, with the weights (T, k) of their slots."""
    experts, columns = total.shape
    weights = None if weights is None else weights.contiguous()
    _sum_rows(
        (experts, triton.cdiv(columns, BLOCK_COLUMNS)),
        (total, values, weights, rows.slots, rows.starts, rows.ends, columns),
        (BLOCK_ROWS, BLOCK_COLUMNS),
        num_warps=4,
    )
