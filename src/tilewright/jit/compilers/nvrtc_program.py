"""One NVRTC compilation, here or in a process of its own, which runs this file: it imports nothing of tilewright."""

import marshal
import subprocess
import sys
from typing import NamedTuple


class Request(NamedTuple):
    """What to compile: the text of the file `name`, with NVRTC's options."""

    text: str
    name: str
    options: list[str]


class Program(NamedTuple):
    """What became of it.   error: "" if it compiled."""

    error: str
    log: str
    cubin: bytes = b""
    ptx: bytes = b""


def compiled(request: Request) -> Program:
    """Compile in this process; the GIL is released meanwhile."""
    from cuda.bindings import nvrtc

    status, handle = nvrtc.nvrtcCreateProgram(request.text.encode(), request.name.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return Program(status.name, "")

    def result(what: str) -> bytes:
        status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(handle)
        memory = bytes(size if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else 0)
        if memory:
            (status,) = getattr(nvrtc, f"nvrtcGet{what}")(handle, memory)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"nvrtcGet{what}: {status.name}")
        return memory

    try:
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(request.options), [o.encode() for o in request.options])
        log = result("ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return Program(status.name, log)
        return Program("", log, result("CUBIN"), result("PTX"))
    except RuntimeError as error:
        return Program(str(error), "")
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def in_fresh_process(request: Request) -> Program:
    """The same in a new Python process."""
    command = [sys.executable, "-P", __file__]
    process = subprocess.run(command, input=marshal.dumps(tuple(request)), capture_output=True, check=False)
    if process.returncode:
        stderr = process.stderr.decode(errors="replace").strip()
        return Program(f"NVRTC's process ended with code {process.returncode}", stderr)
    return Program(*marshal.loads(process.stdout))


if __name__ == "__main__":
    outcome = compiled(Request(*marshal.loads(sys.stdin.buffer.read())))
    sys.stdout.buffer.write(marshal.dumps(tuple(outcome)))
