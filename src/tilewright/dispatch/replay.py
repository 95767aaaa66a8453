"""Replay of an eager call: one dictionary lookup from its arguments to recorded launches, or to the plan of a call that
records none, such as one that torch computes.

The first call with a signature passes checks, selection and torch's dispatcher, and is recorded; later ones skip all
three.  `lookup` returns None, and nothing is replayed, wherever another party has to see the op or may change its
meaning: tensor subclasses, dispatch modes (FakeTensor, tracing), functorch transforms, forward mode, the profiler, a
recording, a device other than the current one; and for tensors whose memory is not their value: with the negative bit,
or zeros without memory.  Torch's dispatcher resolves those.
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
from tilewright.settings import current

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp
    from tilewright.dispatch.select import Plan

_PLAIN = frozenset((Tensor, Parameter))
HOST = -1  # `get_device` of a CPU tensor
_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
transforms = torch._C._functorch.peek_interpreter_stack
"""The innermost active transform of torch.func; None outside of all."""
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # a wrapper has no memory, and may outlive its transform
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_recordings = recordings()


class Entry:
    """State of one signature for its next call; it holds no tensor.  `launch` is None where the call left no tape.

    aliased: which inputs began at one address, see `_aliases`; only such calls are replayed by the entry.
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
        aliased: tuple[int, ...] = (),
        scalars: Sequence[Any] = (),
    ) -> None:
        self.plan, self.aliased = plan, aliased
        self.zeros = (
            [] if tape is None else [(i, a, copysign(1.0, a)) for i, a in enumerate(scalars, len(args)) if _zero(a)]
        )
        self.narrow = bool(aliased or self.zeros)
        self.launch = None if tape is None else tape.replay
        first = args[0]
        assert first is not None
        self.spans = [0 if t is None else span(t) for t in (*args, *outs)]
        # `empty_like` is torch's cheapest allocation, half the time of naming shape, dtype and device
        self.like = len(outs) == 1 and _layout(outs[0]) == _layout(first)
        self.specs = [(tuple(o.shape), o.dtype, o.stride()) for o in outs]

    def serves(self, args: Sequence[Any], pointers: Sequence[int]) -> bool:
        """Is the entry that of a call whose key is equal?"""
        for i, zero, sign in self.zeros:
            if args[i] is not zero and copysign(1.0, args[i]) != sign:
                return False
        return not self.aliased or _aliases(pointers[: len(self.aliased)]) == self.aliased


Targets = Sequence[Tensor | None]
"""The outputs of a call that writes into tensors of its caller; None: one that dispatch allocates."""

Signature = tuple[Entry | None, tuple[Any, ...], list[int]]
"""The entry of a signature (None: first call), its key, and the pointers of the call's tensors."""


def lookup(
    raw: "RawOp", args: Sequence[Any], backend: str, numerics: str, targets: Targets | None = None
) -> Signature | None:
    """The entry for a call, or None where a call may not be replayed.  The key holds all that a decision or a launch
    depends on; with outputs that are given, also which inputs begin where they begin.
    """
    first = args[0]
    if type(first) not in _PLAIN or (
        targets is not None and len(targets) != raw.count
    ):  # the checks refuse such a number
        return None
    device = first.get_device()
    if device != HOST and (_current_device is None or device != _current_device()):
        return None
    if _modes() or _recordings or _profiling() or transforms() is not None or _forward_ad._current_level >= 0:
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
    if _grad_enabled():  # checks may depend on what requires a gradient
        parts += [t is not None and t.requires_grad for t in args[:count]]
    for out in targets or ():
        if out is None:
            parts.append("new")
            pointers.append(0)
            continue
        if type(out) not in _PLAIN or _wrapped(out) or out.get_device() != device or out.is_neg():
            return None
        pointer = out.data_ptr()
        same = tuple([i for i, p in enumerate(pointers) if p == pointer]) if pointer in pointers else None
        parts += ("out", out.dtype, out.shape, out.stride(), pointer & 15, same, out.requires_grad)
        pointers.append(pointer)
    key = tuple(parts)
    try:
        entry = raw.entries.get(key)
    except TypeError:  # a list for a number: the checks refuse it by name
        return None
    if entry is not None and entry.narrow and not entry.serves(args, pointers):
        entry = None
    return entry, key, pointers


def replay(raw: "RawOp", signature: Signature, args: Sequence[Any], targets: Targets | None = None) -> Any:
    """Make the call again on new tensors, by its tape or else by its plan.  Returns a tensor, or a tuple of several.

    With `targets`: into them.  Returns None, and does nothing, where one of them overlaps an input other than at its
    first element, about which the key says nothing, or another of them.
    """
    entry, key, pointers = signature
    assert entry is not None
    if targets is not None:
        if _overlaps(entry, pointers, len(targets)):
            return None
        outs = _complete(entry, targets, args[0].device)
        pointers[len(pointers) - len(outs) :] = [out.data_ptr() for out in outs]
    elif entry.plan.launch is None:
        outs = raw.owned_reference(args, entry.specs, {p for p in pointers if p}, entry.plan.numerics)
        return outs[0] if len(outs) == 1 else outs or None
    elif entry.like:
        outs = (torch.empty_like(args[0]),)
    else:
        device = args[0].device
        outs = tuple([torch.empty_strided(a, c, dtype=b, device=device) for a, b, c in entry.specs])
    if entry.launch is None:
        raw.launch(args, entry.plan, outs)
    else:
        if targets is None:
            for each in outs:
                pointers.append(each.data_ptr())
        entry.launch(key[2], pointers)
    return outs[0] if len(outs) == 1 else outs or None


def _complete(entry: Entry, targets: Targets, device: torch.device) -> tuple[Tensor, ...]:
    """`targets`, with new tensors where it has None."""
    if len(targets) == 1 and targets[0] is not None:
        return (targets[0],)
    return tuple(
        [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) if out is None else out
            for out, (shape, dtype, strides) in zip(targets, entry.specs, strict=True)
        ]
    )


def record(
    raw: "RawOp",
    signature: Signature,
    args: Sequence[Any],
    backend: str,
    numerics: str,
    targets: Targets | None = None,
) -> Any:
    """Make a checked call as its plan says, and keep a tape of its launches where one can be made."""
    into = None if targets is None else raw.complete(args, targets)
    if into is not None:
        raw.require_writable(args, into)
    with listen() as taping:
        outs = raw.launch(args, raw.plan(args, backend, numerics), into)
    plan = raw.plan(args, backend, numerics)  # again: a launch without a kernel makes another plan
    inputs, pointers = args[: raw.tensor_count], signature[2]
    moving: list[Tensor | None] = list(inputs)
    if targets is not None:  # an input that is an output moves with it
        ends = {p for p in pointers[len(inputs) :] if p}
        moving = [None if p in ends else t for t, p in zip(inputs, pointers, strict=False)]
    aliases = _aliases(pointers[: len(inputs)])
    tape = None if plan.launch is None else taping.finish((*moving, *outs), bool(aliases))
    keep(raw, signature, Entry(plan, tape, inputs, outs, aliases if tape else (), args[raw.tensor_count :]))
    return outs[0] if len(outs) == 1 else outs or None


def keep(raw: "RawOp", signature: Signature, entry: Entry) -> None:
    """Remember `entry` for calls with this signature, unless the next of them is to be planned or checked anew."""
    if not entry.plan.provisional and not current().check:
        raw.entries.put(signature[1], entry)


def span(t: Tensor) -> int:
    """Bytes from the first element of a strided tensor to the end of the last."""
    if not t.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def _overlaps(entry: Entry, pointers: Sequence[int], count: int) -> bool:
    """Does one of the last `count` tensors, outputs, lie across an input or another of them?  The key knows of inputs
    that begin where it begins.
    """
    first = len(pointers) - count
    for place in range(first, len(pointers)):
        pointer = pointers[place]
        if not pointer:  # dispatch allocates it
            continue
        end = pointer + entry.spans[place]
        for i in range(place):
            start = pointers[i]
            if start < end and pointer < start + entry.spans[i] and (start != pointer or i >= first):
                return True
    return False


def _aliases(pointers: Sequence[int]) -> tuple[int, ...]:
    """For each tensor, the first that begins at its address; () where all begin at different ones.  0: no address."""
    addresses = [p for p in pointers if p]
    return tuple([pointers.index(p) for p in pointers]) if len(set(addresses)) < len(addresses) else ()


def _zero(value: Any) -> bool:
    return type(value) is float and value == 0.0


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device
