"""NVRTC: CUDA C++ compiled inside this process, by the library that torch installs.

It is called through cuda.bindings, the lower layer of cuda-core: `cuda.core.Program` takes a fixed list of options
instead of nvcc's flags, needs libcuda to return PTX, and takes twice the time to import.  The library ships no CUDA
headers, so `jit/include/tilewright` includes nothing but itself; a kernel with TMA and WGMMA then compiles in 0.1 s.
Precompiled headers would save a third of that, only in the process that made them, for 20 MB of disk; they are not used
(benchmarks/jit_costs.py measures them).  The GIL is released during compilation.
"""

import time
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tilewright.errors import CompileError
from tilewright.jit.cache import Built
from tilewright.jit.compilers import Source, nvrtc_program
from tilewright.jit.compilers.cuda_build import REPORT, finish, show_command

_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_PTX_VERSION = b"Cuda compilation tools, release "


class Nvrtc:
    """The compiler object: see `Compiler`.

    fresh_process: run NVRTC in a process of its own; for a forked process, in which it may crash.
    """

    name = "nvrtc"
    fresh_process = False

    def version(self) -> str | None:
        """The version of the library that would compile: "13.0.88"."""
        return _version()

    def install(self) -> str:
        """What to install."""
        return "pip install 'tilewright[cuda]' (cuda-core and nvidia-cuda-nvrtc), or set TILEWRIGHT_JIT_COMPILER=nvcc"

    def compile(self, source: Source) -> Built:
        """Compile `source` to a cubin.  Raises CompileError with the first error lines."""
        options = [
            f"-arch={source.arch}",
            *source.flags,
            REPORT,
            *(f"-I{folder}" for folder in source.include_dirs),
        ]
        show_command(f"nvrtc {' '.join(options)} {source.name}.cu")
        start = time.perf_counter()
        request = nvrtc_program.Request(source.text, f"{source.name}.cu", options)
        program = nvrtc_program.in_fresh_process(request) if self.fresh_process else nvrtc_program.compiled(request)
        if program.error:
            raise CompileError("nvrtc", source, program.log or program.error)
        return finish("nvrtc", source, program.cubin, program.ptx, program.log, _since(start))


def _since(start: float) -> float:
    return time.perf_counter() - start


@cache
def _version() -> str | None:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return None
    library = _loaded()
    if library is None and (version := _wheel_version(None)) is not None:
        return version  # the loader searches wheels first; a cache hit needs no more, so nothing is loaded
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = library or Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "")
    except DynamicLibNotFoundError:
        return None
    return _wheel_version(library) or _version_from_output()


def _loaded() -> Path | None:
    """The libnvrtc that this process has already loaded, for instance torch's."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libnvrtc.so" in line)
    return next((Path(path) for path in paths), None)


def _wheel_version(library: Path | None) -> str | None:
    """The version of the wheel that holds `library`, or, with None, of the installed wheel."""
    for wheel in _WHEELS:
        try:
            distribution = metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            continue
        folder = Path(str(distribution.locate_file("nvidia")))
        if (library is None and folder.is_dir()) or (library is not None and library.is_relative_to(folder)):
            return distribution.version
    return None


def _version_from_output() -> str:
    """The version in the header of its PTX: the API does not return the last number."""
    program = nvrtc_program.compiled(nvrtc_program.Request("", "version.cu", ["-arch=compute_90"]))
    line = next(line for line in program.ptx.splitlines() if _PTX_VERSION in line)
    return line.split(b", V")[-1].decode()


compiler = Nvrtc()
