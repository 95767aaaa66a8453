"""The fast road of an eager call: one dictionary lookup from arguments to a taped launch.

A call whose signature was seen before needs no checks, no selection and no torch dispatcher: the first one passed them all.
The road is closed, and `run` returns None, wherever somebody has to see the op or may change what it means: tensor subclasses,
dispatch modes (FakeTensor, tracing), functorch transforms, the profiler, a recording, a device other than the current one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewright.dispatch.raw import RawOp
from tilewright.dispatch.recording import recordings
from tilewright.dispatch.registry import generation
from tilewright.jit.tape import Tape, listen

_MAX_ENTRIES = 2048
_PLAIN = frozenset((Tensor, Parameter))
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_recordings = recordings()


class _Entry:
    """What one signature needs at its next call."""

    __slots__ = ("like", "specs", "tape")

    def __init__(self, tape: Tape, first: Tensor, outs: Sequence[Tensor]) -> None:
        self.tape = tape
        self.like = len(outs) == 1 and outs[0].dtype == first.dtype and outs[0].stride() == first.stride()
        self.specs = [(tuple(o.shape), o.stride(), o.dtype, o.device) for o in outs]

    def allocate(self, first: Tensor) -> tuple[Tensor, ...]:
        """Fresh outputs.  `empty_like` is the cheapest way torch has, half the time of naming shape, dtype and device."""
        if self.like:
            return (torch.empty_like(first),)
        return tuple(
            [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in self.specs]
        )


_entries: dict[RawOp, dict[tuple[Any, ...], _Entry | None]] = {}


def signature(raw: RawOp, args: Sequence[Any], backend: str, numerics: str) -> tuple[Any, list[int]] | None:
    """(key, pointers) of a call the fast road may serve, or None.  The key holds all that a decision or a launch depends on."""
    first = args[0]
    if type(first) not in _PLAIN or not first.is_cuda:
        return None
    if _modes() or _transforms() is not None or _profiling() or _recordings:
        return None
    device = first.get_device()
    if device != _current_device():  # type: ignore[misc]
        return None
    count = raw.tensor_count
    key: list[Any] = [backend, numerics, device, generation(), *args[count:]]
    pointers = []
    for t in args[:count]:
        if t is None:
            key.append(None)
            pointers.append(0)
        elif type(t) in _PLAIN:
            pointer = t.data_ptr()
            pointers.append(pointer)
            key += (t.dtype, t.shape, t.stride(), t.get_device(), pointer & 15)
        else:
            return None
    return tuple(key), pointers


def replay(raw: RawOp, key: Any, pointers: list[int], first: Tensor) -> tuple[Tensor, ...] | None:
    """The outputs of a call whose tape exists, or None."""
    entries = _entries.get(raw)
    entry = entries.get(key) if entries is not None else None
    if entry is None:
        return None
    outs = entry.allocate(first)
    for out in outs:
        pointers.append(out.data_ptr())
    entry.tape.replay(key[2], pointers)
    return outs


def run_and_tape(raw: RawOp, key: Any, args: Sequence[Any], backend: str, numerics: str) -> tuple[Tensor, ...]:
    """Run the ordinary way, and keep a tape of it if one can be made.  The caller has checked the arguments."""
    entries = _entries.setdefault(raw, {})
    plan = raw.plan(args, backend, numerics)
    if key in entries:  # known to leave no tape
        return raw.launch(args, plan)
    with listen() as taping:
        outs = raw.launch(args, plan)
    if len(entries) >= _MAX_ENTRIES:
        entries.clear()
    tape = None if plan.launch is None else taping.finish((*args[: raw.tensor_count], *outs))
    entries[key] = None if tape is None else _Entry(tape, args[0], outs)
    return outs


def forget() -> None:
    """Decide again on the next calls (tables or settings changed)."""
    _entries.clear()
