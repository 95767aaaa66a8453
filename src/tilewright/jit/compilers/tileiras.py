"""tileiras: compiles Tile IR bytecode, which cuda.tile makes from a Python kernel, to a cubin, in a separate process.

tileiras runs `ptxas` and opens `libnvvm.so.4`, both of its own version, and looks for them under CUDA_HOME and
CUDA_PATH before its own folder.  So every compilation gets an environment in which CUDA_HOME is the folder of tileiras,
whatever toolkit the user's shell points to; the environment of this process stays.
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
from tilewright.errors import BackendError, CompileError
from tilewright.hardware.toolchain import Machine, libnvvm, release, runs, version_of
from tilewright.jit import cutile_language
from tilewright.jit.cache import Built
from tilewright.jit.compilers import Source
from tilewright.jit.compilers.cubin import facts
from tilewright.jit.cutile_language import INSTALL
from tilewright.log import logger

_TIMEOUT = 600.0  # seconds; kernels without spills take less than two, with spills up to about ten
_BYTECODES = ("13.4", "13.3", "13.2", "13.1")  # versions of Tile IR bytecode that cuda.tile 1.7 writes, newest first


@dataclass(frozen=True)
class TileSource(Source):
    """`text` is the Python source, for people; `bytecode` is what is compiled."""

    bytecode: bytes = b""


class Toolkit(NamedTuple):
    """An installed tileiras: `root`/bin/tileiras, with ptxas next to it and libnvvm below `root`."""

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
        """The version that `tileiras --version` prints, "13.4.92".  None also without cuda.tile: it makes the input."""
        installed = toolkit()
        return None if installed is None or cutile_language.version() is None else installed.version

    def install(self) -> str:
        """What to install."""
        return f"{INSTALL} (cuda-tile, and tileiras, ptxas and libnvvm of one version)"

    def bytecode_version(self) -> str:
        """The newest bytecode that both cuda.tile and the installed tileiras support, such as "13.4"."""
        program = self._toolkit().program
        process = subprocess.run([program, "--list-versions"], capture_output=True, text=True, check=False)
        return next((version for version in _BYTECODES if version in process.stdout.split()), _BYTECODES[-1])

    def compile(self, source: Source) -> Built:
        """Compile a `TileSource` to a cubin.  info: the fields of `cubin.Facts`, spills (instructions), seconds."""
        assert isinstance(source, TileSource)
        installed = self._toolkit()
        reason = missing(installed)
        if reason is not None:
            raise CompileError(self.name, source, f"error: {reason}")
        with tempfile.TemporaryDirectory(prefix="tilewright-tileiras-") as folder:
            bytecode, cubin = Path(folder, f"{source.name}.tileirbc"), Path(folder, f"{source.name}.cubin")
            bytecode.write_bytes(source.bytecode)
            command = [
                str(installed.program),
                str(bytecode),
                "-o",
                str(cubin),
                "--gpu-name",
                source.arch,
                *source.flags,
            ]
            if settings.current().jit_print_command:
                logger.warning("CUDA_HOME=%s %s", installed.root, shlex.join(command))
            start = time.perf_counter()
            _run(command, installed, source)
            seconds = time.perf_counter() - start
            return _built(cubin.read_bytes(), source, seconds)

    def _toolkit(self) -> Toolkit:
        installed = toolkit()
        if installed is None:
            raise BackendError(f"tileiras was not found next to cuda.tile, on PATH or under CUDA_HOME: {INSTALL}.")
        return installed


def _run(command: list[str], toolkit: Toolkit, source: Source) -> None:
    try:
        process = subprocess.run(
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
    if process.returncode:
        log = (process.stdout + process.stderr).strip()
        advice = _advice(toolkit, log)
        raise CompileError("tileiras", source, f"{log}\nerror: exit status {process.returncode}. {advice}")


def _environment(toolkit: Toolkit) -> dict[str, str]:
    """The environment in which tileiras finds its own ptxas and libnvvm, and no older toolkit's."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_PATH"}
    environment["CUDA_HOME"] = str(toolkit.root)
    environment["PATH"] = os.pathsep.join((str(toolkit.root / "bin"), os.environ.get("PATH", "")))
    return environment


def _advice(toolkit: Toolkit, log: str) -> str:
    """The possible cause of a failure that names no line of the kernel."""
    if "loc(" in log:
        return ""
    ptxas = version_of(toolkit.root / "bin" / "ptxas")
    if ptxas is not None and release(ptxas) != release(toolkit.version):
        return f"tileiras is {toolkit.version} but the ptxas next to it {ptxas}; use one release: {INSTALL}."
    return (
        "Without a line of the kernel this means tiles that tileiras cannot lower (try smaller ones), or a libnvvm of "
        f"another release than {toolkit.version} (`tilewright doctor`)."
    )


def _built(binary: bytes, source: TileSource, seconds: float) -> Built:
    kernel = facts(binary)
    info = {
        **kernel._asdict(),
        "parameters": list(kernel.parameters),
        "spills": kernel.spills,
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
    """The part that tileiras needs and its folder lacks, in words; None if it has all."""
    if not runs(toolkit.root / "bin" / "ptxas"):
        what = f"bin/ptxas (pip install 'nvidia-cuda-nvcc=={release(toolkit.version)}.*')"
    elif libnvvm(toolkit.root) is None:
        what = f"libnvvm.so.4 (pip install 'nvidia-nvvm=={release(toolkit.version)}.*')"
    else:
        return None
    return f"tileiras {toolkit.version} in {toolkit.root} lacks {what}."


compiler = Tileiras()
