"""The steps of `fused_moe_bias` after its two products: gate with bias, and the weighted sum with the second bias.

Traffic: 3 I elements a slot for the gate, the columns of the first product twice more than `fused_moe` moves; for the
sum what `moe_unpermute` moves and the biases of the experts, which the L2 holds.  4096 tokens, k = 4, 2880 wide in
bf16: 283 MB and 118 MB, 67 and 28 us at 4.2 TB/s.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.activation.kernels.triton.activations import activate, clamped
from tilewright.ops.moe.fused_bias.args import FusedMoeBiasArgs
from tilewright.ops.moe.kernels.pipeline import Order

MOST_COLUMNS = 1024  # of a program of the gate
MOST_SUMMED = 512  # of one of the sum: 1024 in float32 spill


@triton.jit
def local_expert(ids, expert_map, slot):
    expert = tl.load(ids + slot).to(tl.int64)
    if expert_map is not None:
        expert = tl.load(expert_map + expert).to(tl.int64)
    return expert


@triton.jit
def _gate_kernel(
    hidden, both, bias, ids, expert_map, slots, positions, N, alpha, limit,  # both: (S, 2 N)  bias: (E, 2 N)
    ACT: tl.constexpr, INTERLEAVED: tl.constexpr, PRECISE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if tl.load(positions + slot) < 0:
        return
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    if INTERLEAVED:
        offs_gate, offs_up = 2 * offs_n, 2 * offs_n + 1
    else:
        offs_gate, offs_up = offs_n, N + offs_n
    both += row * 2 * N
    gate = tl.load(both + offs_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + offs_up, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        bias += local_expert(ids, expert_map, slot) * 2 * N
        gate += tl.load(bias + offs_gate, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias + offs_up, mask=mask, other=0.0).to(tl.float32)
    if ACT == "swigluoai":
        act, factor, _, _, _ = clamped(gate, up, alpha, limit, PRECISE)
        value = factor * act
    else:
        act, _ = activate(gate, ACT, PRECISE)
        value = act * up
    tl.store(hidden + row * N + offs_n, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    out,
    y,
    bias,
    weights,
    ids,
    expert_map,
    positions,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,  # y: (S, N)
):
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(K):
        slot = token * K + j
        row = tl.load(positions + slot).to(tl.int64)
        if row >= 0:
            weight = tl.load(weights + slot).to(tl.float32)
            value = tl.load(y + row * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
            expert = local_expert(ids, expert_map, slot)
            value += tl.load(bias + expert * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
            acc += weight * value
    tl.store(out + token * N + offs_n, acc.to(out.dtype.element_ty), mask=offs_n < N)


_gate = TritonKernel(_gate_kernel)
_combine = TritonKernel(_combine_kernel)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def gate(hidden: Tensor, both: Tensor, args: FusedMoeBiasArgs, rows: Order) -> None:
    """hidden (S, I) = the gated form of both (S, 2 I) with its bias; rows of dropped slots are not written."""
    count, inner = hidden.shape
    block = min(MOST_COLUMNS, max(128, triton.next_power_of_2(inner)))
    act = "gelu_tanh" if args.activation == "gelu" else args.activation
    _gate(
        (count, triton.cdiv(inner, block)),
        (
            hidden, both, _contiguous(args.w1_bias), args.topk_ids.contiguous(), _contiguous(args.expert_map),
            rows.slots, rows.positions, inner, float(args.alpha), float(args.limit),
        ),
        (act, bool(args.interleaved), both.dtype == torch.float32, block),
        num_warps=4,
    )  # fmt: skip


def combine(out: Tensor, y: Tensor, args: FusedMoeBiasArgs, rows: Order) -> None:
    """out[t] = the weighted sum of the rows of token t in y (S, H), each with the bias of its expert."""
    assert args.w2_bias is not None, "without a bias the sum is `moe_unpermute`"
    tokens, k = rows.positions.shape
    width = y.shape[1]
    block = min(MOST_SUMMED, max(128, triton.next_power_of_2(width)))
    _combine(
        (tokens, triton.cdiv(width, block)),
        (
            out, y, args.w2_bias.contiguous(), args.topk_weights.contiguous(), args.topk_ids.contiguous(),
            _contiguous(args.expert_map), rows.positions, width,
        ),
        (k, block),
        num_warps=4,
    )  # fmt: skip
