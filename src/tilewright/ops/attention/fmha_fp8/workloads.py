"""What the bench measures: the anchors of `fmha`, the same tokens with heads of other widths, and block scales.

`params` as in `samples.inputs`.  Names: B x H[/H_kv] x S x D, then what the mask is.
"""

from typing import Any

from tilewright.dispatch import Workload
from tilewright.ops.attention.fmha.workloads import ANCHORS
from tilewright.ops.quant.numbers import E4M3


def _row(name: str, **params: Any) -> Workload:
    return Workload(name, params, (E4M3,), ("fwd",))


def _like(anchor: Workload, end: str = "", **change: Any) -> Workload:
    """A row of `fmha`, changed."""
    p = {**anchor.params, **change}
    grouped = f"/{p['H_kv']}" if p["H_kv"] != p["H"] else ""
    what = "causal" if p.get("causal") else "full"
    return _row(f"{p['B']}x{p['H']}{grouped}x{p['S']}x{p['D']}_{what}{end}", **p)


_LONG, _FULL = ANCHORS[1], ANCHORS[2]
_ROWS = (
    *(_like(row) for row in ANCHORS),
    *(_like(row, D=d, H=2048 // d, H_kv=2048 // d) for d in (64, 256) for row in (_LONG, _FULL)),
    *(_like(row, "_blocks", blocks="qkv") for row in (_LONG, _FULL)),
)
WORKLOADS = tuple({row.name: row for row in _ROWS}.values())
CPU_WORKLOADS = (_row("1x4/2x256x64_causal", B=1, H=4, H_kv=2, S=256, D=64, causal=True),)
