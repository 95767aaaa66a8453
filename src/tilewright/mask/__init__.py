"""Masks of attention: which key a query may see, as a value.

    from tilewright import mask
    mask.causal() & mask.window(4095)              one band: kernels need nothing else
    mask.causal() & mask.document(cu_seqlens=cu)   packed documents
    mask.document(ids, contiguous=True)            the same by the id of every key
    mask.sequences(cu_q, cu_k, length_q=.., ..)    packed, with other keys than queries
    mask.causal() | mask.prefix(256)               a prefix LM

Kernels skip empty tiles and do no mask arithmetic in full ones; tables of tiles come from closed forms (`classify`),
never from S_q x S_k scores.
"""

from typing import TYPE_CHECKING, Any

from tilewright.mask.algebra import Mask
from tilewright.mask.documents import document
from tilewright.mask.elements import evaluate
from tilewright.mask.leaves import block, causal, dilated, global_tokens, prefix, strided, window
from tilewright.mask.packed import sequences
from tilewright.mask.tables import TileTable, tile_table, tile_table_of

if TYPE_CHECKING:
    from tilewright.mask.flex import from_block_mask

__all__ = [
    "Mask",
    "TileTable",
    "block",
    "causal",
    "dilated",
    "document",
    "evaluate",
    "from_block_mask",
    "global_tokens",
    "prefix",
    "sequences",
    "strided",
    "tile_table",
    "tile_table_of",
    "window",
]


def __getattr__(name: str) -> Any:
    if name == "from_block_mask":  # FlexAttention takes a while to import
        from tilewright.mask.flex import from_block_mask

        return from_block_mask
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
