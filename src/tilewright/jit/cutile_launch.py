"""Launch cuTile kernels: compiled once per specialisation, ahead of time or on first use, and launched by `jit.driver`.

`ct.launch` is not used: it always compiles on the machine it runs on.  Here cuda.tile turns the Python function into
Tile IR, tileiras turns that into a cubin, the kernel cache stores it, and `driver.Launch` launches it.  So a machine
with neither cuda.tile nor tileiras runs the kernels of a bundle.

The launch ABI is convention v2 of cuda.tile, which is documented: an array is a pointer, its shape and its strides, all
int32; scalars by value; no constants; a block of (1, 1, 1), whatever number of threads the kernel has.
"""

import inspect
import io
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import BackendError, CompileError
from tilewright.hardware import arch as arch_of
from tilewright.hardware.device import raw_stream as _current_stream
from tilewright.jit import cache as kernels
from tilewright.jit import cutile_language, driver
from tilewright.jit.artifact import Artifact, BuildKey, Built
from tilewright.jit.collect import collecting
from tilewright.jit.compilers import Source, tileiras
from tilewright.jit.cutile_language import ct
from tilewright.jit.tape import Step, taping
from tilewright.jit.tensor_map import VECTOR, plain_strides
from tilewright.settings import current

_INT32_MAX = 2**31 - 1
_BYTES = {"P": 8, "i": 4, "f": 4}


class Hints(NamedTuple):
    """Compiler hints of a configuration; None leaves the choice to tileiras.

    num_worker_warps  4 or 8 (tileiras 13.3 and later): math warps, without TMA producers
    occupancy         target blocks per SM, 1 to 32; bounds the registers
    """

    num_worker_warps: int | None = None
    occupancy: int | None = None
    opt_level: int = 3


class Array(NamedTuple):
    """What a binary assumes about a tensor: a flag is True if the value is a multiple of 16 bytes."""

    dtype: torch.dtype
    unit: bool  # is the last stride 1?
    strides: tuple[bool, ...]  # all but the last
    length: bool  # of the last dimension
    pointer: bool


Assumed = Array | type[int] | type[float]


class Form(NamedTuple):
    """One specialisation of a kernel: the assumptions about each argument, the constants, the hints."""

    assumed: tuple[Assumed, ...]
    constants: tuple[Any, ...]
    hints: Hints

    @property
    def signature(self) -> str:
        """The kernel's parameters as letters of `driver.Launch`."""
        letters: dict[Any, str] = {int: "i", float: "f"}
        return "".join("P" + "ii" * (len(a.strides) + 1) if isinstance(a, Array) else letters[a] for a in self.assumed)

    @property
    def options(self) -> tuple[str, ...]:
        """Flags of tileiras.  Without line numbers a binary has a third of the size and contains no paths."""
        return (f"-O{self.hints.opt_level}", *(("--lineinfo",) if current().jit_lineinfo else ()))


class CutileKernel:
    """A function in the cuTile language, `ct.kernel` without the decorator, whose constants all come last.

    `kernel(grid, args, constants, hints)`: `args` are tensors, ints (int32) and floats (float32) in order, `constants`
    the values of the `ct.Constant` parameters in order.  A tensor that is written must not overlap another.  The launch
    uses the device of the first tensor and its current stream.
    """

    def __init__(self, fn: FunctionType) -> None:
        self.fn, self.name = fn, fn.__name__.strip("_")
        self._launches: dict[tuple[int, Form], driver.Launch] = {}

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], hints: Hints) -> None:
        collector = collecting()
        if collector is not None:
            form = Form(_assume(args, _aligned_when_allocated), constants, hints)
            collector.add(self.name, lambda: self._artifact(collector.arch, form), self._key(collector.arch, form))
            return
        index = args[0].device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, args, constants, hints)
            return
        x, y, z = (*grid, 1, 1)[:3]
        if not (x and y and z):
            return
        form = Form(_assume(args, _aligned), constants, hints)
        launch = self._launches.get((index, form))
        if launch is None:
            launch = self._launches[index, form] = self._load(index, form)
        parameters = _flatten(args)
        self._refuse_wide(args)
        pointers = [p.data_ptr() if isinstance(p, Tensor) else p for p in parameters]
        launch(x, y, z, _current_stream(index), None, *pointers)
        tape = taping()
        if tape is not None:
            tape.add(Step(launch, (x, y, z), None, (), parameters))

    def compile(self, arch: str, args: tuple[Any, ...], constants: tuple[Any, ...], hints: Hints) -> Artifact:
        """The binary that a call with these arguments launches on `arch`, from the cache or compiled, on any machine.

        Tensors may be fake; their storages count as aligned to 16 bytes.
        """
        return self._artifact(arch, Form(_assume(args, _aligned_when_allocated), constants, hints))

    def _refuse_wide(self, args: tuple[Any, ...]) -> None:
        for i, a in enumerate(args):
            if type(a) is int and not -_INT32_MAX - 1 <= a <= _INT32_MAX:
                raise BackendError(
                    f"{self.name}: parameter {list(inspect.signature(self.fn).parameters)[i]} is {a}; the kernel takes "
                    f'it as int32, from {-_INT32_MAX - 1} to {_INT32_MAX}. Split the problem, or try backend="triton".'
                )

    def _load(self, index: int, form: Form) -> driver.Launch:
        artifact = self._artifact(arch_of(index), form)
        loaded = driver.load(artifact.binary, index, artifact.info["symbol"])
        return driver.Launch(loaded, form.signature, block=(1, 1, 1))

    def _artifact(self, arch: str, form: Form) -> Artifact:
        key = self._key(arch, form)
        return kernels.get(key, lambda: _build(self.fn, key, form))

    def _key(self, arch: str, form: Form) -> BuildKey:
        names = list(inspect.signature(self.fn).parameters)
        num_args = len(form.assumed)
        if not arch.startswith("sm_") or len(names) != num_args + len(form.constants):
            raise BackendError(
                f"{self.name} on {arch} with {num_args} arguments and {len(form.constants)} constants; needs an NVIDIA "
                f"GPU from sm_80 on, and values for {', '.join(names)}."
            )
        return BuildKey(
            name=self.name,
            kind="cutile",
            arch=arch,
            flags=(
                *(f"{name}: {_words(assumed)}" for name, assumed in zip(names[:num_args], form.assumed, strict=True)),
                *(f"{name} = {value!r}" for name, value in zip(names[num_args:], form.constants, strict=True)),
                *(f"{name}={value}" for name, value in form.hints._asdict().items() if value is not None),
                *form.options,
            ),
            source=source(self.fn),
            compiler=_compiler(),
            source_suffix="py",
        )


@cache
def source(fn: FunctionType) -> str:
    """The text that determines what `fn` computes: the global constants and functions it uses, then itself."""
    texts: dict[str, str] = {}
    _gather(fn, texts)
    return "\n\n".join(texts.values())


def _gather(fn: FunctionType, texts: dict[str, str]) -> None:
    """Add the sources of `fn` and of all that it uses to `texts`, callees before callers."""
    path = f"{fn.__module__}.{fn.__qualname__}"
    if path in texts:
        return
    texts[path] = ""  # a function may call itself
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name)
        if isinstance(value, FunctionType):
            _gather(value, texts)
        elif isinstance(value, bool | int | float | str):
            texts[f"{fn.__module__} {name}"] = f"{name} = {value!r}"
    del texts[path]
    texts[path] = inspect.getsource(fn).rstrip()


def _assume(args: tuple[Any, ...], aligned: Any) -> tuple[Assumed, ...]:
    return tuple([_array(a, aligned(a)) if isinstance(a, Tensor) else type(a) for a in args])


def _array(t: Tensor, aligned: bool) -> Array:
    shape, strides, per_vector = t.shape, plain_strides(t), VECTOR // t.element_size()
    if max(*shape, *strides) > _INT32_MAX:
        raise BackendError(
            f"sizes and strides of cuTile have 32 bits, given {tuple(shape)} with strides {strides}. "
            'Try backend="triton".'
        )
    return Array(
        t.dtype,
        strides[-1] == 1,
        tuple([s % per_vector == 0 for s in strides[:-1]]),
        shape[-1] % per_vector == 0,
        aligned,
    )


def _aligned(t: Tensor) -> bool:
    return t.data_ptr() % VECTOR == 0


def _aligned_when_allocated(t: Tensor) -> bool:
    """Would `t`, a tensor without memory, be aligned?  An allocated storage begins at a multiple of 16."""
    return int(t.storage_offset()) * t.element_size() % VECTOR == 0


def _flatten(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Kernel parameters.  A tensor becomes itself (for its pointer), its shape and its strides."""
    parameters: list[Any] = []
    for a in args:
        parameters.append(a)
        if isinstance(a, Tensor):
            parameters += a.shape
            parameters += plain_strides(a)
    return tuple(parameters)


def _words(assumed: Assumed) -> str:
    if not isinstance(assumed, Array):
        return "int32" if assumed is int else "float32"
    strides = [*("16B" if flag else "any" for flag in assumed.strides), "1" if assumed.unit else "any"]
    length, pointer = ("16B" if flag else "any" for flag in (assumed.length, assumed.pointer))
    return f"{assumed.dtype} strides {' '.join(strides)}, length {length}, pointer {pointer}"


@cache
def _compiler() -> str:
    """The compiler and its version, "tileiras 13.4.92, cuda.tile 1.7.0"; "" if one of the two is missing."""
    version = tileiras.compiler.version()
    return "" if version is None else f"tileiras {version}, cuda.tile {cutile_language.version()}"


def _build(fn: FunctionType, key: BuildKey, form: Form) -> Built:
    text = Source(key.source, key.name, key.arch, form.options)
    built = tileiras.compiler.compile(tileiras.TileSource(**vars(text), bytecode=_bytecode(fn, text, form)))
    expected = [_BYTES[letter] for letter in form.signature]
    sizes = built.info["parameters"]
    if sizes[: len(expected)] != expected:  # tensor maps, which the driver fills, may follow
        raise BackendError(
            f"{key.name} takes parameters of {sizes} bytes, where {expected} were expected: "
            "this version of cuda.tile has another calling convention."
        )
    return built


def _bytecode(fn: FunctionType, text: Source, form: Form) -> bytes:
    """Tile IR of `fn`.

    cuda.tile could compile to a cubin too, but inherits the shell's CUDA_HOME, keeps a second cache and leaves
    temporary files.
    """
    from cuda.tile import compilation

    convention = compilation.CallingConvention.cutile_python_v2()
    bytecode = io.BytesIO()
    try:
        compilation.export_kernel(
            ct.kernel(fn, **form.hints._asdict()),
            [compilation.KernelSignature([*map(_constraint, form.assumed), *form.constants], convention, text.name)],
            bytecode,
            gpu_code=text.arch,
            output_format="tileir_bytecode",
            bytecode_version=tileiras.compiler.bytecode_version(),
        )
    except ct.TileError as error:
        raise CompileError("cuda.tile", text, str(error)) from error
    return bytecode.getvalue()


def _constraint(assumed: Assumed) -> Any:
    from cuda.tile import compilation

    if not isinstance(assumed, Array):
        return compilation.ScalarConstraint(ct.int32 if assumed is int else ct.float32)
    vector = VECTOR // assumed.dtype.itemsize
    return compilation.ArrayConstraint(
        getattr(ct, str(assumed.dtype).removeprefix("torch.")),
        len(assumed.strides) + 1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        stride_constant=[*(None for _ in assumed.strides), 1 if assumed.unit else None],
        stride_divisible_by=[*(vector if flag else 1 for flag in assumed.strides), 1],
        shape_divisible_by=[*(1 for _ in assumed.strides), vector if assumed.length else 1],
        base_addr_divisible_by=VECTOR if assumed.pointer else assumed.dtype.itemsize,
        alias_groups=(),
        may_alias_internally=False,
    )
