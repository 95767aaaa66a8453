"""Masks of the bench that are neither a band nor documents: one of each kind, all over the same sequence."""

from collections.abc import Callable, Mapping

import torch

from tilewright import mask as masks

PREFIX = 4096
REACH, GLOBAL = 512, 64
DILATED_SPAN, GAP = 4096, 4
STRIDE = 128
BLOCK, FILLED = 128, 0.25


def _table(s: int) -> masks.Mask:
    """Random blocks, always the same ones, and those of the diagonal."""
    blocks = -(-s // BLOCK)
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < FILLED
    return masks.block(drawn | torch.eye(blocks, dtype=torch.bool), BLOCK)


VARIANTS: Mapping[str, Callable[[int], masks.Mask]] = {
    "prefix": lambda s: masks.causal() | masks.prefix(PREFIX),
    "global_local": lambda s: masks.window(REACH, REACH) | masks.global_tokens(GLOBAL),
    "dilated": lambda s: masks.window(DILATED_SPAN - 1) & masks.dilated(GAP),
    "strided": lambda s: masks.causal() & (masks.window(STRIDE - 1) | masks.strided(STRIDE)),
    "block": _table,
}
"""By name, for keys of any number: a prefix LM, Longformer's window with global tokens and its dilated window, the
Sparse Transformer's recent keys with summary columns (as many of each as there are runs), and a table of blocks.
"""
