"""The host's C++ compiler: kernels for the CPU, as shared libraries.

GCC 11 or newer, named by CXX or found as g++: the kernels are written in its vector extension.  They call torch's own
OpenMP runtime: the library is linked without one, and finds `GOMP_parallel` in the copy that torch has loaded.  A
second copy would bring a second pool of threads, and the two would wait for each other's cores.
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

from tilewright.errors import BackendError
from tilewright.jit.artifact import Built
from tilewright.jit.compilers import CompileError, Source
from tilewright.log import logger
from tilewright.settings import current

# No -ffast-math: NaN and infinity must come out right, and its start-up code would change the whole process.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w")

_OLDEST = 11  # the first that knows -march=x86-64-v4
_LEVELS = {  # of the x86-64 psABI, by the flags that /proc/cpuinfo names beyond the level below
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@functools.cache
def architecture() -> str:
    """What to compile for here: "x86-64", "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512), or the machine's own name.

    Levels rather than -march=native, because caches and bundles travel.
    """
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found[1].split()) if found else set()
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
        """ "g++ 12.2.0", or None where there is no GCC, or an older one than 11."""
        found = _find()
        return found and found.version

    def install(self) -> str:
        """What to install where `version` is None."""
        return f"install GCC {_OLDEST} or newer, e.g. apt install g++, or name one in CXX"

    def compile(self, source: Source) -> Built:
        """A shared library.  `info` holds the seconds it took."""
        found = _find()
        if found is None:
            raise BackendError(f"{source.name} needs a C++ compiler: {self.install()}.")
        march = (f"-march={source.arch}",) if source.arch.startswith("x86-64") else ()
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            text, made, library = (Path(folder) / f"kernel.{suffix}" for suffix in ("cpp", "o", "so"))
            text.write_text(source.text)
            includes = [f"-I{d}" for d in source.include_dirs]
            _run([*found.command, *source.flags, *march, *includes, "-c", str(text), "-o", str(made)], found, source)
            # Without -fopenmp, which would name an OpenMP runtime
            _run([*found.command, "-shared", str(made), "-o", str(library)], found, source)
            binary = library.read_bytes()
        seconds = time.perf_counter() - began
        if current().jit_debug:
            words = (found.version, source.name, source.arch, seconds, " ".join(source.flags))
            logger.warning("%s compiled %s for %s in %.2f s; flags %s", *words)
        return Built(binary, {"seconds": round(seconds, 3)}, {})


class _Found(NamedTuple):
    command: tuple[str, ...]
    version: str


def _find() -> _Found | None:
    """The first of CXX, which may carry arguments ("ccache g++"), and g++ that is a GCC we can use."""
    for words in (shlex.split(os.environ.get("CXX", "")), ["g++"]):
        path = shutil.which(words[0]) if words else None
        if path is not None:
            command = (path, *words[1:])
            version = _version(command)
            if version is not None:
                return _Found(command, version)
    return None


@functools.cache
def _version(command: tuple[str, ...]) -> str | None:
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    number = re.search(r"\) (\d+)[.\d]*", said.partition("\n")[0])
    if number is None or "Free Software Foundation" not in said or int(number[1]) < _OLDEST:
        return None
    return f"g++ {number[0].removeprefix(') ')}"


def _run(line: list[str], found: _Found, source: Source) -> None:
    if current().jit_print_command:
        logger.warning("%s", shlex.join(line))
    # In English, so that error lines are recognised
    # Where there is no PATH the compiler was found on the default one, and looks for its linker there too
    environment = {"PATH": os.defpath, **os.environ, "LC_ALL": "C"}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise CompileError(found.version, source, done.stderr)


compiler = HostCompiler()
