"""Write docs/masks/: one page a kind of mask, from `mask_pages.toml`, its tiles and the committed results.  `--check`
fails when a page is out of date.

python scripts/mask_pages.py [--check]
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright.ops  # noqa: F401  (binds the contracts)
from tilewright.bench import schema
from tilewright.bench.report.cells import number
from tilewright.bench.schema import Results, Row
from tilewright.dispatch import contract
from tilewright.mask import Mask, evaluate
from tilewright.mask.classify import Sizes, classify
from tilewright.ops.attention.arguments import merged

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "masks"
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "attention.json"
TILE = 128
BEFORE = "not measured yet"
KERNELS = ("cuda", "triton", "cutile")
DENSE = {"dense_mask_cudnn": "torch, dense mask, cuDNN", "dense_mask": "torch, dense mask, memory-efficient kernel"}
FLEX = "flex"
OTHERS = {"cudnn": "torch, cuDNN", "flash": "torch, FLASH", "fa4": "FlashAttention 4"}
WITHOUT = {"1x32/8x16384x128_causal": "causal alone, ours", "1x32/8x16384x128_full": "no mask, ours"}


class Line(NamedTuple):
    """Of the table of times."""

    what: str
    us: str
    times: str


class Shares(NamedTuple):
    """Of all tiles; allowed: of all pairs, and dense: of the pairs of visited tiles."""

    empty: float
    partial: float
    full: float
    allowed: float
    dense: float


def masks() -> dict[str, dict[str, Any]]:
    """The table of pages, by file name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def row_mask(name: str) -> tuple[Mask, dict[str, Any]]:
    """(mask, params) of a case of the bench."""
    fmha = contract("fmha")
    params = dict(next(w for w in fmha.workloads if w.name == name).params)
    with FakeTensorMode():  # q, k and v are not looked at
        options = fmha.inputs(params, torch.bfloat16, torch.device("cpu"), 0).kwargs
    mask = merged("fmha", options.get("mask"), bool(options.get("causal")))
    assert mask is not None, "every case here has a mask"
    return mask, params


def shares(mask: Mask, s: int) -> Shares:
    """Counted in tiles of TILE x TILE; s: a multiple of TILE."""
    text, data = mask.program("cpu")
    some, every = (t[0, 0] for t in classify(text, data, Sizes(1, 1, s, s, TILE, TILE)))
    partial = some & ~every
    allowed = int(every.sum()) * TILE**2
    for m, needed in enumerate(partial):
        keys = (needed.nonzero() * TILE + torch.arange(TILE)).flatten()
        allowed += int(evaluate(text, data, torch.arange(m * TILE, (m + 1) * TILE), keys, 1, 1).sum())
    empty, some_seen, all_seen = (float(t.double().mean()) for t in (~some, partial, every))
    return Shares(empty, some_seen, all_seen, allowed / s**2, allowed / (int(some.sum()) * TILE**2))


def lines(page: Mapping[str, Any], results: Results | None) -> Iterator[Line]:
    """Ours by backend, dense masks, FlexAttention, others that took part, what there is without the mask, the floor."""
    rows = forward_rows(results)
    row = rows.get(page["row"])
    best = None if row is None else ours(row)
    names = {name: f"tilewright, {name}" for name in KERNELS}
    dense = {"": "torch, dense mask"} if "no_dense" in page else DENSE
    for name, what in {**names, **dense, FLEX: "FlexAttention"}.items():
        us = None if row is None else {**row.peers, **row.impls}.get(name)
        reason = page["no_dense"] if name == "" else absence(page["row"], name, row, results)
        yield _line(what, us, best, reason)
    for name, what in OTHERS.items():
        if row is not None and name in row.peers:
            yield _line(what, row.peers[name], best, "")
    for other, what in WITHOUT.items():
        if other != page["row"]:
            yield _line(what, ours(rows[other]) if other in rows else None, best, BEFORE)
    yield _line("floor", None if row is None else row.floor_us, best, BEFORE)


def forward_rows(results: Results | None) -> dict[str, Row]:
    """By case."""
    found = () if results is None else results.rows
    return {r.case: r for r in found if (r.op, r.direction, r.dtype) == ("fmha", "fwd", "bfloat16")}


def ours(row: Row) -> float | None:
    """The fastest kernel; None where only torch runs under our name."""
    return min((us for name, us in row.impls.items() if name in KERNELS), default=None)


def absence(case: str, name: str, row: Row | None, results: Results | None) -> str:
    """Why a contestant has no time."""
    for note in () if results is None else (*results.failures, *results.left_out):
        if (note.op, note.case, note.direction) == ("fmha", case, "fwd") and note.name in (name, ""):
            return note.reason.replace("|", "\\|")
    return BEFORE if row is None else "does not run it"


def _line(what: str, us: float | None, best: float | None, reason: str) -> Line:
    if us is None:
        return Line(what, reason, "")
    return Line(what, number(us), "" if best is None else f"{us / best:.2f}")


def _percent(share: float) -> str:
    """Of masks that see little, the first digits too."""
    return f"{100 * share:.1f} %"


def index(pages: Mapping[str, Mapping[str, Any]], visited: Mapping[str, float], results: Results | None) -> str:
    """The list of pages with the times that compare: best of ours, best dense form, FlexAttention.

    visited: share of the tiles, by page.
    """
    rows = forward_rows(results)
    made = [
        "# Kinds of masks\n",
        "One shape for all; times of a forward in microseconds. [What masks are](../masks.md).\n",
    ]
    made += ["| | visited tiles | ours | dense mask | FlexAttention |", "|---|---|---|---|---|"]
    for name, page in pages.items():
        row = rows.get(page["row"])
        times = [BEFORE] * 3
        if row is not None:
            dense = min((row.peers[peer] for peer in DENSE if peer in row.peers), default=None)
            times = ["-" if us is None else number(us) for us in (ours(row), dense, row.peers.get(FLEX))]
        made.append(f"| [{page['title']}]({name}.md) | {_percent(visited[name])} | {' | '.join(times)} |")
    return "\n".join(made) + "\n"


def render(results: Results | None) -> dict[str, str]:
    """Every page by its file name."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        keep_trailing_newline=False,
        autoescape=False,  # Markdown
    )
    environment.filters["percent"] = _percent
    template = environment.get_template("mask_pages.md.j2")
    device = "NVIDIA H200" if results is None else results.machine["device"]
    pages = masks()
    made, visited = {}, {}
    for name, page in pages.items():
        mask, sizes = row_mask(page["row"])
        found = shares(mask, sizes["S"])
        visited[name] = 1 - found.empty
        values = {"call": None, "expected": None, **page, "sizes": sizes, "shares": found, "tile": TILE}
        text = template.render(**values, device=device, lines=list(lines(page, results)))
        made[f"{name}.md"] = text.rstrip() + "\n"
    return {**made, "README.md": index(pages, visited, results)}


def main() -> int:
    """Write or check every page."""
    check = "--check" in sys.argv[1:]
    made = render(schema.load(RESULTS) if RESULTS.exists() else None)
    stale = [name for name, text in made.items() if not (PAGES / name).exists() or (PAGES / name).read_text() != text]
    if check:
        for name in stale:
            print(f"out of date: docs/masks/{name}; run python scripts/mask_pages.py")
        return 1 if stale else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (PAGES / name).write_text(made[name])
    print(f"{len(stale)} of {len(made)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
