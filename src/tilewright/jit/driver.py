"""Load cubins and launch their kernels, of any language, in about four microseconds.

cuda-core does both.  Of those four microseconds the driver's own `cuLaunchKernelEx` takes 3.4 to 4.2 on the machine of
docs/jit-costs.md; the same call through ctypes costs one more, Triton's C launcher as much.  The launch shape, the
stream object and the positions of float32 parameters are prepared once and then looked up.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import copysign
from threading import Lock
from typing import Any

import torch

from tilewright.errors import BackendError

_INSTALL = "launching needs cuda-core: pip install tilewright[cuda]"
_DEFAULT_SHARED_LIMIT = 48 << 10
_LARGEST_PORTABLE_CLUSTER = 8
_setting = Lock()  # of attributes
_INVALID_CONTEXT = "CUDA_ERROR_INVALID_CONTEXT"
_ADVICE = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "It was made for another GPU: compile it for this one, `tilewright warmup`.",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": "The driver misses a helper library next to libcuda: install the whole driver "
    "package; `tilewright doctor` lists them.",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "It is newer than the driver: update the driver, or compile with an older "
    "toolchain.",
}


@dataclass(frozen=True)
class Loaded:
    """A kernel on one device.  kernel: cuda-core's.  shared_bytes: static."""

    kernel: Any
    name: str
    shared_bytes: int
    device: int


@cache
def _core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise BackendError(f"{_INSTALL} ({error}).") from None
    return cuda.core


def load(binary: bytes, device: int, symbol: str) -> Loaded:
    """Load the kernel `symbol` (its mangled name) of a cubin on `device`, a CUDA ordinal.

    Raises BackendError with the driver's message, e.g. for a cubin of another architecture.
    """
    core = _core()
    with torch.cuda.device(device):
        core.Device(device).set_current()  # the primary context, torch's too
        try:
            kernel = core.ObjectCode.from_cubin(binary).get_kernel(symbol)
            shared_bytes = kernel.attributes[device].shared_size_bytes
        except Exception as error:
            raise _translated(error, f"loading {symbol} on cuda:{device}") from error
    return Loaded(kernel, symbol, shared_bytes, device)


class Launch:
    """A kernel and its launch shape: `launch(x, y, z, stream, function, *params)`, in the order of Triton's C launcher.

    signature: one letter per parameter, P pointer, i int32, q int64, f float32, d float64, ? bool, T tensor map (from
    `tensor_map`).  block: threads.  shared_bytes: dynamic.  cluster: blocks; x, y, z count blocks and must be multiples
    of it.  `function` is ignored.  A grid with a zero launches nothing.
    dependent: programmatic dependent launch: the grid may start while the previous one on the stream still runs.  Only
    for kernels that call `griddepcontrol_wait`.
    cooperative: all blocks run at once, or the launch fails: for kernels whose blocks wait for each other.
    The kernel's device must be the current one.
    """

    def __init__(
        self,
        loaded: Loaded,
        signature: str,
        *,
        block: tuple[int, int, int],
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
        dependent: bool = False,
        cooperative: bool = False,
    ) -> None:
        core = _core()
        self.loaded, self.signature = loaded, signature
        self._launch, self._launch_config, self._kernel = core.launch, core.LaunchConfig, loaded.kernel
        self._floats = [i for i, letter in enumerate(signature) if letter == "f"]
        self._shared_bytes, self._cluster = shared_bytes, cluster
        self._options = {"block": block, "shmem_size": shared_bytes, "programmatic_stream_serialization": dependent}
        if cooperative:
            self._options["is_cooperative"] = True
        self._shapes: dict[tuple[int, int, int], Any] = {}
        self._streams: dict[int, Any] = {}
        self._set_attributes()

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *params: Any) -> None:
        grid = (x, y, z)
        shape = self._shapes.get(grid)
        if shape is None:
            if not (x and y and z):
                return
            shape = self._shape(grid)
        if self._floats:
            values = list(params)
            for i in self._floats:
                value = values[i]
                values[i] = _bits(value) if value else _bits_of_zero(value)
            params = tuple(values)
        core_stream = self._streams.get(stream)
        if core_stream is None:
            core_stream = self._streams[stream] = _stream(self.loaded.device, stream)
        try:
            self._launch(core_stream, shape, self._kernel, *params)
        except Exception as error:  # noqa: BLE001  cuda-core's error class is private; nothing is swallowed
            self._retry(error, grid, shape, stream, params)

    def _shape(self, grid: tuple[int, int, int]) -> Any:
        if len(self._shapes) >= 4096:
            self._shapes.clear()
        if self._cluster is None:
            shape = self._launch_config(grid=grid, **self._options)
        else:
            if any(g % c for g, c in zip(grid, self._cluster, strict=True)):
                raise BackendError(f"{self.loaded.name}: a grid of {grid} blocks is no multiple of {self._cluster}.")
            clusters = tuple(g // c for g, c in zip(grid, self._cluster, strict=True))
            shape = self._launch_config(grid=clusters, cluster=self._cluster, **self._options)
        self._shapes[grid] = shape
        return shape

    def _retry(
        self, error: Exception, grid: tuple[int, int, int], shape: Any, stream: int, params: Sequence[Any]
    ) -> None:
        """Retry with a context, in a thread that has not used the device before; translate any other error."""
        doing = f"launching {self.loaded.name} on a grid of {grid} blocks of {self._options['block']} threads"
        if _INVALID_CONTEXT not in str(error):
            raise _translated(error, doing) from error
        _core().Device(self.loaded.device).set_current()
        try:
            self._launch(_stream(self.loaded.device, stream), shape, self._kernel, *params)
        except Exception as second:
            raise _translated(second, doing) from second

    def _set_attributes(self) -> None:
        """Set the attributes that large shared memory and non-portable cluster sizes need."""
        from cuda.bindings import driver

        names = driver.CUfunction_attribute
        attributes = []
        if self._shared_bytes + self.loaded.shared_bytes > _DEFAULT_SHARED_LIMIT:
            attributes.append((names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes))
        if self._cluster is not None and _product(self._cluster) > _LARGEST_PORTABLE_CLUSTER:
            attributes.append((names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        for attribute, value in attributes:
            with _setting:  # other shapes of this kernel may need more: an attribute is raised, never lowered
                kernel, device = self._kernel.handle, self.loaded.device
                status, present = driver.cuKernelGetAttribute(attribute, kernel, device)
                if status == driver.CUresult.CUDA_SUCCESS and present < value:
                    (status,) = driver.cuKernelSetAttribute(attribute, value, kernel, device)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(
                    f"{self.loaded.name}: {status.name} on asking for {self._shared_bytes} bytes of dynamic shared "
                    f"memory next to {self.loaded.shared_bytes} static ones, in clusters of {self._cluster}."
                )


def _product(sizes: Sequence[int]) -> int:
    x, y, z = sizes
    return x * y * z


@lru_cache(maxsize=4096)
def _bits(value: float) -> int:
    """The bits of a float32 as an integer: cuda-core passes a Python float as a double, and integers fastest.

    Not for zeros: 0.0 and -0.0 are equal keys of the cache.
    """
    (bits,) = struct.unpack("@I", struct.pack("@f", value))
    return int(bits)


def _bits_of_zero(value: float) -> int:
    """The bits of 0.0, or of -0.0."""
    return 1 << 31 if copysign(1.0, value) < 0 else 0


class _Handle:
    """A raw stream with the protocol of cuda-core."""

    def __init__(self, raw: int) -> None:
        self._raw = raw

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._raw


@cache
def _stream(device: int, raw: int) -> Any:
    """cuda-core's object for a raw stream, which it does not own.

    cuda-core has one Device object per thread, which makes no stream before the thread has used the device.
    """
    core_device = _core().Device(device)
    core_device.set_current()
    return core_device.create_stream(_Handle(raw))


def _translated(error: Exception, doing: str) -> BackendError:
    words = str(error).split("\n", 1)[0]
    advice = next((advice for name, advice in _ADVICE.items() if name in words), "")
    return BackendError(f"{doing}: {words} {advice}".rstrip())
