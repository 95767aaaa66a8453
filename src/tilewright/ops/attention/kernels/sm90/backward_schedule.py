"""How the backward in CUDA C++ divides its work: blocks, sections of heads, and parts of grouped heads.

An item is a tile of 128 keys of one kv head, with all query heads that share it.  The query heads of a kv head may be
divided into equal parts, each with items of its own; one more kernel adds up the rounded dk and dv of the parts.
Two things are gained.  Few keys of few kv heads are fewer items than multiprocessors, so part of the GPU would wait.
And under a causal mask items of several heads take longer than their steps, as if each waited in every head for the
item with the most query tiles; why is not known (all heads of a query tile first is no faster).  `parts` estimates the
time of every division, by list scheduling of the items' steps and the bytes of the sum, and takes the least:

    steps * 128 * 64 * 2 * (3 D + 2 D_v) flops at 3.6 TFLOP/s a multiprocessor, a step more for the ends of an item;
    causal: the items of the first round end after all heads but one of the longest item, and 10 % more for later ones;
    if divided, 4 us for the launch, and dk and dv written, read and summed at 3 TB/s.

The rates are fitted to 54 times of 18 problems on an H200: the choice is the best in 15, and at most 5 % behind.
"""

from heapq import heapify, heapreplace

import torch

from tilewright.hardware.sm_budget import usable_sms

KEYS = 128  # as in fmha_backward/shape.cuh
_L2_BYTES = 32 << 20  # for Q, dO and dq_acc of a section of heads, which the blocks of other keys use again
_STEP_QUERIES = 64
_FLOPS, _BYTES, _LAUNCH = 3.6e12, 3e12, 4e-6
_WAITS = 0.1  # of the time of items with several heads, causal
_MANY = 32  # items a multiprocessor, with which little is gained and the estimate takes long


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
    """Parts of the query heads of each kv head: a divisor of `group`; 1 where items are many.

    kv_heads: over the batch.  sizes: S_q, S_k.  widths: D, D_v.
    """
    tiles = -(-sizes[1] // KEYS)
    if group == 1 or tiles * kv_heads >= _MANY * sms:
        return 1
    steps = sorted((_steps(tile * KEYS, sizes, band) for tile in range(tiles)), reverse=True)
    moved = kv_heads * sizes[1] * sum(widths) * 2  # bytes of dk and dv
    flops = KEYS * _STEP_QUERIES * 2 * (3 * widths[0] + 2 * widths[1])  # of a step

    def seconds(n: int) -> float:
        products = _rounds(steps, kv_heads * n, group // n, differ_in_work(band), sms) * flops / _FLOPS
        return products + (_LAUNCH + moved * (2 * n + 1) / _BYTES if n > 1 else 0.0)

    return min((n for n in range(1, group + 1) if group % n == 0), key=lambda n: (seconds(n), n))


def parts_of_packed(kv_heads: int, group: int, keys: int, sms: int) -> int:
    """The same for packed sequences, of which the host knows no lengths, where items are fewer than multiprocessors:
    the fewest query heads one after another, in rounds of items of equal work.
    """
    items = kv_heads * -(-keys // KEYS)
    if items >= sms:
        return 1
    return min((n for n in range(1, group + 1) if group % n == 0), key=lambda n: (-(-items * n // sms) * group // n, n))


def _rounds(steps: list[int], copies: int, heads: int, causal: bool, sms: int) -> float:
    """Steps until the last multiprocessor ends.   steps: of a head in each key tile, the most first."""
    busy = [0] * sms
    heapify(busy)
    longest = (heads - 1) * steps[0] if causal else 0
    for count in steps:
        for _ in range(copies):
            begin = busy[0]
            end = begin + count * heads + 1
            if begin < longest:  # as if it waited in each head for the longest item
                end = max(end, longest + count + 1)
            heapreplace(busy, end)
    return max(busy) * (1 + _WAITS * (1 - 1 / heads) if causal else 1)


def _steps(key: int, sizes: tuple[int, int], band: tuple[int, int]) -> int:
    """Query tiles that meet the key tile from `key` on, as BackwardProblem<false>::query_tiles counts them."""
    (s_q, s_k), (left, right) = sizes, band
    shift = s_k - s_q
    top = 0 if right < 0 else max(0, key - right - shift)
    bottom = s_q - 1 if left < 0 else min(s_q - 1, key + KEYS - 1 + left - shift)
    return max(0, bottom // _STEP_QUERIES - top // _STEP_QUERIES + 1) if top < s_q else 0
