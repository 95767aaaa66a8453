"""The fast road of an eager call: one dictionary lookup from arguments to a taped launch, or to the plan of a call that
leaves no tape, as where torch is chosen.

A call whose signature was seen before needs no checks, no selection and no torch dispatcher: the first one passed them
all. The road is closed, and `find` returns None, wherever somebody has to see the op or may change what it means:
tensor subclasses, dispatch modes (FakeTensor, tracing), functorch transforms, forward mode, the profiler, a recording,
a device other than the current one; and for tensors whose memory is not their value: with the negative bit, or zeros
without memory.  Torch's dispatcher gives those their values.
"""

from collections.abc import Sequence
from math import copysign
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.nn import Parameter

from tilewright.dispatch.recording import recordings
from tilewright.dispatch.registry import GENERATION as _generation
from tilewright.hardware.device import raw_device as _current_device
from tilewright.jit.tape import Tape, listen

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp
    from tilewright.dispatch.select import Plan

_PLAIN = frozenset((Tensor, Parameter))
_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
transforms = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func that is active; None outside of all."""
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # a wrapper has no memory, and may outlive its transform
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_HOST = -1  # what `get_device` says of a CPU's tensor
_recordings = recordings()


class Entry:
    """What one signature needs at its next call; no tensor.  `launch` is None where the call left no tape.

    aliased: no tape, because two inputs began at one address; a call without such inputs may leave one.
    zeros: (position, value, sign) of the scalars that are 0.0 or -0.0, which are one key, and two constants of a tape.
    narrow: does the entry serve fewer calls than its key says, those that `serves` names?
    """

    __slots__ = ("aliased", "launch", "like", "narrow", "plan", "spans", "specs", "zeros")

    def __init__(
        self,
        plan: "Plan",
        tape: Tape | None,
        args: Sequence[Tensor | None],
        outs: Sequence[Tensor],
        aliased: bool = False,
        scalars: Sequence[Any] = (),
    ) -> None:
        self.plan, self.aliased = plan, aliased
        self.zeros = (
            [] if tape is None else [(i, a, copysign(1.0, a)) for i, a in enumerate(scalars, len(args)) if _zero(a)]
        )
        self.narrow = aliased or bool(self.zeros)
        self.launch = None if tape is None else tape.replay
        first = args[0]
        assert first is not None
        self.spans = [0 if t is None else span(t) for t in (*args, *outs)]
        # `empty_like` is the cheapest way torch has, half the time of naming shape, dtype and device
        self.like = len(outs) == 1 and _layout(outs[0]) == _layout(first)
        self.specs = [(tuple(o.shape), o.dtype, o.stride()) for o in outs]

    def serves(self, args: Sequence[Any], pointers: Sequence[int]) -> bool:
        """Is the entry that of a call whose key is equal?"""
        for i, zero, sign in self.zeros:
            if args[i] is not zero and copysign(1.0, args[i]) != sign:
                return False
        return not (self.aliased and not _aliased(pointers))


def _zero(value: Any) -> bool:
    return type(value) is float and value == 0.0


def span(t: Tensor) -> int:
    """Bytes from the first element of a strided tensor to the end of the last."""
    if not t.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device


Found = tuple[Entry | None, tuple[Any, ...], list[int]]
"""The entry of a signature (None: not seen), its key, and the pointers of the call's tensors."""


def find(raw: "RawOp", args: Sequence[Any], backend: str, numerics: str, out: Tensor | None = None) -> Found | None:
    """The entry for a call, or None where the road is closed.  The key holds all that a decision or a launch depends
    on; with `out`, also which inputs begin where it begins.
    """
    first = args[0]
    if _current_device is None or type(first) not in _PLAIN:
        return None
    device = first.get_device()
    if device == _HOST:  # and there may be no CUDA device to ask for the current one
        return None
    if device != _current_device() or _modes() or _recordings or _profiling() or transforms() is not None:
        return None
    if _forward_ad._current_level >= 0:
        return None
    count = raw.tensor_count
    parts: list[Any] = [backend, numerics, device, _generation[0], *args[count:]]
    pointers = []
    for t in args[:count]:
        if type(t) in _PLAIN and not _wrapped(t):
            if t.get_device() != device or t.is_neg():
                return None
            try:
                pointer, strides = t.data_ptr(), t.stride()
            except RuntimeError:  # sparse, or nested: the checks refuse it by name
                return None
            if not pointer and t.numel():
                return None
            pointers.append(pointer)
            parts += (t.dtype, t.shape, strides, pointer & 15)
        elif t is None:
            parts.append(None)
            pointers.append(0)
        else:
            return None
    if _grad_enabled():  # checks may depend on who wants a gradient
        parts += [t is not None and t.requires_grad for t in args[:count]]
    if out is not None:
        if type(out) not in _PLAIN or _wrapped(out) or out.get_device() != device or out.is_neg():
            return None
        pointer = out.data_ptr()
        same = tuple([i for i, p in enumerate(pointers) if p == pointer]) if pointer in pointers else None
        parts += ("out", out.dtype, out.shape, out.stride(), pointer & 15, same, out.requires_grad)
        pointers.append(pointer)
    key = tuple(parts)
    entry = raw.tapes.get(key)
    if entry is not None and entry.narrow and not entry.serves(args, pointers):
        entry = None
    return entry, key, pointers


def _aliased(pointers: Sequence[int]) -> bool:
    """Do two tensors begin at one address?"""
    known = [p for p in pointers if p]
    return len(set(known)) < len(known)


def again(raw: "RawOp", found: Found, args: Sequence[Any]) -> Any:
    """Make the call again on new tensors, by its tape or else by its plan.  Returns a tensor, or a tuple of several."""
    entry, key, pointers = found
    assert entry is not None
    first = args[0]
    if entry.plan.launch is None:
        given = {p for p in pointers if p}  # 0: of None, or of nothing
        outs = raw.owned_reference(args, entry.specs, given, entry.plan.numerics)
        return outs if len(outs) > 1 else outs[0]
    if entry.like:
        outs = (torch.empty_like(first),)
    else:
        outs = tuple([torch.empty_strided(a, c, dtype=b, device=first.device) for a, b, c in entry.specs])
    if entry.launch is None:
        raw.launch_into(outs, args, entry.plan)
    else:
        for out in outs:
            pointers.append(out.data_ptr())
        entry.launch(key[2], pointers)
    return outs if len(outs) > 1 else outs[0]


def again_into(raw: "RawOp", found: Found, args: Sequence[Any], out: Tensor) -> bool:
    """Make the call again, into the `out` it was found with; False, and nothing done, if that lies across an input."""
    entry, key, pointers = found
    assert entry is not None
    *inputs, pointer = pointers
    end = pointer + entry.spans[-1]
    for start, size in zip(inputs, entry.spans, strict=False):
        if start != pointer and start < end and pointer < start + size:  # at the very pointer: the key knows of it
            return False
    if entry.launch is None:
        raw.launch_into((out,), args, entry.plan)
    else:
        entry.launch(key[2], pointers)
    return True


def run(raw: "RawOp", found: Found, args: Sequence[Any], backend: str, numerics: str) -> Any:
    """Run the ordinary way, and keep a tape of it if one can be made.  The caller has checked the arguments."""
    with listen() as taping:
        outs = raw.launch(args, raw.plan(args, backend, numerics))
    plan = raw.plan(args, backend, numerics)  # again: a launch without a kernel makes another one
    inputs = args[: raw.tensor_count]
    tape = None if plan.launch is None else taping.finish((*inputs, *outs))
    aliased = plan.launch is not None and tape is None and _aliased(found[2])
    keep(raw, found, Entry(plan, tape, inputs, outs, aliased, args[raw.tensor_count :]))
    return outs if len(outs) > 1 else outs[0]


def run_into(raw: "RawOp", found: Found, args: Sequence[Any], backend: str, numerics: str, out: Tensor) -> None:
    """`run`, into `out`, which the caller has checked too."""
    raw.require_writable(args, (out,))
    with listen() as taping:
        raw.launch_into((out,), args, raw.plan(args, backend, numerics))
    plan = raw.plan(args, backend, numerics)
    inputs = args[: raw.tensor_count]
    # An input that is `out` moves with it
    others = [None if p == found[2][-1] else t for t, p in zip(inputs, found[2], strict=False)]
    tape = None if plan.launch is None else taping.finish((*others, out))
    keep(raw, found, Entry(plan, tape, inputs, (out,), scalars=args[raw.tensor_count :]))


def keep(raw: "RawOp", found: Found, entry: Entry) -> None:
    """Remember `entry` for calls of this signature."""
    raw.tapes.put(found[1], entry)
