"""To and from torch's BlockMask, the masks of FlexAttention."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from tilewright.errors import InputError
from tilewright.mask.algebra import Mask, MaskMod
from tilewright.mask.classify import Sizes, classify
from tilewright.mask.leaves import block, narrowed
from tilewright.mask.program import Part


def block_mask(
    mask: Mask, batch: int, heads: int, s_q: int, s_k: int, device: torch.device, block_size: int | tuple[int, int]
) -> BlockMask:
    """`Mask.to_block_mask`."""
    mask.check(batch, heads, s_q, s_k)
    size_q, size_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask_mod = mask.to(device).mask_mod_at(s_k - s_q)
    if mask.only_flex:
        return create_block_mask(mask_mod, batch, heads, s_q, s_k, device=str(device), BLOCK_SIZE=(size_q, size_k))
    some, every = classify(*mask.program(device), Sizes(batch, heads, s_q, s_k, size_q, size_k))
    # torch calls a block that hangs over the last query partial as well
    every = every & (torch.arange(1, some.shape[-2] + 1, device=device)[:, None] * size_q <= s_q)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=(size_q, size_k), mask_mod=mask_mod, seq_lengths=(s_q, s_k)
    )


def from_block_mask(mask: BlockMask) -> Mask:
    """The mask of a BlockMask: a block table if it has no mask_mod, else one that only FlexAttention evaluates."""
    s_q, s_k = mask.seq_lengths
    partial = _table(mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        full = torch.zeros_like(partial)
    else:
        full = _table(mask.full_kv_num_blocks, mask.full_kv_indices)
    size_q, size_k = mask.BLOCK_SIZE
    if mask.mask_mod is noop_mask and s_q == s_k:
        return block(partial | full, (size_q, size_k))
    return ByFlex(partial, full, mask.mask_mod, (size_q, size_k), (s_q, s_k))


@dataclass(frozen=True, eq=False)
class ByFlex(Mask):
    """partial, full: (B or 1, H or 1, rows, columns) bool tables by query index; `mod` decides in partial blocks."""

    partial: Tensor
    full: Tensor
    mod: MaskMod
    size: tuple[int, int]
    lengths: tuple[int, int]

    def __repr__(self) -> str:
        return f"from_block_mask({tuple(self.partial.shape)}, {getattr(self.mod, '__name__', self.mod)})"

    @property
    def only_flex(self) -> bool:
        return True

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        if (s_q, s_k) != self.lengths or any(
            n not in (1, needed) for n, needed in zip(self.partial.shape, (batch, heads), strict=False)
        ):
            raise InputError(
                f"from_block_mask: (B, H) = {tuple(self.partial.shape[:2])}, (S_q, S_k) = {self.lengths}; "
                f"the attention has {(batch, heads)}, {(s_q, s_k)}"
            )

    @property
    def mask_mod(self) -> MaskMod:
        partial, full, mod, (size_q, size_k) = self.partial, self.full, self.mod, self.size
        shift = self.lengths[1] - self.lengths[0]
        by_batch, by_head = (int(n > 1) for n in partial.shape[:2])

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            i = q - shift
            cell = (b * by_batch, h * by_head, i // size_q, k // size_k)
            return full[cell] | (partial[cell] & mod(b, h, i, k))

        return allowed

    def to(self, device: torch.device | str) -> Mask:
        """The tables on `device`; tensors that `mod` captured stay where they are."""
        return ByFlex(self.partial.to(device), self.full.to(device), self.mod, self.size, self.lengths)

    def narrow(self, start: int, length: int) -> Mask:
        """The tables of these sequences, and `mod` with their numbers in the whole batch."""
        mod, partial, full = self.mod, narrowed(self.partial, start, length), narrowed(self.full, start, length)
        return ByFlex(partial, full, lambda b, h, q, k: mod(b + start, h, q, k), self.size, self.lengths)

    def _words(self) -> Iterator[Part | str]:
        raise InputError(
            f"{self!r}: only FlexAttention can evaluate it; use backend='torch' or a mask of tilewright.mask"
        )


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """Counts (B, H, rows) and indices (B, H, rows, columns) int32 of a bool table, as BlockMask keeps them."""
    order = torch.argsort((~table).int(), dim=-1, stable=True)
    return table.sum(-1, dtype=torch.int32), order.int()


def _table(counts: Tensor, indices: Tensor) -> Tensor:
    """bool (B, H, rows, columns) of BlockMask's lists."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)
