"""What the bench measures.  `params` of a row: B, H, H_kv, S, D, and causal, window, documents, ids or variant.

Names: B x H[/H_kv] x S x D, then what the mask is; those that compare masks are `mask_` and its name, all of one shape.
A budget ends a run before the last rows, so the grids come last.
"""

from typing import Any

import torch

from tilewright.dispatch import Workload
from tilewright.dispatch.contract import Direction
from tilewright.ops.attention.fmha.variants import VARIANTS

_BOTH: tuple[Direction, ...] = ("fwd", "bwd")
_FORWARD: tuple[Direction, ...] = ("fwd",)
TOKENS = 16384
"""Tokens per batch in the grids below, as in the papers: B = TOKENS / S, at least 1."""
WIDTH = 2048
"""H * D in the grids with as many key heads as query heads."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def _row(
    batch: int, heads: int, kv_heads: int, s: int, d: int, what: str, directions: tuple[Direction, ...], **mask: Any
) -> Workload:
    grouped = f"/{kv_heads}" if kv_heads != heads else ""
    sizes = {"B": batch, "H": heads, "H_kv": kv_heads, "S": s, "D": d}
    name = f"{batch}x{heads}{grouped}x{s}x{d}_{what}"
    return Workload(name, {**sizes, **mask}, (torch.bfloat16,), directions)


def _plain(
    batch: int, heads: int, kv_heads: int, s: int, d: int, causal: bool, directions: tuple[Direction, ...]
) -> Workload:
    mask = {"causal": True} if causal else {}
    return _row(batch, heads, kv_heads, s, d, "causal" if causal else "full", directions, **mask)


ANCHORS = (
    _plain(8, 16, 16, 2048, 128, True, _BOTH),
    _plain(2, 16, 16, 8192, 128, True, _BOTH),
    _plain(2, 16, 16, 8192, 128, False, _BOTH),
    _plain(1, 32, 8, 16384, 128, True, _BOTH),
    _plain(4, 32, 32, 4096, 64, True, _BOTH),
)

_TRAINED = (1024, 4096, 16384)  # lengths with a backward
_HEADS = tuple(
    _plain(
        max(TOKENS // s, 1),
        WIDTH // d,
        WIDTH // d,
        s,
        d,
        causal,
        _BOTH if s in _TRAINED and s * d <= 1 << 20 else _FORWARD,
    )
    for d in (64, 128, 256)
    for s in LENGTHS
    for causal in (True, False)
    if s <= TOKENS or d == 128
)
_GROUPED = tuple(
    _plain(max(TOKENS // s, 1), 32, 8, s, 128, causal, _BOTH if s in _TRAINED[:2] else _FORWARD)
    for s in LENGTHS
    for causal in ((True, False) if s <= TOKENS else (True,))
)

WINDOW = 4096
SPARSE = (
    _row(1, 32, 8, 65536, 128, f"window{WINDOW}", _BOTH, window=WINDOW),
    _row(1, 32, 8, 32768, 128, "64documents", _BOTH, documents=64),
    _row(1, 32, 8, 32768, 128, "64documents_by_id", _BOTH, ids=64),
    _row(2, 16, 16, 8192, 128, "softcap", _FORWARD, causal=True, softcap=50.0),
    _row(2, 16, 16, 8192, 128, "alibi", _FORWARD, causal=True, alibi=True),
    _row(2, 64, 8, 8192, 64, "sinks_window128", _FORWARD, window=128, sinks=True),
)

_CAUSAL, _FULL = (_plain(1, 32, 8, 16384, 128, causal, _FORWARD) for causal in (True, False))


def _masked(name: str, **mask: Any) -> Workload:
    """A row of the shape of `_CAUSAL`, to which it compares."""
    sizes = {size: _FULL.params[size] for size in ("B", "H", "H_kv", "S", "D")}
    return Workload(f"mask_{name}", {**sizes, **mask}, (torch.bfloat16,), _FORWARD)


MASKED = (
    _masked(f"window{WINDOW}", window=WINDOW),
    _masked("documents", documents=64),
    *(_masked(name, variant=name) for name in VARIANTS),
    _masked("alibi", causal=True, alibi=True),
    _masked("softcap", causal=True, softcap=50.0),
)
"""One row a kind of mask; the causal one is an anchor."""

_EARLY = {row.name: row for row in (*ANCHORS, *SPARSE, *MASKED, _FULL)}
WORKLOADS = (*_EARLY.values(), *(row for row in (*_HEADS, *_GROUPED) if row.name not in _EARLY))
"""An anchor that is in a grid too is one row, with both directions."""
CPU_WORKLOADS = (_plain(1, 4, 2, 256, 64, True, _BOTH),)

COMPILED = frozenset(row.name for row in (*ANCHORS, *SPARSE, *MASKED))
"""Rows on which FlexAttention competes: each compiles separate kernels."""
DENSE = frozenset(row.name for row in (_CAUSAL, *MASKED))
"""Rows on which torch competes with the mask as a tensor of S x S elements, which long sequences cannot afford."""
UNFUSED = frozenset(row.name for row in WORKLOADS if row.params["S"] <= 1024)
"""Rows on which torch's own products compete, all scores in memory."""
