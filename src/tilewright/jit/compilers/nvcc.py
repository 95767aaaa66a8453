"""nvcc: CUDA C++ compiled by the CUDA toolkit, in a separate process.

`TILEWRIGHT_JIT_COMPILER=nvcc` selects it.  It takes the same flags as NVRTC and makes the same kind of cubin, but
starts four programs for that.  Its output is what profilers and bug reports expect.
"""

import re
import shlex
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from tilewright.errors import BackendError, CompileError
from tilewright.jit.cache import Built
from tilewright.jit.compilers import Source
from tilewright.jit.compilers.cuda_build import REPORT, find_tool, finish, show_command

_TIMEOUT = 600.0  # seconds; the largest kernels of this field need under one minute


class Nvcc:
    """The compiler object: see `Compiler`."""

    name = "nvcc"

    def version(self) -> str | None:
        """The version that `nvcc --version` prints: "13.0.88"."""
        return _version()

    def install(self) -> str:
        """What to install."""
        return "install the CUDA toolkit and set CUDA_HOME or PATH, or unset TILEWRIGHT_JIT_COMPILER to use NVRTC"

    def compile(self, source: Source) -> Built:
        """Compile `source` to a cubin.  Raises CompileError with the first error lines."""
        nvcc = find_tool("nvcc")
        if nvcc is None:
            raise BackendError(f"nvcc was not found; {self.install()}.")
        with tempfile.TemporaryDirectory(prefix="tilewright-nvcc-") as folder:
            text, cubin = Path(folder, f"{source.name}.cu"), Path(folder, f"{source.name}.cubin")
            text.write_text(source.text)
            options = [
                # Not -arch: its shorthand may add a pass for plain sm_90, which refuses wgmma
                f"-gencode=arch={source.arch.replace('sm_', 'compute_')},code={source.arch}",
                *("--cubin", *source.flags, REPORT),
                *(f"-I{path}" for path in source.include_dirs),
                *("--keep", f"--keep-dir={folder}"),  # keeps the PTX
            ]
            command = [str(nvcc), *options, "-o", str(cubin), str(text)]
            show_command(shlex.join(command))
            start = time.perf_counter()
            log = _run(command, source)
            ptx = next(Path(folder).glob("*.ptx"), None)
            seconds = time.perf_counter() - start
            return finish("nvcc", source, cubin.read_bytes(), ptx.read_bytes() if ptx else b"", log, seconds)


def _run(command: list[str], source: Source) -> str:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CompileError("nvcc", source, f"no result after {_TIMEOUT:.0f} s; the process was ended.") from None
    log = process.stdout + process.stderr
    if process.returncode:
        raise CompileError("nvcc", source, log or f"exit status {process.returncode} without a word")
    return log


@cache
def _version() -> str | None:
    nvcc = find_tool("nvcc")
    if nvcc is None:
        return None
    process = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r"\bV(\d+\.\d+\.\d+)", process.stdout)
    return match[1] if match else None


compiler = Nvcc()
