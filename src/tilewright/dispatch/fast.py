"""The fast road of an eager call: one dictionary lookup from arguments to a taped launch.

A call whose signature was seen before needs no checks, no selection and no torch dispatcher: the first one passed them
all. The road is closed, and `find` returns None, wherever somebody has to see the op or may change what it means:
tensor subclasses, dispatch modes (FakeTensor, tracing), functorch transforms, the profiler, a recording, a device other
than the current one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewright.dispatch.raw import RawOp
from tilewright.dispatch.recording import recordings
from tilewright.dispatch.registry import GENERATION as _generation
from tilewright.hardware.device import raw_device as _current_device
from tilewright.jit.tape import Tape, listen

_MAX_ENTRIES = 2048
_PLAIN = frozenset((Tensor, Parameter))
_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_transforms = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_HOST = -1  # what `get_device` says of a CPU's tensor
_recordings = recordings()


class Entry:
    """What one signature needs at its next call."""

    __slots__ = ("launch", "like", "specs")

    def __init__(self, tape: Tape, first: Tensor, outs: Sequence[Tensor]) -> None:
        self.launch = tape.replay
        # `empty_like` is the cheapest way torch has, half the time of naming shape, dtype and device
        self.like = len(outs) == 1 and _layout(outs[0]) == _layout(first)
        self.specs = [(tuple(o.shape), o.stride(), o.dtype, o.device) for o in outs]


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


Found = tuple[Entry | None, tuple[Any, ...], list[int]]
"""The entry of a signature (None: not seen, or it left no tape), its key, and the pointers of the call's tensors."""


def find(raw: RawOp, args: Sequence[Any], backend: str, numerics: str) -> Found | None:
    """The entry for a call, or None where the road is closed.  The key holds all that a decision or a launch depends
    on.
    """
    first = args[0]
    if _current_device is None or type(first) not in _PLAIN:
        return None
    device = first.get_device()
    if device == _HOST:  # and there may be no CUDA device to ask for the current one
        return None
    if device != _current_device() or _modes() or _recordings or _profiling() or _transforms() is not None:
        return None
    count = raw.tensor_count
    parts: list[Any] = [backend, numerics, device, _generation[0], *args[count:]]
    pointers = []
    for t in args[:count]:
        if type(t) in _PLAIN:
            if t.get_device() != device:
                return None
            pointer = t.data_ptr()
            pointers.append(pointer)
            parts += (t.dtype, t.shape, t.stride(), pointer & 15)
        elif t is None:
            parts.append(None)
            pointers.append(0)
        else:
            return None
    if _grad_enabled():  # checks may depend on who wants a gradient
        parts += [t is not None and t.requires_grad for t in args[:count]]
    key = tuple(parts)
    return raw.tapes.get(key), key, pointers


def replay(found: Found, first: Tensor) -> Any:
    """Make the call again on new tensors: allocate, launch.  Returns a tensor, or a tuple of several."""
    entry, key, pointers = found
    if entry.like:  # type: ignore[union-attr]
        out = torch.empty_like(first)
        pointers.append(out.data_ptr())
        entry.launch(key[2], pointers)  # type: ignore[union-attr]
        return out
    outs = tuple([torch.empty_strided(a, b, dtype=c, device=d) for a, b, c, d in entry.specs])  # type: ignore[union-attr]
    for out in outs:
        pointers.append(out.data_ptr())
    entry.launch(key[2], pointers)  # type: ignore[union-attr]
    return outs if len(outs) > 1 else outs[0]


def run_and_tape(raw: RawOp, found: Found, args: Sequence[Any], backend: str, numerics: str) -> Any:
    """Run the ordinary way, and keep a tape of it if one can be made.  The caller has checked the arguments."""
    key = found[1]
    plan = raw.plan(args, backend, numerics)
    if key in raw.tapes:  # known to leave no tape
        outs = raw.launch(args, plan)
    else:
        with listen() as taping:
            outs = raw.launch(args, plan)
        if len(raw.tapes) >= _MAX_ENTRIES:
            raw.tapes.clear()
        tape = None if plan.launch is None else taping.finish((*args[: raw.tensor_count], *outs))
        raw.tapes[key] = None if tape is None else Entry(tape, args[0], outs)
    return outs if len(outs) > 1 else outs[0]
