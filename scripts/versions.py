"""Tests tilewright with other versions of the libraries it stands on, each in a folder of its own ahead of .venv.

    .venv/bin/python scripts/versions.py                       # transformers, oldest and newest: a part of `make test`
    .venv/bin/python scripts/versions.py transformers --all    # a release of every supported minor version
    .venv/bin/python scripts/versions.py transformers torch triton --all --newest    # what a schedule runs

A folder holds one version without its dependencies, and those of them that .venv has in an unfit version. `--all` also
runs whole rooms of tests on the newest supported one. `--newest` adds the newest release that pip's index has,
supported or not, so that a schedule hears of it first. What the index does not have fails that version alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / "build" / "versions"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


class UnavailableError(Exception):
    """pip does not have it, and says so in its own words."""


@dataclass(frozen=True)
class Library:
    """versions: oldest to newest that is supported; the tests are those that meet what the library may move.

    whole: tests of the newest supported version that `--all` adds.   label: of the build, "+cpu", which no other may
    stand for: a CUDA build has gigabytes of dependencies.
    """

    versions: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]  # arguments of pytest, one process each
    whole: tuple[tuple[str, ...], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    index: str | None = None
    label: str = ""


LIBRARIES = {
    "transformers": Library(
        ("5.14.0", "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0"),
        (
            (
                "tests/models/test_replaced.py",
                "tests/models/test_attention_interface.py",
                "tests/generate/test_static.py",
                "tests/assistant/test_load.py",
                "-k",
                "counts or greedy or mask or folder",
            ),
        ),
        whole=(("tests/models", "tests/generate"),),
    ),
    "torch": Library(
        ("2.11.0", "2.13.0"),
        (("tests/dispatch", "tests/nn/test_modules.py", "tests/models/test_replaced.py"),),
        index=CPU_INDEX,
        label="+cpu",
    ),
    "triton": Library(
        ("3.6.0", "3.7.1", "3.8.0", "3.9.0"),
        (
            ("-m", "interp", "tests/interp", "-k", "rms_norm or softmax"),
            ("-m", "compile", "tests/compile/test_contracts.py", "-k", "rms_norm"),
            ("tests/jit/test_triton_versions.py",),
        ),
        variables=(("TRITON_INTERPRET", "interp"),),  # set where pytest's words have the second
    ),
}


def pip(*arguments: str) -> str:
    """Standard output of pip.  Raises UnavailableError with its last lines where it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"pip {' '.join(arguments)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def newest(name: str, library: Library) -> str:
    """The newest release on the index that is such a build."""
    where = ["--index-url", library.index] if library.index else []
    listed = re.search(r"^Available versions: (.*)$", pip("index", "versions", name, *where), re.MULTILINE)
    builds = [each for each in (listed[1].split(", ") if listed else []) if each.endswith(library.label)]
    if not builds:
        raise UnavailableError(f"pip's index names no version of {name}{library.label}")
    return builds[0].partition("+")[0]


def folder(name: str, wanted: str, library: Library) -> Path:
    """`wanted` and what of its dependencies .venv has not in a fitting version; installed once."""
    target = FOLDERS / f"{name}-{wanted}"
    ready = target / ".ready"
    if not ready.exists():
        where = ["--index-url", library.index] if library.index else []
        build = f"{name}=={wanted}{library.label}"
        pip("install", "--quiet", "--no-deps", "--upgrade", "--target", str(target), build, *where)
        for requirement in unfit(target, name):
            pip("install", "--quiet", "--no-deps", "--upgrade", "--target", str(target), requirement)
        ready.touch()
    return target


def unfit(target: Path, name: str) -> list[str]:
    """Requirements of the distribution in `target` that .venv does not fulfil."""
    from packaging.requirements import Requirement

    (found,) = distributions(name=name, path=[str(target)])
    wanted = []
    for line in found.requires or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.startswith("nvidia-") or requirement.name == "triton":
            continue  # of a CUDA build, which the CPU build does not load
        own = next((d.version for d in distributions(name=requirement.name)), None)
        if own is None or not requirement.specifier.contains(own, prereleases=True):
            wanted.append(f"{requirement.name}{requirement.specifier}")
    return wanted


def check(name: str, wanted: str, library: Library, *, whole: bool) -> tuple[bool, str]:
    """Run the tests of one version: whether all passed, and the last words of each process."""
    own = version(name).partition("+")[0]
    try:
        paths = [str(ROOT / "src")] if wanted == own else [str(folder(name, wanted, library)), str(ROOT / "src")]
    except UnavailableError as error:
        return False, str(error)
    lines, passed = [], True
    for words in (*library.tests, *(library.whole if whole else ())):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env |= {variable: "1" for variable, word in library.variables if word in words}
        seen = f"import {name}; print({name}.__version__)"
        found = subprocess.run([sys.executable, "-c", seen], env=env, capture_output=True, text=True, check=False)
        if found.stdout.strip().partition("+")[0] != wanted:
            return False, f"import {name} gives {found.stdout.strip() or found.stderr.strip()[-200:]}"
        done = subprocess.run(
            [sys.executable, *PYTEST, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            passed = False
            print(done.stdout[-4000:], done.stderr[-2000:], sep="\n")
        lines.append(
            re.sub(r" in [\d.:() s]+$", "", (done.stdout.strip().splitlines() or ["no output"])[-1]).strip("= ")
        )
    return passed, "; ".join(lines)


def main() -> None:
    """Print one row a version; exit with 1 if a version fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libraries", nargs="*", default=["transformers"], metavar="library", help=", ".join(LIBRARIES))
    parser.add_argument("--all", action="store_true", help="every supported minor version, not oldest and newest alone")
    parser.add_argument("--newest", action="store_true", help="the newest release on pip's index too")
    options = parser.parse_args()
    if unknown := set(options.libraries) - set(LIBRARIES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(LIBRARIES)}")
    failed = []
    for name in options.libraries:
        library = LIBRARIES[name]
        wanted = list(dict.fromkeys(library.versions if options.all else library.versions[:1] + library.versions[-1:]))
        if options.newest:
            try:
                wanted = list(dict.fromkeys((*wanted, newest(name, library))))
            except UnavailableError as error:
                print(f"{name:12} {'newest':8} FAILED  {error}", flush=True)
                failed.append(f"{name} newest")
        for each in wanted:
            began = time.monotonic()
            passed, words = check(name, each, library, whole=options.all and each == library.versions[-1])
            print(
                f"{name:12} {each:8} {'ok' if passed else 'FAILED':6} {time.monotonic() - began:4.0f} s  {words}",
                flush=True,
            )
            if not passed:
                failed.append(f"{name} {each}")
    if failed:
        raise SystemExit(f"versions: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
