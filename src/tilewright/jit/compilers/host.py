"""The host's C++ compiler: kernels for the CPU, as shared libraries.

GCC 11 or newer, from CXX or as g++ on PATH: the kernels use its vector extension.  They run on torch's OpenMP
runtime: the library is linked without one, and finds `GOMP_parallel` in the copy that torch has loaded.  A second copy
would start a second pool of threads, and the two would compete for the cores.
"""

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tilewright.errors import BackendError, CompileError
from tilewright.jit.artifact import Built
from tilewright.jit.compilers import Source
from tilewright.log import logger
from tilewright.settings import current

# No -ffast-math: NaN and infinity must be right, and its start-up code would change the whole process.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w")

_OLDEST = 11  # the first that knows -march=x86-64-v4
_LEVELS = {  # of the x86-64 psABI: the flags in /proc/cpuinfo that the previous level does not have
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@functools.cache
def architecture() -> str:
    """The architecture of this machine: "x86-64", "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512), or the machine's own name.

    Levels rather than -march=native, because caches and bundles move to other machines.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    match = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    level = "x86-64"
    for name, needed in _LEVELS.items():
        if not needed <= flags:
            break
        level = name
    return level


class HostCompiler:
    """See the module's docstring."""

    name = "host"

    def version(self) -> str | None:
        """The compiler's version, "g++ 12.2.0"; None if there is no GCC, or none from 11 on."""
        gcc = _find()
        return gcc and gcc.version

    def install(self) -> str:
        """What to install if `version` is None."""
        return f"install GCC {_OLDEST} or newer, e.g. apt install g++, or name one in CXX"

    def compile(self, source: Source) -> Built:
        """Compile to a shared library.  `info` holds the seconds it took."""
        gcc = _find()
        if gcc is None:
            raise BackendError(f"{source.name} needs a C++ compiler: {self.install()}.")
        march = (f"-march={source.arch}",) if source.arch.startswith("x86-64") else ()
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            text, object_file, library = (Path(folder) / f"kernel.{suffix}" for suffix in ("cpp", "o", "so"))
            text.write_text(source.text)
            includes = [f"-I{d}" for d in source.include_dirs]
            _run([*gcc.command, *source.flags, *march, *includes, "-c", str(text), "-o", str(object_file)], gcc, source)
            # Without -fopenmp, which would name an OpenMP runtime
            _run([*gcc.command, "-shared", str(object_file), "-o", str(library)], gcc, source)
            binary = library.read_bytes()
        seconds = time.perf_counter() - began
        if current().jit_debug:
            words = (gcc.version, source.name, source.arch, seconds, " ".join(source.flags))
            logger.warning("%s compiled %s for %s in %.2f s; flags %s", *words)
        return Built(binary, {"seconds": round(seconds, 3)}, {})


class _Gcc(NamedTuple):
    command: tuple[str, ...]
    version: str


def _find() -> _Gcc | None:
    """The first usable GCC of CXX, which may have arguments ("ccache g++"), and g++."""
    for words in (shlex.split(os.environ.get("CXX", "")), ["g++"]):
        path = shutil.which(words[0]) if words else None
        if path is not None:
            command = (path, *words[1:])
            version = _version(command)
            if version is not None:
                return _Gcc(command, version)
    return None


@functools.cache
def _version(command: tuple[str, ...]) -> str | None:
    try:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    number = re.search(r"\) (\d+)[.\d]*", output.partition("\n")[0])
    if number is None or "Free Software Foundation" not in output or int(number[1]) < _OLDEST:
        return None
    return f"g++ {number[0].removeprefix(') ')}"


def _run(command: list[str], gcc: _Gcc, source: Source) -> None:
    if current().jit_print_command:
        logger.warning("%s", shlex.join(command))
    # LC_ALL: CompileError recognises English error lines.  PATH: without one, the compiler was found on the default
    # path, and must find its linker there too.
    environment = {"PATH": os.defpath, **os.environ, "LC_ALL": "C"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise CompileError(gcc.version, source, process.stderr)


compiler = HostCompiler()
