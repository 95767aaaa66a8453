"""Order and rows of few slots in one launch: `moe_align`, then `moe_permute`, of which a cast to e4m3 may be part.

Every program counts, among all slots, those before the ones of its token, so none waits for another; the first program
also writes what the products and the sum read.  8 tokens with 8 experts each are 64 slots: with two launches the second
begins 2 us after the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.moe.kernels.triton.cast_rows import scale_memory
from tilewright.ops.moe.kernels.triton.moe_align import _experts
from tilewright.ops.quant.kernels.triton.numbers import as_stored, encode, inverse, magnitude, scale_of
from tilewright.ops.rows import as_rows

MOST_SLOTS = 64
GROUPS = 4  # of 128 columns, in a program


@triton.jit
def _few_slots_kernel(
    y, scales, slots, positions, starts, ends, x, ids, expert_map, S, E, KNOWN, N, stride_x, pitch,
    K: tl.constexpr, CAST: tl.constexpr, GROUPS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """y: (S, N)   scales: (N / 128, pitch)   x: (T, N)   ids, positions: (T, K)   starts, ends: (E,)"""
    token = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offs_n = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + token.to(tl.int64) * stride_x + offs_n, mask=offs_n < N, other=0.0)
    slot = tl.arange(0, BLOCK_S)
    expert = _experts(ids, expert_map, slot, S, E, KNOWN)  # E for dropped slots, and beyond the last

    # The order of all slots
    if (token == 0) & (tl.program_id(1) == 0):
        is_before = (expert[None, :] < expert[:, None]) | (
            (expert[None, :] == expert[:, None]) & (slot[None, :] < slot[:, None])
        )
        row = tl.sum(is_before.to(tl.int32), 1)
        tl.store(slots + row, slot, mask=slot < S)
        tl.store(positions + slot, tl.where(expert < E, row, -1), mask=slot < S)
        offs_e = tl.arange(0, BLOCK_E)
        tl.store(starts + offs_e, tl.sum((expert[:, None] < offs_e[None, :]).to(tl.int32), 0), mask=offs_e < E)
        tl.store(ends + offs_e, tl.sum((expert[:, None] <= offs_e[None, :]).to(tl.int32), 0), mask=offs_e < E)

    # The rows of this token
    stored = values
    if CAST:
        values = values.to(tl.float32)
        scale = scale_of(tl.max(magnitude(values), 1), False)
        stored = encode(values * inverse(scale)[:, None], y)
    for j in tl.static_range(K):
        own = token * K + j
        mine = tl.sum(tl.where(slot == own, expert, 0), 0)
        row = tl.sum(((expert < mine) | ((expert == mine) & (slot < own))).to(tl.int32), 0).to(tl.int64)
        tl.store(y + row * N + offs_n, stored, mask=(offs_n < N) & (mine < E))
        if CAST:
            tl.store(scales + group.to(tl.int64) * pitch + row, scale, mask=(group * 128 < N) & (mine < E))


_kernel = TritonKernel(_few_slots_kernel)


def few_slots(
    order: tuple[Tensor, Tensor, Tensor, Tensor], x: Tensor, ids: Tensor, expert_map: Tensor | None, cast: bool
) -> tuple[Tensor, Tensor | None]:
    """Write order (slots, positions, starts, ends) as `moe_align` does; return rows (T * k, H) in this order, and the
    scales of their cast.   ids: (T, k), at most MOST_SLOTS of them.   Rows of dropped slots are not written.
    """
    x, ids = as_rows(x), ids.contiguous()
    slots, positions, starts, ends = order
    (tokens, columns), k, experts = x.shape, ids.shape[1], starts.shape[0]
    rows = scratch((tokens * k, columns), torch.float8_e4m3fn if cast else x.dtype, x.device)
    scales = scale_memory(tokens * k, columns, x.device) if cast else None
    expert_map = None if expert_map is None else expert_map.contiguous()
    known = experts if expert_map is None else expert_map.shape[0]
    groups = min(GROUPS, triton.next_power_of_2(triton.cdiv(columns, 128)))
    _kernel(
        (tokens, triton.cdiv(columns, 128 * groups)),
        (
            as_stored(rows) if cast else rows, scales, slots, positions, starts, ends, x, ids, expert_map, tokens * k,
            experts, known, columns, x.stride(0), 0 if scales is None else scales.stride(1),
        ),
        (k, cast, groups, max(16, triton.next_power_of_2(tokens * k)), triton.next_power_of_2(experts)),
        num_warps=4,
    )  # fmt: skip
    return rows, scales
