"""verify_tree in Triton: one program a tree holds its nodes in registers and steps from the root to child after child.

Traffic: 20 bytes a node read and 12 written; a launch of about 2 us takes longer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.triton_launch import TritonKernel
from tilewright.ops.sampling.verify_tree import FORWARD, VerifyTreeArgs, VerifyTreeBucket


class Config(NamedTuple):
    num_warps: int


CONFIGS = (Config(1), Config(4))


def configure(bucket: VerifyTreeBucket, dtype: torch.dtype) -> Config:
    """Chooses one warp up to 256 nodes: a step is a reduction, which needs no barrier there.  Unmeasured."""
    return CONFIGS[0] if bucket.nodes <= 256 else CONFIGS[1]


def candidates(bucket: VerifyTreeBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return CONFIGS


@triton.jit
def _tree_kernel(tokens, nodes, accepted, targets, drafts, parents, N, BLOCK: tl.constexpr):  # all (B, N)
    """Step from node to child while the target's token is one of a child."""
    first = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    draft = tl.load(drafts + first + offs, mask=mask, other=-1)
    parent = tl.load(parents + first + offs, mask=mask, other=-1)
    tl.store(tokens + first + offs, tl.full((BLOCK,), -1, tl.int64), mask=mask)
    tl.store(nodes + first + offs, tl.full((BLOCK,), -1, tl.int32), mask=mask)
    tl.debug_barrier()  # the path below is written over these

    node = 0
    length = 0
    while node < N:
        token = tl.load(targets + first + node)
        tl.store(tokens + first + length, token)
        tl.store(nodes + first + length, node)
        length += 1
        child = mask & (parent == node) & (offs > node) & (draft == token)
        node = tl.min(tl.where(child, offs, N), 0)
    tl.store(accepted + tl.program_id(0), length - 1)


_kernel = TritonKernel(_tree_kernel)


@register_kernel(FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates)
def launch(outs: tuple[Tensor, Tensor, Tensor], args: VerifyTreeArgs, config: Config) -> None:
    tensors = tuple(t.contiguous() for t in args)
    b, n = args.target_tokens.shape
    _kernel((b,), (*outs, *tensors, n), (triton.next_power_of_2(n),), num_warps=config.num_warps)
