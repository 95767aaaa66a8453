"""Whether torch is the better guess for `fmha`, cuDNN or FLASH, while no table has the sizes."""

import torch

from tilewright.ops.attention import few_queries
from tilewright.ops.attention.bucket import (
    CAUSAL,
    FULL,
    SINKS,
    SLOPES,
    SOFTCAP,
    FmhaBucket,
    few_scores,
    in_one_kernel,
    steps_of_float32,
)


def _in_one_kernel(bucket: FmhaBucket) -> bool:
    """True if torch has a fused kernel for it, cuDNN or FLASH.  Without one it holds all scores in memory, and is 36 to
    1470 times slower on an H200 (softcap, documents).
    """
    sizes = bucket.BH, bucket.S_q, bucket.S_k, bucket.D, bucket.D_v
    return in_one_kernel(bucket.mask, *sizes) and not bucket.extras & (SOFTCAP | SLOPES)


def _steps_of_float32(bucket: FmhaBucket) -> bool:
    return steps_of_float32(bucket.mask, bucket.BH, bucket.S_q, bucket.S_k, max(bucket.D, bucket.D_v))


_JOINED_KEYS = 4096
_QUERIES, _FEW_TILES = 128, 64  # of a query tile; tiles that give half of the multiprocessors of an H200 one


def _joins_sinks(bucket: FmhaBucket) -> bool:
    """True if torch joins sinks in some ten further kernels, whose launches take longer than a program of ours needs
    for all keys.  An estimate; of more keys FLASH divides those of a decoding step.
    """
    return bool(bucket.extras & SINKS) and bucket.S_k <= _JOINED_KEYS


def torch_first(bucket: FmhaBucket, dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes.  On an H200 CUDA C++ was faster than cuDNN in 109 of 113
    sizes of 257 queries and more, on and off the bench's grid, and in all 104 that it gets here: all but causal ones of
    D = 64 and up to 1024 queries.  A few queries behind more keys, causal, are FLASH's in torch: CUDA C++ takes 0.40 to
    0.82 of its time in nine sizes with 64 query tiles or more (2 to 200 queries, 333 to 8192 keys, an H100).  With
    fewer tiles FLASH divides the keys, and takes 0.34 to 0.68 of ours in three.  Of the few queries that the
    kernel for decoding takes, those without a mask and sinks are torch's: cuDNN divides the keys too.
    """
    if dtype.itemsize == 4:
        return _steps_of_float32(bucket)
    if first == "cuda" and few_queries.why_not_in_cuda(bucket, dtype) is None:
        return _in_one_kernel(bucket) and bucket.mask == FULL and not bucket.extras
    short = 1024 if bucket.D <= 64 and bucket.mask == CAUSAL else 256
    behind_keys = bucket.mask == CAUSAL and 1 < bucket.S_q <= 256 and bucket.S_q < bucket.S_k
    fills = behind_keys and bucket.BH * -(-bucket.S_q // _QUERIES) >= _FEW_TILES
    vendor_faster = first != "cuda" or (bucket.S_q <= short and not fills and not _joins_sinks(bucket))
    return _in_one_kernel(bucket) and vendor_faster


_SHORT = 512
"""Queries up to which torch's kernel may be the guess before CUDA C++, in either direction."""


def is_estimated(bucket: FmhaBucket, dtype: torch.dtype) -> bool:
    """Whether the two guesses rest on estimates for this bucket, not on measured times: in float32, and where torch has
    one kernel for the mask but the reference takes steps, for few scores or sinks of short rows.
    """
    sizes = bucket.BH, bucket.S_q, bucket.S_k
    vendors = bucket.mask in (FULL, CAUSAL) and not bucket.extras & (SOFTCAP | SLOPES)
    in_steps = few_scores(*sizes) or (bucket.S_q <= _SHORT and _joins_sinks(bucket))
    return dtype.itemsize == 4 or (vendors and in_steps)


_KEYS = 128  # of a key tile
_FULL_GPU = 256
"""Tiles of keys of all heads, in a bucket: up to twice too many, and an H200 has 132 multiprocessors."""


_GROUPED_KEYS = 4096
"""Keys up to which CUDA C++ is the guess for grouped heads under a causal mask."""


def torch_first_backward(bucket: FmhaBucket, dtype: torch.dtype, first: str) -> bool:
    """Whether torch comes first while no table has the sizes.  On an H200 CUDA C++ was faster than cuDNN where the mask
    is causal or D up to 96, no heads are grouped, and key tiles fill the GPU (33 of 34 sizes, the other 0.97 times as
    fast); where heads are grouped and the mask is causal (11 of 12 sizes of 512 to 4096 keys, 1.05 to 1.28 times as
    fast, the other 0.99 times); and 1.8 times as fast where a causal mask has more keys than queries, which torch gives
    to FLASH (two sizes).
    """
    tiles = bucket.BH // bucket.group * (bucket.S_k // _KEYS)
    if bucket.group == 1:
        cuda_faster = tiles >= _FULL_GPU and (bucket.mask == CAUSAL or bucket.D <= 96)
    else:
        cuda_faster = bucket.mask == CAUSAL and bucket.S_k <= _GROUPED_KEYS
    longer = bucket.mask == CAUSAL and bucket.S_k > bucket.S_q
    short = bucket.S_q <= (256 if longer else 512)
    joins = short and _joins_sinks(bucket)
    vendor_faster = first != "cuda" or (not joins and (short or not (cuda_faster or longer)))
    return _steps_of_float32(bucket) if dtype.itemsize == 4 else _in_one_kernel(bucket) and vendor_faster
