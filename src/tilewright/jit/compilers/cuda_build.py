"""The part that NVRTC and nvcc share: the report about a compiled CUDA kernel, and the debug switches."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tilewright import settings
from tilewright.hardware.toolchain import Machine
from tilewright.jit.cache import Built
from tilewright.jit.compilers import Source
from tilewright.jit.compilers.cubin import facts
from tilewright.log import log_once, logger

REPORT = "--ptxas-options=-v"  # makes ptxas report spills; changes no instruction
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# ptxas still compiles a kernel with these warnings, but it runs several times slower
_PERFORMANCE_WARNING = re.compile(r".*(?:Potential Performance Loss|setmaxnreg ignored).*")
_DISASSEMBLERS = {"cuobjdump": ("-sass",), "nvdisasm": ()}


def finish(compiler: str, source: Source, cubin: bytes, ptx: bytes, log: str, seconds: float) -> Built:
    """Make the `Built` of a cubin.

    info: the fields of `cubin.Facts`, spills (instructions), spill_stores and spill_loads (bytes), warnings, seconds.
    """
    switches = settings.current()
    kernel = facts(cubin)
    info: dict[str, Any] = {**kernel._asdict(), "parameters": list(kernel.parameters), "spills": kernel.spills}
    info["spill_stores"], info["spill_loads"] = (_sum(_SPILLS, log, group) for group in (1, 2))
    info["warnings"] = _PERFORMANCE_WARNING.findall(log)
    info["seconds"] = round(seconds, 3)
    for warning in info["warnings"]:
        logger.warning("%s for %s: %s", source.name, source.arch, warning)
    if switches.jit_ptxas_verbose:
        logger.warning("%s", log.strip())
    if switches.jit_debug:
        shown = ("registers", "stack_bytes", "spill_stores", "spill_loads", "shared_bytes", "instructions")
        words = ", ".join(f"{name} {info[name]}" for name in shown)
        logger.warning(
            "%s compiled %s for %s in %.2f s: %s; flags %s",
            *(compiler, source.name, source.arch, seconds, words, " ".join(source.flags)),
        )
    files = {"ptx": ptx} if switches.jit_dump_ptx else {}
    if switches.jit_dump_sass:
        files |= _sass(cubin)
    return Built(cubin, info, files)


def show_command(command: str) -> None:
    """Log a command line if `TILEWRIGHT_JIT_PRINT_COMMAND` is set."""
    if settings.current().jit_print_command:
        logger.warning("%s", command)


def _sum(pattern: re.Pattern[str], log: str, group: int) -> int:
    return sum(int(match[group]) for match in pattern.finditer(log))


def _sass(cubin: bytes) -> dict[str, bytes]:
    for tool, options in _DISASSEMBLERS.items():
        path = find_tool(tool)
        if path is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder, "kernel.cubin")
            binary.write_bytes(cubin)
            process = subprocess.run([path, *options, binary], capture_output=True, check=False)
        if process.returncode == 0:
            return {"sass": process.stdout}
        log_once(("sass", tool), f"{path} failed: {process.stderr.decode(errors='replace').strip()}")
    log_once(
        "sass",
        "TILEWRIGHT_JIT_DUMP_SASS needs cuobjdump or nvdisasm (CUDA toolkit, or Triton's package); neither works.",
    )
    return {}


def find_tool(name: str) -> Path | None:
    """A program of the CUDA toolkit: under CUDA_HOME or CUDA_PATH, on PATH, in /usr/local/cuda, in Triton's package."""
    machine = Machine(driver=None)
    return machine.program(name) or machine.of_triton(name)
