"""How the backward in CUDA C++ divides its work: blocks, sections of heads, and parts of grouped heads.

An item is a tile of 128 keys of one kv head, with all query heads that share it.  Few keys of few kv heads are fewer
items than multiprocessors, or little more, so part of the GPU waits for the longest.  Then the query heads of a kv head
are divided into equal parts, each with items of its own; dk and dv of each part are rounded and added up by one more
kernel.  `parts` estimates the time of every division, by list scheduling of the items' steps and the bytes of the sum,
and takes the least:

    steps * 128 * 64 * 2 * (3 D + 2 D_v) flops at 4.1 TFLOP/s a multiprocessor, a step more for the ends of an item;
    if divided, 4 us for the launch, and dk and dv written, read and summed at 3 TB/s.

The rates are those of the anchors on an H200.
"""

from heapq import heapify, heapreplace

import torch

from tilewright.hardware.sm_budget import usable_sms

KEYS = 128  # as in fmha_backward/shape.cuh
_L2_BYTES = 32 << 20  # for Q, dO and dq_acc of a section of heads, which the blocks of other keys use again
_STEP_QUERIES = 64
_FLOPS, _BYTES, _LAUNCH = 4.1e12, 3e12, 4e-6
_MANY = 2  # items a multiprocessor, with which nothing waits long


def schedule(kv_heads: int, s_k: int, head_bytes: int, device: torch.device) -> tuple[int, int]:
    """Blocks, and heads of a section.   kv_heads: over the batch.   head_bytes: of Q, dO and dq_acc of one of them."""
    key_tiles, sms = -(-s_k // KEYS), usable_sms(device)
    section_heads = max(_L2_BYTES // head_bytes, -(-sms // key_tiles))  # a section fills the GPU
    return min(key_tiles * kv_heads, sms), min(kv_heads, section_heads)


def differ_in_work(band: tuple[int, int]) -> bool:
    """Whether key tiles of this band meet unlike numbers of queries."""
    left, right = band
    return (left < 0) != (right < 0)


def parts(
    kv_heads: int, group: int, sizes: tuple[int, int], band: tuple[int, int], widths: tuple[int, int], sms: int
) -> int:
    """Parts of the query heads of each kv head: a divisor of `group`; 1 where key tiles fill the GPU.

    kv_heads: over the batch.  sizes: S_q, S_k.  widths: D, D_v.
    """
    tiles = -(-sizes[1] // KEYS)
    if group == 1 or tiles * kv_heads >= _MANY * sms:
        return 1
    steps = [_steps(tile * KEYS, sizes, band) for tile in range(tiles)]
    divisions = [n for n in range(1, group + 1) if group % n == 0]
    return min(divisions, key=lambda n: (_seconds(n, kv_heads, group, steps, sizes[1], widths, sms), n))


def _seconds(n: int, kv_heads: int, group: int, steps: list[int], s_k: int, widths: tuple[int, int], sms: int) -> float:
    """The estimate for n parts.   steps: of each key tile and query head."""
    (d, d_v), busy = widths, [0] * sms
    heapify(busy)
    for count in sorted(steps, reverse=True):
        for _ in range(kv_heads * n):
            heapreplace(busy, busy[0] + count * (group // n) + 1)
    products = max(busy) * KEYS * _STEP_QUERIES * 2 * (3 * d + 2 * d_v) / _FLOPS
    moved = kv_heads * s_k * (d + d_v) * 2 * (2 * n + 1)
    return products + (_LAUNCH + moved / _BYTES if n > 1 else 0.0)


def _steps(key: int, sizes: tuple[int, int], band: tuple[int, int]) -> int:
    """Query tiles that meet the key tile from `key` on, as BackwardProblem<false>::query_tiles counts them."""
    (s_q, s_k), (left, right) = sizes, band
    shift = s_k - s_q
    top = 0 if right < 0 else max(0, key - right - shift)
    bottom = s_q - 1 if left < 0 else min(s_q - 1, key + KEYS - 1 + left - shift)
    return max(0, bottom // _STEP_QUERIES - top // _STEP_QUERIES + 1) if top < s_q else 0
