"""Compile CUDA C++ kernels on first use, and launch them with a host path of a few microseconds.

    class Params(NamedTuple):
        kRows: int
        Element: torch.dtype

    class Args(NamedTuple):
        source: Map
        target: Map
        rows: I32
        columns: I32

    _copy = CudaKernel(Path(__file__).with_name("copy.cuh"), "copy", Args, archs=("sm_90a",))
    _copy((132,), Args(tensor_map(x, box), tensor_map(y, box), m, n), Params(64, x.dtype), block=32, shared_bytes=32768)

The header holds `template <typename Config> __global__ void copy(...)`.  The compiled source, which is stored next to
the binary, has the fields of `Params` by name in a `struct Config`: constants are not positional, and a name that is
missing is an error of the C++ compiler.  The fields of `Args` bear the names of the kernel's parameters.
docs/cuda-kernels.md is the guide.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright import settings
from tilewright.errors import BackendError
from tilewright.hardware.device import device_info
from tilewright.hardware.device import raw_device as _current_device
from tilewright.hardware.device import raw_stream as _current_stream
from tilewright.jit import cache as kernel_cache
from tilewright.jit.artifact import Artifact, BuildKey
from tilewright.jit.collect import collecting, machine
from tilewright.jit.compilers import INCLUDE, Source, get_compiler
from tilewright.jit.compilers.config_struct import config_struct
from tilewright.jit.compilers.kernel_args import BYTES, check_names, codes
from tilewright.jit.driver import Launch, Loaded, load
from tilewright.jit.headers import header_hash
from tilewright.jit.tape import Step, taping
from tilewright.jit.tensor_map import TensorMap
from tilewright.log import logger

FLAGS = ("-std=c++17",)
_INT32 = 2**31

_TYPES = {
    torch.bfloat16: "tilewright::bfloat16",
    torch.float16: "tilewright::float16",
    torch.float32: "float",
    torch.float8_e4m3fn: "tilewright::float8_e4m3",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint8: "unsigned char",
}


class CudaKernel:
    """A kernel template `tilewright::<entry>` in `file`.

    args: NamedTuple of the kernel's parameters, see `compilers.kernel_args`.  archs: the architectures of the code
    ("sm_90a": only that GPU; "sm_90": that and later ones of its generation).  flags: additional compiler flags.
    dependent, cooperative: see `driver.Launch`.

    `kernel(grid, args, params, block=)`: args are tensors, tensor maps and numbers, the first of them a tensor or
    tensor map; its device and that device's current stream are used.  params is a NamedTuple with annotated fields:
    `kName: int | bool | float` becomes a constant, `Name: torch.dtype | str` a type.
    """

    def __init__(
        self,
        file: Path,
        entry: str,
        args: type[tuple[Any, ...]],
        *,
        archs: tuple[str, ...],
        flags: tuple[str, ...] = (),
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.file, self.entry, self.args, self.archs = file, entry, args, archs
        self.signature = signature = codes(args)
        self._dependent, self._cooperative = dependent, cooperative
        self._int32 = [i for i, letter in enumerate(signature) if letter == "i"]
        self._flags = (*FLAGS, *flags)
        self._plans: dict[Any, Launch] = {}
        self._loaded: dict[Any, Loaded] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        args: Sequence[Any],
        params: Any,
        *,
        block: int,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        collector = collecting()
        if collector is not None:
            collector.add(self.entry, lambda: self.compile(params, collector.arch), (self.file, self.entry, params))
            return
        index = _device_index(args[0])
        if index != _current_device():
            with torch.cuda.device(index):
                self(grid, args, params, block=block, shared_bytes=shared_bytes, cluster=cluster)
            return
        launch = self._plans.get((index, params, block, shared_bytes, cluster))
        if launch is None:
            launch = self._plan(index, params, block, shared_bytes, cluster)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        args = [0 if a is None else a for a in args]
        values = [a.data_ptr() if isinstance(a, Tensor) else a.descriptor if type(a) is TensorMap else a for a in args]
        for i in self._int32:  # cuda-core would pass the low 32 bits of a larger one; a replay uses these values
            if not -_INT32 <= values[i] < _INT32:
                raise self._too_wide(i, values[i])
        launch(x, y, z, _current_stream(index), None, *values)
        tape = taping()
        if tape is not None:
            tape.add(Step(launch, (x, y, z), None, (), tuple(args)))

    def source(self, params: Any) -> str:
        """The source that is compiled for `params`."""
        check_names(self.args, self.file, self.entry)
        return (
            f'#include "{self.file.name}"\n\n'
            f"{config_struct(params, _TYPES)}\n"
            "// Instantiates the kernel\n"
            f"static_assert(&tilewright::{self.entry}<Config> != nullptr);\n"
        )

    def compile(self, params: Any, arch: str | None = None) -> Artifact:
        """The cubin for `params`, from the cache or compiled; launches nothing.

        arch: "sm_90", or one of `archs`; default: that of the current GPU.  Raises BackendError if the kernel has no
        code for it or no compiler is installed, CompileError if the compiler rejects the source.
        """
        text, arch = self.source(params), self._arch(arch or device_info().arch)
        switches = settings.current()
        compiler = get_compiler(switches.jit_compiler)
        version = compiler.version()
        flags = (*self._flags, *(("-lineinfo",) if switches.jit_lineinfo else ()))
        source = Source(text, self.entry, arch, flags, (self.file.parent, INCLUDE))
        dumped = [name for name in ("ptx", "sass") if getattr(switches, f"jit_dump_{name}")]
        key = BuildKey(
            name=self.entry,
            kind="cuda",
            arch=arch,
            flags=(*flags, *(f"dump={name}" for name in dumped)),  # an entry with dumps is a separate entry
            source=text,
            headers=header_hash(text, source.include_dirs),
            compiler=f"{compiler.name} {version}" if version else "",
        )
        return kernel_cache.get(key, (lambda: compiler.compile(source)) if version else None)

    def _plan(
        self, index: int, params: Any, block: int, shared_bytes: int, cluster: tuple[int, int, int] | None
    ) -> Launch:
        loaded = self._loaded.get((index, params))
        if loaded is None:
            artifact = self.compile(params, device_info(torch.device("cuda", index)).arch)
            self._check_signature(artifact.info["parameters"])
            loaded = self._loaded[index, params] = load(artifact.binary, index, artifact.info["symbol"])
        if settings.current().print_configs:
            config = ", ".join(f"{name}={value}" for name, value in params._asdict().items())
            logger.warning(
                "%s on cuda:%d: %s; block %d, shared %d bytes", self.entry, index, config, block, shared_bytes
            )
        launch = Launch(
            loaded,
            self.signature,
            block=(block, 1, 1),
            shared_bytes=shared_bytes,
            cluster=cluster,
            dependent=self._dependent,
            cooperative=self._cooperative,
        )
        self._plans[index, params, block, shared_bytes, cluster] = launch
        return launch

    def _too_wide(self, position: int, value: int) -> BackendError:
        name = self.args._fields[position]  # type: ignore[attr-defined]
        return BackendError(
            f"{self.entry}: parameter {name} is {value}; the kernel takes it as int32, from {-_INT32} to {_INT32 - 1}. "
            'Split the problem, or try backend="triton".'
        )

    def _arch(self, target: str) -> str:
        """The best of `archs` that `target` runs: its own number, or an earlier one of its generation."""
        runs = [arch for arch in self.archs if _runs(arch, machine(target))]
        if not runs:
            raise BackendError(
                f"{self.entry} is written for {', '.join(self.archs)}, and {target} cannot run that. "
                'Another backend can: backend="auto".'
            )
        return max(runs, key=_number)

    def _check_signature(self, sizes: Sequence[int]) -> None:
        declared = [BYTES[letter] for letter in self.signature]
        if declared != list(sizes):
            raise BackendError(
                f"{self.entry}: signature {self.signature!r} says parameters of {declared} bytes, the compiled kernel "
                f"takes {list(sizes)}."
            )


def _device_index(first: Any) -> int:
    """The CUDA ordinal of a tensor or a tensor map."""
    if type(first) is TensorMap:
        return first.device
    if not (isinstance(first, Tensor) and first.is_cuda):
        where = first.device if isinstance(first, Tensor) else type(first).__name__
        raise BackendError(f"a CUDA kernel's first argument is a CUDA tensor or a tensor map; got {where}.")
    return first.get_device()


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _runs(arch: str, machine: str) -> bool:
    """Does a cubin for `arch` run on `machine`, "sm_90"?"""
    if not machine.startswith("sm_"):
        return False
    has, needs = _number(machine), _number(arch)
    if arch.endswith("a"):
        return has == needs
    return has >= needs and has // 10 == needs // 10
