"""tileiras: Tile IR bytecode, which cuda.tile makes of a Python kernel, compiled to a cubin in a process of its own.

tileiras is useless alone: it runs `ptxas` and opens `libnvvm.so.4`, both of its own version, and looks for them under
CUDA_HOME and CUDA_PATH before it looks beside itself.  So every compilation gets an environment in which CUDA_HOME is
the folder that tileiras lies in, whatever toolkit the user's shell points to; this process keeps its own.
"""

import os
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.hardware.toolchain import Machine, libnvvm, release, runs, version_of
from tilewright.jit import cutile_language
from tilewright.jit.cache import Built
from tilewright.jit.compilers import CompileError, Source
from tilewright.jit.compilers.cubin import facts
from tilewright.jit.cutile_language import INSTALL
from tilewright.log import logger

_TIMEOUT = 600.0  # seconds; kernels without spills take under two, the worst of those with them about ten
_READS = ("13.4", "13.3", "13.2", "13.1")  # versions of Tile IR bytecode that cuda.tile 1.7 writes, newest first


@dataclass(frozen=True)
class TileSource(Source):
    """`text` is the Python module, for people; `bytecode` is what is compiled."""

    bytecode: bytes = b""


class Toolkit(NamedTuple):
    """Where tileiras lies: `root`/bin/tileiras, with ptxas beside it and libnvvm below `root`."""

    root: Path
    version: str

    @property
    def program(self) -> Path:
        """The executable."""
        return self.root / "bin" / "tileiras"


class Tileiras:
    """The compiler object: see `Compiler`."""

    name = "tileiras"

    def version(self) -> str | None:
        """As `tileiras --version` says it: "13.4.92"; None also where cuda.tile is missing, which writes its input."""
        found = toolkit()
        return None if found is None or cutile_language.version() is None else found.version

    def install(self) -> str:
        """What to install."""
        return f"{INSTALL} (cuda-tile, and tileiras, ptxas and libnvvm of one version)"

    def bytecode_version(self) -> str:
        """The newest bytecode that both cuda.tile and the tileiras here know, such as "13.4"."""
        found = self._toolkit()
        known = subprocess.run([found.program, "--list-versions"], capture_output=True, text=True, check=False)
        return next((version for version in _READS if version in known.stdout.split()), _READS[-1])

    def compile(self, source: Source) -> Built:
        """The cubin of a `TileSource`.  info: symbol, registers, stack_bytes, spills (instructions that touch local
        memory), shared_bytes (static), threads, parameters (bytes of each), instructions (name -> count), seconds.
        """
        assert isinstance(source, TileSource)
        found = self._toolkit()
        lacking = missing(found)
        if lacking is not None:
            raise CompileError(self.name, source, f"error: {lacking}")
        with tempfile.TemporaryDirectory(prefix="tilewright-tileiras-") as folder:
            bytecode, cubin = Path(folder, f"{source.name}.tileirbc"), Path(folder, f"{source.name}.cubin")
            bytecode.write_bytes(source.bytecode)
            command = [str(found.program), str(bytecode), "-o", str(cubin), "--gpu-name", source.arch, *source.flags]
            if settings.current().jit_print_command:
                logger.warning("CUDA_HOME=%s %s", found.root, shlex.join(command))
            start = time.perf_counter()
            _run(command, found, source)
            seconds = time.perf_counter() - start
            return _built(cubin.read_bytes(), source, seconds)

    def _toolkit(self) -> Toolkit:
        found = toolkit()
        if found is None:
            raise BackendError(f"tileiras was not found beside cuda.tile, on PATH or under CUDA_HOME: {INSTALL}.")
        return found


def _run(command: list[str], toolkit: Toolkit, source: Source) -> None:
    try:
        done = subprocess.run(
            command,
            env=_environment(toolkit),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log = f"error: no result after {_TIMEOUT:.0f} s; the process was ended. Smaller tiles compile faster."
        raise CompileError("tileiras", source, log) from None
    if done.returncode:
        log = (done.stdout + done.stderr).strip()
        raise CompileError("tileiras", source, f"{log}\nerror: exit status {done.returncode}. {_advice(toolkit, log)}")


def _environment(toolkit: Toolkit) -> dict[str, str]:
    """The one in which tileiras finds its own ptxas and libnvvm, and no older toolkit's."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_PATH"}
    environment["CUDA_HOME"] = str(toolkit.root)
    environment["PATH"] = os.pathsep.join((str(toolkit.root / "bin"), os.environ.get("PATH", "")))
    return environment


def _advice(toolkit: Toolkit, log: str) -> str:
    """What a failure that names no line of the kernel may mean."""
    if "loc(" in log:
        return ""
    ptxas = version_of(toolkit.root / "bin" / "ptxas")
    if ptxas is not None and release(ptxas) != release(toolkit.version):
        return f"tileiras is {toolkit.version} but the ptxas beside it {ptxas}; install both of one release: {INSTALL}."
    return (
        "Without a line of the kernel this means tiles that tileiras cannot lower (try smaller ones), or a libnvvm of "
        f"another release than {toolkit.version} (`tilewright doctor`)."
    )


def _built(binary: bytes, source: TileSource, seconds: float) -> Built:
    found = facts(binary)
    info = {
        **found._asdict(),
        "parameters": list(found.parameters),
        "spills": found.spills,
        "seconds": round(seconds, 3),
    }
    if settings.current().jit_debug:
        shown = ("registers", "spills", "stack_bytes", "shared_bytes", "threads", "instructions")
        words = ", ".join(f"{name} {info[name]}" for name in shown)
        logger.warning("tileiras compiled %s for %s in %.2f s: %s", source.name, source.arch, seconds, words)
    return Built(binary, info, {"tileirbc": source.bytecode})


@cache
def toolkit() -> Toolkit | None:
    """The tileiras that `hardware.toolchain` finds."""
    program = Machine(driver=None).tileiras
    version = None if program is None else version_of(program)
    return None if program is None or version is None else Toolkit(program.parent.parent, version)


def missing(toolkit: Toolkit) -> str | None:
    """What tileiras needs and does not have beside it, in words."""
    if not runs(toolkit.root / "bin" / "ptxas"):
        what = f"bin/ptxas (pip install 'nvidia-cuda-nvcc=={release(toolkit.version)}.*')"
    elif libnvvm(toolkit.root) is None:
        what = f"libnvvm.so.4 (pip install 'nvidia-nvvm=={release(toolkit.version)}.*')"
    else:
        return None
    return f"tileiras {toolkit.version} in {toolkit.root} lacks {what}."


compiler = Tileiras()
