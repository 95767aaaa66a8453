"""Matrix products on the page: a table for each M with a column for each contestant, and means of classes of rows.

A row is a product if it has the sizes M, N and K: of one matrix, of a batch (B), or of groups (G, of M rows each).
Small M is bound by memory traffic, where it matters whether the weights fit the L2; large M is bound by the matrix
rate. Each operand width and scaling has its own means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tilewright.bench.report.cells import mean, number, ratio, share
from tilewright.bench.schema import Row
from tilewright.bench.statistics import geometric_mean

MB = 10**6
# Parameters of a product without epilogue, both operands along K
_PLAIN = {"B", "G", "M", "N", "K", "out_dtype", "bits", "scaling", "split", "binary"}
_FEWEST = 3  # rows for a separate table

_CLASSES: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("M >= 1024", lambda row: _m(row) >= 1024),
    ("64 < M < 1024", lambda row: 64 < _m(row) < 1024),
    ("M <= 64, weights of 64 MB and more", lambda row: _m(row) <= 64 and _weight_bytes(row) >= 64 * MB),
    ("M <= 64, weights under 64 MB", lambda row: _m(row) <= 64 and _weight_bytes(row) < 64 * MB),
    ("... of them 30 to 64 MB", lambda row: _m(row) <= 64 and 30 * MB <= _weight_bytes(row) < 64 * MB),
)


def is_product(row: Row) -> bool:
    """True for a matrix product."""
    return {"M", "N", "K"} <= set(row.params)


def class_means(rows: Sequence[Row]) -> str:
    """Table of the geometric mean and the lowest ratio of each class. "Of the floor" is floor / our best kernel,
    "TFLOP/s" the rate of our fastest row and of the fastest peer's.
    """
    lines = [
        "| geometric means | rows | own | lowest | own, paused | auto | lowest | of the floor | lowest | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(map(_kind, rows)):
        op_rows = [row for row in rows if _kind(row) == kind]
        plain = [row for row in op_rows if _is_plain(row)]
        groups = [(name, [row for row in plain if belongs(row)]) for name, belongs in _CLASSES]
        groups.append(("other layouts and epilogues", [row for row in op_rows if not _is_plain(row)]))
        lines += [_means_line(f"{kind}, {name}", group) for name, group in groups if group]
    return "\n".join(lines) + "\n"


def tables(rows: Sequence[Row]) -> str:
    """A table for each M with several rows, and one for the rows of all other M."""
    parts = []
    for op in dict.fromkeys(row.op for row in rows):
        op_rows = [row for row in rows if row.op == op]
        by_m: dict[int, list[Row]] = {}
        for row in sorted(op_rows, key=_m):
            by_m.setdefault(_m(row), []).append(row)
        parts += [_table(f"{op}, M = {m}", group) for m, group in by_m.items() if len(group) >= _FEWEST]
        others = [row for group in by_m.values() if len(group) < _FEWEST for row in group]
        if others:
            parts.append(_table(f"{op}, other M", others))
    return "\n".join(parts)


def _table(title: str, rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in (*row.impls, *row.peers)))
    paused = any(row.paused for row in rows)
    head = [
        "case",
        "M x N x K",
        "floor",
        "of it",
        *names,
        "own",
        *(["paused"] if paused else []),
        "auto",
        "host us",
        "err",
        "±",
    ]
    lines = [f"### {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [
            row.case if row.dtype == "bfloat16" else f"{row.case} {row.dtype}",
            " x ".join(str(row.params[size]) for size in ("B", "G", "M", "N", "K") if size in row.params),
            number(row.floor_us),
            share(row.floor_us / _best(row)),
            *(_time(row, name) for name in names),
            ratio(row.ratio_own),
            *([ratio(row.ratio_own_paused)] if paused else []),
            ratio(row.ratio_auto),
            f"{row.eager_us:.1f}",
            f"{row.err:.1e}",
            f"{100 * row.spread:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _means_line(name: str, rows: Sequence[Row]) -> str:
    shares = [row.floor_us / _best(row) for row in rows]
    cells = [
        name,
        str(len(rows)),
        mean(row.ratio_own for row in rows),
        _lowest(row.ratio_own for row in rows),
        mean(row.ratio_own_paused for row in rows),
        mean(row.ratio_auto for row in rows),
        _lowest(row.ratio_auto for row in rows),
        share(geometric_mean(shares)),
        share(min(shares)),
        f"{max(_tflops(row, _best(row)) for row in rows):.0f}, {_fastest_peer(rows)}",
    ]
    return f"| {' | '.join(cells)} |"


def _lowest(ratios: Iterable[float | None]) -> str:
    return ratio(min((each for each in ratios if each is not None), default=None))


def _time(row: Row, name: str) -> str:
    us = row.impls.get(name, row.peers.get(name))
    if us is None:
        return "-"
    return f"**{number(us)}**" if name == row.chosen else number(us)


def _best(row: Row) -> float:
    """Time of our best kernel; if there is none, of what was chosen, torch."""
    return min((us for name, us in row.impls.items() if name != "torch"), default=row.impls[row.chosen])


def _fastest_peer(rows: Iterable[Row]) -> str:
    rates = [_tflops(row, us) for row in rows for us in row.peers.values()]
    return f"peer {max(rates):.0f}" if rates else "no peer"


def _tflops(row: Row, us: float) -> float:
    sizes = row.params
    return float(2 * _matrices(row) * sizes["M"] * sizes["N"] * sizes["K"] / us / 1e6)


def _kind(row: Row) -> str:
    """The op, with its operands unless they are bf16 or fp16, and with the kind of its scales if it has any."""
    bits, scaling = row.params.get("bits"), row.params.get("scaling")
    operands = f"int{bits}" if bits else row.dtype if row.dtype not in ("bfloat16", "float16") else None
    return " ".join(word for word in (row.op, operands, scaling) if isinstance(word, str))


def _is_plain(row: Row) -> bool:
    return set(row.params) <= _PLAIN


def _matrices(row: Row) -> int:
    """Number of products of a row: its batch or its groups."""
    return int(row.params.get("B", 1) * row.params.get("G", 1))


def _m(row: Row) -> int:
    return int(row.params["M"])


def _weight_bytes(row: Row) -> int:
    bits = row.params.get("bits", 8 * getattr(torch, row.dtype).itemsize)
    return int(_matrices(row) * row.params["N"] * row.params["K"] * bits // 8)
