"""A Triton kernel that only moves memory: torch's copy alone would be too low a ceiling.

Reads 0, 1 or 2 arrays and writes 0 or 1 of the same length, 16 bytes a thread and access. Where nothing is written,
each program stores the sum of its block, one word for BLOCK words read, so that the loads cannot be removed.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def stream_kernel(a, b, out, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i] = 1 + a[i] + b[i], with READS of the two arrays; WRITES=0 stores one sum a program instead."""
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    value = tl.zeros((BLOCK,), tl.int32) + 1
    # Load READS arrays
    if READS >= 1:
        value += tl.load(a + offs, mask=mask, other=0)
    if READS == 2:
        value += tl.load(b + offs, mask=mask, other=0)
    # Store the block, or one sum that keeps the loads
    if WRITES == 1:
        tl.store(out + offs, value, mask=mask)
    else:
        tl.store(out + pid, tl.sum(value, axis=0))


def stream(reads: list[torch.Tensor], out: torch.Tensor, *, writes: int, n: int, block: int) -> None:
    """Launch over `n` int32 elements; `out` holds n of them, or one a block when writes=0."""
    a = reads[0] if reads else out
    b = reads[1] if len(reads) == 2 else a
    stream_kernel[(triton.cdiv(n, block),)](a, b, out, n, len(reads), writes, block, num_warps=block // 256)
