"""Write docs/ops/: one page an op, from its contract and the committed results.  `--check` fails when a page is out of
date.

python scripts/op_pages.py [--check]
"""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import tilewright.ops  # noqa: F401  (binds the contracts)
from tilewright.bench import schema
from tilewright.bench.report.cells import mean, ratio
from tilewright.dispatch import Contract, contracts, implementations
from tilewright.dispatch.backends import BACKENDS, importable
from tilewright.dispatch.registry import listed_kernels

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "ops"
RESULTS = ROOT / "benchmarks" / "results"


def page(contract: Contract) -> str:
    """The page of one op."""
    signature = inspect.signature(contract.function)
    summary = contract.summary[0].upper() + contract.summary[1:]
    shown = f"ops.{contract.name}{signature}".replace("torch.", "").replace("'", "")
    parts = [
        f"# {contract.name}\n\n{summary}. Family: {contract.family}. Generated from the contract.\n",
        f"```python\n{shown}\n```\n",
        f"```text\n{inspect.getdoc(contract.function) or ''}\n```\n",
        "## Backends\n\n" + "\n".join(_support(contract)) + "\n",
        "## Promises\n\n" + "\n".join(_promises(contract)) + "\n",
        "## Checked cases\n\n" + "\n".join(f"- {w.name}" for w in contract.edge_cases) + "\n",
        "## Refused input\n\n" + "\n".join(f"- {b.name}" for b in contract.bad_inputs) + "\n",
    ]
    measured = list(_measured(contract))
    if measured:
        head = "| machine | direction | rows | best peer / ours, geometric mean | lowest |\n|---|---|---|---|---|"
        parts.append("\n".join(["## Measured\n", head, *measured]) + "\n")
    return "\n".join(parts)


def _support(contract: Contract) -> Iterator[str]:
    yield "| backend | forward | backward |\n|---|---|---|"
    listed = listed_kernels(contract.name)
    for backend in (backend for backend in BACKENDS if backend in listed):
        files = [ROOT / "src" / f"{module.replace('.', '/')}.py" for module in listed[backend]]
        links = ", ".join(f"[{file.parent.name}/{file.name}](../../{file.relative_to(ROOT)})" for file in files)
        yield f"| {backend} | {links} | {_backward(contract, backend)} |"
    yield "| torch | reference | autograd of the reference |"


def _backward(contract: Contract, backend: str) -> str:
    """Say whether `backend` has a kernel for the contract's gradient; its modules are imported to see."""
    if contract.gradient is None:
        return "no"
    raw = contract.gradient.op
    if raw.compose is not None:
        return "composed of forwards"
    if not importable(backend):
        sys.exit(f"{contract.name}: the page says what {backend} registers, and its libraries are not installed here")
    return "yes" if backend in implementations(raw.op, raw.direction) else "no"


def _promises(contract: Contract) -> Iterator[str]:
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in contract.dtypes)
    yield f"- dtypes: {dtypes}"
    yield f"- error against float64 at most {contract.tolerance:g} times torch's in the same dtype, plus a small floor"
    if contract.gradient is not None:
        others = "".join(f", that of {name} {times:g} times" for name, times in contract.other_gradients.items())
        yield f"- gradients likewise, {contract.gradient_tolerance:g} times{others}"
    yield f"- the same call twice gives the same bits: {'yes' if contract.promises.deterministic else 'no'}"
    invariant = "yes" if contract.promises.batch_invariant else "no"
    yield f'- under `numerics("batch_invariant")` a row has the same bits alone and in any batch: {invariant}'
    if contract.promises.reference_bits:
        yield "- every backend gives the bits of the reference on the same device"
    yield f"- `out=`: {'yes' if contract.forward.torch_out is not None else 'no'}"


def _measured(contract: Contract) -> Iterator[str]:
    """A line for each machine and direction, with a link to its rows: the performance page has every one."""
    for file in sorted({*RESULTS.glob(f"*/{contract.family}.json"), *RESULTS.glob(f"*/{contract.family}_*.json")}):
        found = schema.load(file)
        machine = file.parent.name
        link = f"[{machine}](../performance/{found.suite}.md#{machine}-{found.suite})"
        for direction in ("fwd", "bwd"):
            rows = [row for row in found.rows if row.op == contract.name and row.direction == direction]
            ratios = [row.ratio_own for row in rows if row.ratio_own is not None]
            if rows:
                yield f"| {link} | {direction} | {len(rows)} | {mean(ratios)} | {ratio(min(ratios, default=None))} |"


def main() -> int:
    """Write or check every page."""
    check = "--check" in sys.argv[1:]
    pages = {PAGES / f"{name}.md": page(contract) for name, contract in contracts().items()}
    index = "# Ops\n\n" + "\n".join(f"- [{path.stem}]({path.name})" for path in pages) + "\n"
    pages[PAGES / "README.md"] = index
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            print(f"out of date: {path.relative_to(ROOT)}; run python scripts/op_pages.py")
        return 1 if stale else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(pages[path])
    print(f"{len(stale)} of {len(pages)} pages written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
