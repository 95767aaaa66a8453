"""Tensor maps: the TMA descriptors of tensors, as kernel parameters, for Hopper and later GPUs.

    a = tensor_map(x, box=(64, 64), swizzle=128)      # x: (M, K) bf16; a box is 64 rows of 128 bytes
    kernel(grid, (a, ...), params, block=128)         # `const __grid_constant__ TensorMap a`, see tilewright/tma.cuh

A map holds cuda-core's TensorMapDescriptor, which cuda-core's launch takes.  This module adds three things.  The
descriptor would keep the tensor alive, so that a cache of maps would hold memory: it gets the bare address.  It has no
8-bit floats: they are described as bytes, since TMA copies move bits.  It costs microseconds to make: equal requests
share one map, from a cache of bounded size.
"""

from functools import lru_cache
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.errors import BackendError, InputError
from tilewright.jit.collect import collecting

VECTOR = 16  # bytes: the widest access, the alignment of torch's allocators, and the unit of a tensor map's strides
_CACHED = 4096  # maps of a few hundred bytes; a model's forward needs a few hundred of them
_MAX_RANK, _MAX_BOX = 5, 256

# Names in cuda-core's TensorMapDataType.  The type matters for tma_reduce_add; copies move bits.
_DTYPES = {
    torch.uint8: "UINT8",
    torch.int8: "UINT8",
    torch.bool: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.int16: "UINT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
}
_SWIZZLES = {0: "NONE", 32: "SWIZZLE_32B", 64: "SWIZZLE_64B", 128: "SWIZZLE_128B"}


class TensorMap(NamedTuple):
    """The TMA descriptor of a tensor.

    descriptor: cuda-core's, for a launch.  device: the CUDA ordinal.  pointer: the tensor's address.  form: the other
    properties.
    """

    descriptor: Any
    device: int
    pointer: int
    form: tuple[Any, ...]

    def moved(self) -> "Moved":
        """The same map for tensors at other addresses."""
        return Moved(self.form)


class Moved:
    """`moved(pointer)`: the descriptor of one form of tensor at any address; a dictionary lookup if it exists."""

    def __init__(self, form: tuple[Any, ...]) -> None:
        self._form = form
        self._number = next(_numbers)

    def __call__(self, pointer: int) -> Any:
        key = self._number, pointer
        descriptor = _moved.get(key)
        if descriptor is None:
            descriptor = _make(pointer, *self._form).descriptor
            with _lock:
                while len(_moved) >= _CACHED:
                    del _moved[next(iter(_moved))]  # the oldest
                _moved[key] = descriptor
        return descriptor


_numbers = count()
_moved: dict[tuple[int, int], Any] = {}  # (number of a `Moved`, pointer), for all tapes of the process
_lock = Lock()


class _Memory:
    """Strided memory that it does not own."""

    def __init__(self, pointer: int, shape: tuple[int, ...], pitches: list[int], itemsize: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": (*pitches, itemsize),
            "typestr": f"{'|' if itemsize == 1 else '<'}u{itemsize}",
            "stream": None,
        }


def plain_strides(t: Tensor) -> tuple[int, ...]:
    """Strides of `t`, legal ones for dimensions of one element: 1 for the last, else a multiple of 16 bytes over a row.

    torch does not define the stride of such a dimension: it may be 0, odd or beyond 32 bits, and no decision may depend
    on it.
    """
    shape, strides = t.shape, t.stride()
    if 1 not in shape:
        return strides
    result = [strides[-1] if shape[-1] != 1 else 1]
    per_vector = max(1, VECTOR // t.element_size())
    step = -(-shape[-1] * result[0] // per_vector) * per_vector
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        if size != 1:
            step = -(-stride // per_vector) * per_vector
        result.append(stride if size != 1 else step)
    return tuple(reversed(result))


def tensor_map(tensor: Tensor, box: tuple[int, ...], *, swizzle: int = 0) -> TensorMap | None:
    """The map of `tensor` (1 to 5 dimensions, the last one contiguous) for copies of `box`.

    box: elements along each dimension of `tensor`, in its order, at most 256 each.  swizzle: 0, 32, 64 or 128 bytes, at
    least as wide as the box's last dimension.  A miss fetches 256 bytes into the L2.
    Boxes that reach over an edge read zeros and write nothing there.  Raises InputError.
    A map holds the tensor's address, not the tensor.  Under `collect` there is no memory, and the result is None.
    """
    if collecting() is not None:
        return None
    return _make(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        box,
        swizzle,
    )


@lru_cache(_CACHED)
def _make(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    what = f"tensor map of {tuple(shape)} {str(dtype).removeprefix('torch.')}"
    pitches = _pitches(what, shape, strides, dtype)
    _check(what, pointer, shape, dtype, device, box, swizzle)
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise BackendError(f"tensor maps need cuda-core: pip install 'tilewright[cuda]' ({error}).") from None
    from cuda.core import Device
    from cuda.core._tensor_map import TensorMapDataType, TensorMapL2Promotion, TensorMapSwizzle

    with torch.cuda.device(device):
        if torch.cuda.is_initialized():
            Device(device.index).set_current()  # autograd's threads may not have used the device before
        memory = _Memory(pointer, shape, pitches, dtype.itemsize)
        view = StridedMemoryView.from_cuda_array_interface(memory, stream_ptr=-1)
        try:
            descriptor = view.as_tensor_map(
                box,
                data_type=TensorMapDataType[_DTYPES[dtype]],
                swizzle=TensorMapSwizzle[_SWIZZLES[swizzle]],
                l2_promotion=TensorMapL2Promotion.L2_256B,
            )
        except ValueError as error:
            raise InputError(f"{what}, strides {strides}, box {box}, swizzle {swizzle}: {error}") from None
    return TensorMap(descriptor, device.index, pointer, (shape, strides, dtype, device, box, swizzle))


def _pitches(what: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> list[int]:
    """Strides in bytes of all dimensions but the last, outermost first."""
    if not 1 <= len(shape) <= _MAX_RANK:
        raise InputError(f"{what}: has {len(shape)} dimensions; the TMA takes 1 to {_MAX_RANK}.")
    if strides[-1] != 1 and shape[-1] != 1:
        raise InputError(f"{what}: the last dimension has stride {strides[-1]}; it must be contiguous.")
    pitches: list[int] = []
    inner = -(-shape[-1] * dtype.itemsize // 16) * 16
    for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
        pitch = inner if size == 1 else stride * dtype.itemsize  # torch does not define the stride of a single row
        if pitch % 16 or not 0 <= pitch < 2**40:
            raise InputError(
                f"{what}: a stride of {stride} elements is {pitch} bytes; it must be a multiple of 16. "
                "Pad the rows, or copy the tensor."
            )
        inner = max(inner, pitch * size)
        pitches.insert(0, pitch)
    return pitches


def _check(
    what: str,
    pointer: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    box: tuple[int, ...],
    swizzle: int,
) -> None:
    if device.type != "cuda":
        raise InputError(f"{what}: is on {device}; the TMA reads GPU memory.")
    if dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise InputError(f"{what}: the TMA has no such type; allowed: {allowed}.")
    if swizzle not in _SWIZZLES:
        raise InputError(f"{what}: swizzle {swizzle} is one of {[*_SWIZZLES]}.")
    if pointer % 16:
        raise InputError(f"{what}: begins at address {pointer:#x}; it must be a multiple of 16. Copy the tensor.")
    if not all(0 < size <= 2**32 for size in shape):
        raise InputError(f"{what}: every dimension must have 1 to 2**32 elements.")
    if len(box) != len(shape) or not all(0 < size <= _MAX_BOX for size in box):
        raise InputError(f"{what}: box {box} needs {len(shape)} sizes from 1 to {_MAX_BOX}.")
    inner = box[-1] * dtype.itemsize
    if inner % 16:
        raise InputError(f"{what}: the rows of box {box} are {inner} bytes; they must be a multiple of 16.")
    if swizzle and inner > swizzle:
        raise InputError(
            f"{what}: the rows of box {box} are {inner} bytes, wider than the swizzle of {swizzle}; "
            f"make the box's last dimension at most {swizzle // dtype.itemsize}."
        )
