"""Capture and replay of the kernel launches of one call, for other tensors of the same signature.

The first call of a signature (shapes, strides, dtypes, alignments, options) runs normally while a tape captures its
launches.  Each pointer that a launch received, bare or in a tensor map, must belong to one of the call's inputs or
outputs.  Then later calls are replays: they skip checks, selection and argument binding, and cost one dictionary
lookup, the allocation of the outputs and the launches.  Scratch memory must come from `scratch`, so that a replay can
allocate it too.  A call that copies an input, or launches by other means, leaves no tape and is never replayed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.hardware.device import raw_stream as _current_stream
from tilewright.jit.tensor_map import Moved, TensorMap

_MOVING = (Tensor, TensorMap)
_active: ContextVar["Taping | None"] = ContextVar("tilewright_taping", default=None)


class Step(NamedTuple):
    """One launch: the C launcher, the grid, the function, further launcher arguments, and the kernel's parameters."""

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    function: Any
    head: tuple[Any, ...]
    params: tuple[Any, ...]


class _Slot(NamedTuple):
    position: int
    base: int
    offset: int
    moved: Moved | None  # makes the tensor map, if the kernel takes one instead of a pointer


class Tape:
    """Launches without their pointers.  `replay(device, pointers)`: pointers of inputs, then outputs, in order."""

    def __init__(self, steps: Sequence[Step], slots: Sequence[Sequence[_Slot]], scratch: Sequence[Tensor] = ()) -> None:
        self._scratch = [(tuple(t.shape), t.dtype, t.device) for t in scratch]
        # (launcher, its arguments with the stream at 3, slots of the pointers): one copy and one call per launch
        self._launches = [
            (
                s.launch,
                [*s.grid, None, s.function, *s.head, *(None if isinstance(p, _MOVING) else p for p in s.params)],
                [(slot.position + 5 + len(s.head), *slot[1:]) for slot in step_slots],
            )
            for s, step_slots in zip(steps, slots, strict=True)
        ]

    def replay(self, device: int, pointers: Sequence[int]) -> None:
        """Launch on the current stream of `device`, which must be the current device."""
        stream = _current_stream(device)
        if self._scratch:
            # Freed on return, while the kernels may still run: the allocator reuses it on this stream only
            buffers = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype, where in self._scratch]
            pointers = [*pointers, *[t.data_ptr() for t in buffers]]
        for launch, template, slots in self._launches:
            args = template.copy()
            args[3] = stream
            for position, base, offset, moved in slots:
                pointer = pointers[base] + offset
                args[position] = pointer if moved is None else moved(pointer)
            launch(*args)


class Taping:
    """Captures the launches of one call."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._scratch: list[Tensor] = []
        self._replayable = True

    def add(self, step: Step | None) -> None:
        """Record a launch; None: one that cannot be replayed."""
        if step is None:
            self._replayable = False
        else:
            self._steps.append(step)

    def add_scratch(self, tensor: Tensor) -> None:
        """Record scratch memory of the call."""
        self._scratch.append(tensor)

    def invalidate(self) -> None:
        """Invalidate the tape: the call did something that a replay cannot do."""
        self._replayable = False

    def finish(self, bases: Sequence[Tensor | None], aliased: bool = False) -> Tape | None:
        """The tape; None unless each pointer belongs to exactly one of `bases`.

        aliased: bases that begin at one address do so in every replay, so either stands for the other.
        """
        if not self._replayable or not self._steps:
            return None
        slots: list[list[_Slot]] = []
        bases = (*bases, *self._scratch)
        for step in self._steps:
            step_slots = [_find(i, p, bases, aliased) for i, p in enumerate(step.params) if isinstance(p, _MOVING)]
            if any(slot is None for slot in step_slots):
                return None
            slots.append([slot for slot in step_slots if slot is not None])
        return Tape(self._steps, slots, self._scratch)


def _find(position: int, param: Tensor | TensorMap, bases: Sequence[Tensor | None], aliased: bool) -> _Slot | None:
    """The slot of `param`, which lies exactly at one base or inside the storage of exactly one; else None."""
    pointer, moved = (param.pointer, param.moved()) if isinstance(param, TensorMap) else (param.data_ptr(), None)
    exact = [i for i, b in enumerate(bases) if b is not None and b.data_ptr() == pointer]
    if len(exact) == 1 or (exact and aliased):
        return _Slot(position, exact[0], 0, moved)
    inside = [(i, b) for i, b in enumerate(bases) if b is not None and _holds(b.untyped_storage(), pointer)]
    if exact or len(inside) != 1:
        return None
    index, base = inside[0]
    return _Slot(position, index, pointer - base.data_ptr(), moved)


def _holds(storage: torch.UntypedStorage, pointer: int) -> bool:
    return 0 <= pointer - storage.data_ptr() < storage.nbytes()


class _Watch(TorchDispatchMode):
    """Invalidates the tape if torch itself computes something, which a replay would leave out."""

    def __init__(self, tape: Taping) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watched(func, args, kwargs or {})

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        memory_only = func.is_view or func.name().split("::")[1].startswith(("empty", "new_empty", "detach"))
        computes = func._schema.is_mutable or not isinstance(result, (torch.dtype, bool, int, float))
        if computes and not memory_only:
            self._tape.invalidate()
        return result


class _WatchOfEager(_Watch):
    """The same while torch's compiler is not imported, which torch's guard against it takes a second to do."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._watched(func, args, kwargs or {})


@contextmanager
def listen() -> Iterator[Taping]:
    """Capture the launches of the block."""
    tape = Taping()
    token = _active.set(tape)
    try:
        with (_Watch if "torch._dynamo" in sys.modules else _WatchOfEager)(tape):
            yield tape
    finally:
        _active.reset(token)


def taping() -> Taping | None:
    """The active capture, if any."""
    return _active.get()


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, contiguous scratch memory of one call."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    tape = _active.get()
    if tape is not None:
        tape.add_scratch(buffer)
    return buffer
