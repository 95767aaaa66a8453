"""Compile C++ kernels for the CPU on first use, and call them with a host path of a few microseconds.

    _kernel = HostKernel(Path(__file__).with_name("rms_norm.cpp"), "rms_norm", Args)
    _kernel(Args(y, total, x, ...), Params(T=torch.bfloat16, W=torch.float32, kAdd=False))

The file holds a function template.  The compiled source, which is stored next to the binary, is the file's text and
below it the requested instance, with the fields of `Params` by name in a `struct Config`.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import BackendError
from tilewright.jit import cache as kernel_cache
from tilewright.jit.artifact import Artifact, BuildKey
from tilewright.jit.collect import collecting
from tilewright.jit.compilers import INCLUDE, Source, get_compiler
from tilewright.jit.compilers.config_struct import config_struct
from tilewright.jit.compilers.host import FLAGS, architecture
from tilewright.jit.compilers.kernel_args import check_names, codes
from tilewright.jit.headers import header_hash
from tilewright.jit.tape import taping
from tilewright.log import logger

_C_TYPES = {
    "P": ("Pointer", ctypes.c_void_p),
    "q": ("int64_t", ctypes.c_int64),
    "i": ("int32_t", ctypes.c_int32),
    "f": ("float", ctypes.c_float),
}
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "half",
    torch.float32: "float",
    torch.float64: "double",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
_serial = False  # True in a child of fork, where the OpenMP runtime has lost its threads


class HostKernel:
    """A function template of `file`: `template <class Config> void entry(..., int threads)`.

    args: NamedTuple of the parameters but `threads`, see `compilers.kernel_args`: Pointer, I64, I32 and F32.
    `kernel(args, params)`: args are tensors (None: a null pointer) and numbers, params a NamedTuple with annotated
    fields, as for `CudaKernel`.  flags: additional compiler flags.
    """

    def __init__(self, file: Path, entry: str, args: type[tuple[Any, ...]], flags: tuple[str, ...] = ()) -> None:
        self.file, self.entry, self.args, self.flags = file, entry, args, (*FLAGS, *flags)
        self.signature = codes(args)
        self._functions: dict[Any, Callable[..., None]] = {}

    def __call__(self, args: tuple[Any, ...], params: NamedTuple) -> None:
        collector = collecting()
        if collector is not None:
            collector.add(self.entry, lambda: self.compile(params), (self.file, self.entry, params))
            return
        tape = taping()
        if tape is not None:
            tape.invalidate()
        function = self._functions.get(params)
        if function is None:
            function = self._functions[params] = self._load(self.compile(params))
        threads = 1 if _serial else torch.get_num_threads()
        function(*[a.data_ptr() if isinstance(a, Tensor) else a for a in args], threads)

    def source(self, params: NamedTuple) -> str:
        """The source that is compiled for `params`."""
        check_names(self.args, self.file, self.entry, ("threads",))
        arguments = [f"{_C_TYPES[letter][0]} a{i}" for i, letter in enumerate(self.signature)]
        call = ", ".join([*(f"a{i}" for i in range(len(arguments))), "threads"])
        half = "#include <tilewright/host/half.h>\n" if torch.float16 in params else ""
        return (
            f"{half}{self.file.read_text()}\n"
            f"// The instance\n"
            f"using namespace tilewright;\n"
            f"{config_struct(params, _DTYPES)}"
            f"struct Pointer {{\n    void* address;\n    template <class T>\n"
            f"    operator T*() const {{ return static_cast<T*>(address); }}\n}};\n"
            f'extern "C" void entry({", ".join([*arguments, "int threads"])}) {{\n'
            f"    auto* kernel = &{self.entry}<Config>;\n    kernel({call});\n}}\n"
        )

    def compile(self, params: NamedTuple, arch: str | None = None) -> Artifact:
        """The library for `params`, from the cache or compiled.  arch: default: that of this machine."""
        compiler = get_compiler("host")
        text, version = self.source(params), compiler.version() or ""
        name, arch = self.entry, arch or architecture()
        source = Source(text, name, arch, self.flags, (INCLUDE,))
        headers = header_hash(text, source.include_dirs)
        key = BuildKey(name, "host", arch, self.flags, text, headers, version, suffix="so", source_suffix="cpp")

        def build() -> Any:
            config = ", ".join(f"{field}={_spelled(value)}" for field, value in params._asdict().items())
            logger.info("compiling %s<%s> with %s for %s", name, config, version, arch)
            return compiler.compile(source)

        return kernel_cache.get(key, build if version else None)

    def _load(self, artifact: Artifact) -> Callable[..., None]:
        prototype = ctypes.CFUNCTYPE(None, *(_C_TYPES[letter][1] for letter in self.signature), ctypes.c_int)
        return prototype(("entry", _open(artifact)))


def _spelled(value: Any) -> str:
    """`value` as spelled in the source."""
    return str(value).lower() if isinstance(value, bool) else str(_DTYPES.get(value, value))


def _open(artifact: Artifact) -> ctypes.CDLL:
    """Load the verified bytes from memory: the file in the cache may have been replaced meanwhile."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(artifact.key.name)
        with open(descriptor, "wb", closefd=False) as memory:
            memory.write(artifact.binary)
        try:
            # The descriptor stays open: a reused number would be a name that the loader already knows
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        except OSError as error:
            os.close(descriptor)
            logger.debug("%s is loaded from a private file: %s", artifact.key.name, error)
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:  # a new name, private to this user
        file = Path(folder) / f"{artifact.key.name}.so"
        file.write_bytes(artifact.binary)
        try:
            return ctypes.CDLL(str(file))
        except OSError as error:
            raise BackendError(f"{artifact.key.name}: the compiled library cannot be loaded: {error}.") from None


def _after_fork() -> None:
    global _serial
    _serial = True


os.register_at_fork(after_in_child=_after_fork)
