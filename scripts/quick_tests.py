"""Run the tests of what changed and of what stands on it: minutes, where `make test` is the whole truth.

    python scripts/quick_tests.py [--base REVISION] [--list] [-n WORKERS]

What changed is the difference from `--base` (default: where this branch left main), uncommitted and new files included.
What stands on it is read from the import graph, imports inside functions counted and names followed through packages:
within `ops` every module that reaches what changed, elsewhere the modules that import it.  A test file runs if it
changed, if it is of a room other than `ops` that changed, if it imports one of those modules, or a module that does.

Tests that go through all ops by their contracts run with `-k` for the ops among those modules; for a change below the
ops they run for `SAMPLE`.  Changed files that select nothing are named, and so are those of which everything depends.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BY_CONTRACT = ("tests/ops/test_contracts.py", "tests/interp/test_contracts.py", "tests/compile/test_contracts.py")
RULES = ("tests/repo/test_tree.py", "tests/repo/test_docs.py", "tests/repo/test_wall_time.py")  # of the whole tree
SAMPLE = ("rms_norm", "softmax", "matmul", "fmha")  # a row kernel, a long row, a product, attention
INDEX, OF_INDEX = "src/tilewright/ops/__init__.py", "tests/ops/test_index.py"  # of ops; it stands for none of them
BELOW_OPS = ("mask", "dispatch", "jit", "hardware", "settings", "log", "errors", "generation", "catalogue")
EVERYTHING = ("pyproject.toml", "constraints.txt", "Makefile", "tests/conftest.py")
DEVICE_CODE = (".cuh", ".cu", ".h", ".cpp")
MODES = ("", "interp", "compile")


class Selection(NamedTuple):
    """files: test files to run.  ops: whose contracts are tried.  unknown: changed files that need `make test`."""

    files: tuple[str, ...]
    ops: tuple[str, ...]
    unknown: tuple[str, ...]


class Graph:
    """Who imports whom, among the files below src, tests, scripts and benchmarks; nodes are paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        found = [p for folder in ("src", "tests", "scripts", "benchmarks") for p in sorted((root / folder).rglob("*"))]
        files = [p.relative_to(root).as_posix() for p in found if p.suffix in (".py", *DEVICE_CODE)]
        self.modules = {_module(file): file for file in files if file.endswith(".py")}
        self._trees = {m: ast.parse((root / file).read_text()) for m, file in self.modules.items()}
        index = self._trees.get("tilewright.ops")
        self.ops = _index(index) if index else {}
        self._exports = {m: dict(self._bound(m)) for m, file in self.modules.items() if file.endswith("__init__.py")}
        device = [file for file in files if file.endswith(DEVICE_CODE)]
        self.uses = {file: set(self._of_module(module, device)) - {INDEX} for module, file in self.modules.items()}
        declaring = {self.modules[module] for module in self.ops.values() if module in self.modules}
        for file in (file for file in files if "/kernels/" in file):  # an op stands on its kernels, not they on it
            self.uses[file] = self.uses.get(file, set()) - declaring
        for file in device:
            included = re.findall(r'#include\s*["<]([^">]+)[">]', (root / file).read_text())
            self.uses[file] = {d for d in device for name in included if f"/{d}".endswith(f"/{name}")}

    def users(self, files: Iterable[str]) -> set[str]:
        """Files that use one of `files` directly."""
        wanted = set(files)
        return {file for file, uses in self.uses.items() if uses & wanted}

    def _bound(self, package: str) -> Iterator[tuple[str, str]]:
        """(name, what it stands for) of every name that a package imports from elsewhere, or hands out on demand."""
        for node in self._trees[package].body:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.If):  # under TYPE_CHECKING: the same names, imported on first use
                for inner in node.body:
                    if isinstance(inner, ast.ImportFrom) and inner.module:
                        yield from ((alias.name, f"{inner.module}.{alias.name}") for alias in inner.names)

    def _resolve(self, dotted: str) -> str | None:
        """The file that defines `package.module.name`; packages that re-export a name are seen through."""
        for _ in range(8):
            if dotted in self.modules:
                return self.modules[dotted]
            package, _, name = dotted.rpartition(".")
            if not package:
                return None
            dotted = self._exports.get(package, {}).get(name, package)
        return None

    def _of_module(self, module: str, device: list[str]) -> Iterator[str]:
        tree = self._trees[module]
        family = ".".join(module.split(".")[:3])  # tilewright.ops.gemm
        aliases: dict[str, str] = {}
        for node in _imports(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    aliases[alias.asname or first] = alias.name if alias.asname else first
                    yield from filter(None, [self._resolve(alias.name)])
            elif node.module and not node.level:
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    yield from filter(None, [self._resolve(f"{node.module}.{alias.name}")])
        for part in ast.walk(tree):
            if (
                isinstance(part, ast.Attribute)
                and (dotted := _dotted(part, aliases))
                and dotted.startswith("tilewright")
            ):
                yield from filter(None, [self._resolve(dotted)])
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield from (
                    f for f in device if part.value.endswith(DEVICE_CODE) and f"/{f}".endswith(f"/{part.value}")
                )
                yield from filter(None, [self.modules.get(f"{family}.kernels.{part.value}")])  # of an op's list
        for op in (op for op, declared in self.ops.items() if declared == module):  # the bench finds it by name
            yield from filter(None, [self.modules.get(f"{family}.peers.{op}")])


def select(changed: Iterable[str], graph: Graph) -> Selection:
    """What to run for these changed files, given by their paths in the tree."""
    changed = set(changed)
    known = {file for file in changed if file in graph.uses}
    tables = {Path(file).stem for file in changed if file.startswith("src/tilewright/tables/")} & graph.ops.keys()
    known |= {graph.modules[graph.ops[op]] for op in tables if graph.ops[op] in graph.modules}
    standing = known | {file for file in graph.users(known) if _room(file) in map(_room, known)}
    while True:  # within the ops, and through headers, as far as it goes
        further = {f for f in graph.users(standing) if _room(f) == "ops" or f.endswith(DEVICE_CODE)} - standing
        if not further:
            break
        standing |= further
    above = {file for file in graph.users(standing) if file.startswith("src/")}
    tests = {file for file in {*known, *graph.users(standing | above)} if _is_test(file)}
    rooms = {f"tests/{_room(file)}/" for file in known if file.startswith("src/")} - {"tests/ops/"}
    shared = {file for file in changed if file not in known or file.endswith("conftest.py")}
    tests |= {t for t in graph.uses if _is_test(t) and (t.startswith(tuple(rooms)) or _beside(t, shared))}
    tests |= {OF_INDEX} & graph.uses.keys() if INDEX in changed else set()
    ops = {op for op, module in graph.ops.items() if graph.modules.get(module) in standing} | tables
    if any(_room(file) in BELOW_OPS for file in known if file.startswith("src/")):
        ops = {op for op in ops if graph.modules[graph.ops[op]] in known} | set(SAMPLE)
    declaring = {graph.modules.get(module) for module in graph.ops.values()}  # which have the tests of their contracts
    alone = {f for f in known - {INDEX} - declaring if _room(f) == "ops" and not graph.users({f})}
    named = {f for f in changed - known if _matters(f) and not any(_beside(t, {f}) for t in tests)} | alone
    unknown = {f for f in named if not f.startswith("src/tilewright/tables/")} | (changed & set(EVERYTHING))
    return Selection(tuple(sorted(tests - set(BY_CONTRACT))), tuple(sorted(ops)), tuple(sorted(unknown)))


def changed_files(base: str | None) -> list[str]:
    """Files that differ from `base`, and new ones that git does not ignore."""
    start = base or _git("merge-base", "HEAD", "main")[0]
    return [*_git("diff", "--name-only", start), *_git("ls-files", "--others", "--exclude-standard")]


def commands(found: Selection, all_ops: Iterable[str], workers: str) -> Iterator[tuple[str, list[str]]]:
    """(mode, command) of every pytest process: one a mode for the files, one a mode for the contracts."""
    parallel = ["-n", workers, "--dist", "worksteal"] if workers != "0" else []
    start = [sys.executable, "-m", "pytest", "-q", *parallel]
    for mode in MODES:
        marked = ["-m", mode] if mode else []
        files = [f for f in found.files if not mode or f"mark.{mode}" in (ROOT / f).read_text()]
        if files:
            yield mode, [*start, *marked, *files]
        if found.ops:
            yield mode, [*start, *marked, BY_CONTRACT[MODES.index(mode)], "-k", expression(found.ops, all_ops)]


def expression(ops: Iterable[str], all_ops: Iterable[str]) -> str:
    """For pytest's -k, which looks for parts of names: these ops, and none that is called after one of them."""
    chosen = set(ops)
    terms = []
    for op in sorted(chosen):
        longer = sorted(other for other in set(all_ops) - chosen if op in other)
        terms.append(f"({' and not '.join([op, *longer])})")
    return " or ".join(terms)


def _module(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _room(file: str) -> str:
    """`ops` of src/tilewright/ops/...; the folder of a file elsewhere."""
    parts = file.removeprefix("src/tilewright/").split("/")
    return parts[0].removesuffix(".py") if file.startswith("src/") else "/".join(parts[:-1])


def _is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def _beside(test: str, files: Iterable[str]) -> bool:
    """Do test data or conftests among `files` lie in the folder of `test`, or above it?"""
    folders = {f"{Path(file).parent.as_posix()}/" for file in files if file.startswith("tests/") and "/" in file[6:]}
    return any(test.startswith(folder) for folder in folders)


def _matters(file: str) -> bool:
    """Documents and measurements are tested by the rules of the tree."""
    return not file.endswith(".md") and not file.startswith(("docs/", "benchmarks/results/"))


def _imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import, in functions too, but those that only type checkers run."""
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in node.body
        for inner in ast.walk(each)
    }
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in typed)


def _dotted(node: ast.Attribute, aliases: Mapping[str, str]) -> str | None:
    """`tilewright.ops.rms_norm` of `ops.rms_norm`."""
    inner = node.value
    if isinstance(inner, ast.Attribute):
        start = _dotted(inner, aliases)
    else:
        start = aliases.get(inner.id) if isinstance(inner, ast.Name) else None
    return f"{start}.{node.attr}" if start else None


def _index(tree: ast.Module) -> dict[str, str]:
    """Op to module, as the index of `tilewright.ops` has it for type checkers."""
    return {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]


def main() -> int:
    """Select, say what and why, run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="revision to compare with (default: where this branch left main)")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("-n", dest="workers", default="2", help="processes at once (default 2; 0: in this one)")
    given = parser.parse_args()
    graph = Graph(ROOT)
    found = select(changed_files(given.base), graph)
    found = found._replace(files=(*found.files, *(rule for rule in RULES if rule not in found.files)))
    print("test files:", *found.files, "contracts of: " + (", ".join(found.ops) or "none"), sep="\n  ")
    if found.unknown:
        print("no selection tests these; run make test:", *found.unknown, sep="\n  ")
    failed = []
    for mode, command in () if given.list else commands(found, graph.ops, given.workers):
        environment = {**os.environ, "TRITON_INTERPRET": "1"} if mode == "interp" else None
        # 5: everything that was selected belongs to another mode
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode not in (0, 5):
            failed.append(" ".join(command))
    if failed:
        print("failed:", *failed, sep="\n  ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
