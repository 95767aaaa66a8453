"""Memory writes: every output element, nothing else, and no input."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from tilewright.dispatch.effects import as_tuple, written
from tilewright.dispatch.replay import span
from tilewright.errors import InputError, RefusedError
from tilewright.validate.bits import bits, memory, same_bits
from tilewright.validate.case import Case, Findings, NotApplicable, RawCall, tensors
from tilewright.validate.layouts import every_second
from tilewright.validate.modes.registry import mode

GUARD = 8192  # elements on each side of a guarded output: more than a block of any kernel can overrun


@mode("inputs_unchanged")
def inputs_unchanged(case: Case, findings: Findings) -> None:
    """Inputs and cotangents keep their bits, their surroundings in memory included."""
    sample = case.sample()
    cotangents = [c.clone() for c in case.truth.cotangents]
    outputs = {id(t) for t in written(case.contract, sample.args, sample.kwargs)}
    inputs = [t for t in tensors(sample) if id(t) not in outputs]
    watched = [*inputs, *(cotangents if case.positions else [])]
    before = [memory(t).clone() for t in watched]
    case.call(sample)
    if case.positions:
        case.differentiate(sample, None, cotangents)
    for i, (t, old) in enumerate(zip(watched, before, strict=True)):
        what = f"input {i}" if i < len(inputs) else f"cotangent {i - len(inputs)}"
        findings.require(torch.equal(memory(t), old), f"{what} {tuple(t.shape)} was written to")


@mode("poison")
def poison(case: Case, findings: Findings) -> None:
    """Fresh memory, outputs and workspaces alike, is filled with NaN before the op gets it."""
    with poisoned():
        outputs = case.call(case.sample())
        both = case.differentiate(case.sample()) if case.positions else None
    findings.outputs(outputs)
    if both is not None:
        findings.outputs(both[0], "with gradients: ")
        findings.gradients(both[1])


@mode("out")
def out(case: Case, findings: Findings) -> None:
    """out= is returned, fully written and as accurate; a wrong out= raises and is left alone."""
    buffers = _out_buffers(case, guard=0)
    sample = case.sample()
    outputs = _into(case, buffers)
    if outputs is None:
        raise NotApplicable("the op takes no out= for these arguments")
    returned = outputs[: len(buffers)]
    findings.require(all(a is b for a, b in zip(returned, buffers, strict=True)), "out= was not what was returned")
    findings.outputs(outputs)
    for i, buffer in enumerate(buffers):
        wrong = {
            "of another shape": buffer.new_full((*buffer.shape, 2), _poison(buffer.dtype)),
            "of another dtype": torch.full_like(buffer, torch.nan, dtype=torch.float64),
        }
        if buffer.numel() > 1:
            wrong["with stride 2"] = every_second(torch.full_like(buffer, _poison(buffer.dtype)))
        for what, bad in wrong.items():
            destination = _as_returned([bad if j == i else fine.clone() for j, fine in enumerate(buffers)])
            _refuses(findings, partial(case.call, sample, out=destination), bad, f"out= {what}")
    if len(buffers) > 1:
        bad = torch.full_like(buffers[0], _poison(buffers[0].dtype))
        _refuses(findings, partial(case.call, sample, out=bad), bad, "out= of one tensor for several")
    if case.positions:
        leaf = case.sample()
        leaf.args[case.positions[0]].requires_grad_()
        with torch.enable_grad():
            bad = torch.full_like(buffers[0], torch.nan)
            destination = _as_returned([bad, *buffers[1:]])
            label = "out= while an input requires grad"
            _refuses(findings, partial(case.function, *leaf.args, **leaf.kwargs, out=destination), bad, label)


@mode("guard_bands")
def guard_bands(case: Case, findings: Findings) -> None:
    """Outputs lie inside larger buffers, aligned and misaligned; the memory around them stays as it was."""
    launched, accepted = False, []
    for shift in (0, 1):
        prefix = "misaligned: " if shift else ""
        if case.contract.forward.torch_out is not None:
            buffers = _out_buffers(case, GUARD, shift)
            bytes_before = [surroundings(buffer) for buffer in buffers]
            outputs = _into(case, buffers)
            accepted.append(outputs is not None)
            if outputs is not None:
                launched = True
                findings.outputs(outputs, f"{prefix}out=: ")
            for buffer, before in zip(buffers, bytes_before, strict=True):
                _intact(findings, buffer, before, f"{prefix}out=")
        for call in case.raw_calls(case.sample()):
            launched |= _launch_guarded(call, findings, prefix, shift)
    findings.require(len(set(accepted)) < 2, "out= is taken at one alignment and refused at another")
    if not launched:
        raise NotApplicable("the torch backend allocates its own outputs")


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every `torch.empty` in the block with NaN (the largest integer for integers)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switch = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)  # for the filling alone; torch's ops only warn
    switch.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        switch.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    guard: int,
    shift: int = 0,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """A NaN-filled tensor with `guard` elements of random bytes on both sides (`shift` more before it) and in the gaps
    of `strides`.
    """
    size = torch.empty(0, dtype=dtype).element_size()
    template = (
        torch.empty(shape, device="meta") if strides is None else torch.empty_strided(shape, strides, device="meta")
    )
    count = span(template) // template.element_size()
    noise = torch.randint(0, 256, ((count + 2 * guard + shift) * size,), dtype=torch.uint8, device=device)
    view = noise.view(dtype)[guard + shift : guard + shift + count]
    view = view.view(shape) if strides is None else view.as_strided(shape, strides)
    return view.fill_(_poison(dtype))


def _poison(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def _out_buffers(case: Case, guard: int, shift: int = 0) -> list[Tensor]:
    """One for each tensor that the public function returns."""
    if case.contract.forward.torch_out is None:
        raise NotApplicable("the op takes no out=")
    sample = case.sample()
    written_to = len(written(case.contract, sample.args, sample.kwargs))
    standards = case.truth.outputs[: len(case.truth.outputs) - written_to]
    return [guarded(tuple(s.exact.shape), s.dtype, case.device, guard, shift) for s in standards]


def _as_returned(buffers: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return buffers[0] if len(buffers) == 1 else tuple(buffers)


def _into(case: Case, buffers: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The outputs of a call with out=buffers; None if the op takes out= but refuses it for these arguments."""
    try:
        return case.call(case.sample(), out=_as_returned(buffers))
    except InputError as error:
        if f"{case.contract.name}(out=...)" not in str(error):
            raise
        return None


def surroundings(t: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the bytes before the first element of a view and after its last."""
    storage, size = memory(t), t.element_size()
    start = t.storage_offset() * size
    return storage[:start].clone(), storage[start + span(t) :].clone()


def _intact(findings: Findings, t: Tensor, before: tuple[Tensor, Tensor], what: str) -> None:
    for side, old, new in zip(("before", "after"), before, surroundings(t), strict=True):
        findings.require(torch.equal(old, new), f"{what}: memory {side} the output was overwritten")


def _launch_guarded(call: RawCall, findings: Findings, prefix: str, shift: int) -> bool:
    """Launch the implementation itself, forward or backward, into guarded outputs; False where torch is chosen, and
    where the implementation refuses to write into an argument at such an address.
    """
    args = list(call.args)
    for i in (i for i in call.op.mutated if args[i] is not None):
        args[i] = _guarded_copy(args[i], shift)
    try:
        plan = call._replace(args=tuple(args)).plan()
    except RefusedError:
        return False
    if plan.launch is None or args[0].numel() == 0:
        return False
    device = call.op.device_of(call.args)
    outs = tuple(
        guarded(tuple(t.shape), t.dtype, device, GUARD, shift, t.stride()) for t in call.op.allocate(call.args, "meta")
    )
    watched = [*outs, *(args[i] for i in call.op.mutated if args[i] is not None)]
    bytes_before = [surroundings(t) for t in watched]
    plan.launch(outs, *args, config=plan.config)
    for i, (t, old) in enumerate(zip(watched, bytes_before, strict=True)):
        _intact(findings, t, old, f"{prefix}{call.op.key} output {i}")
    outputs = call.op(*call.args, *call.preference)
    if findings.case.contract.promises.deterministic and not shift:
        for i, (a, b) in enumerate(zip(outs, as_tuple(outputs), strict=True)):
            findings.require(same_bits(a, b), f"{prefix}{call.op.key} output {i} has other bits in a guarded buffer")
    return True


def _guarded_copy(t: Tensor, shift: int) -> Tensor:
    """`t`, which a kernel writes into, between guards."""
    return guarded(tuple(t.shape), t.dtype, t.device, GUARD, shift, t.stride()).copy_(t)


def _refuses(findings: Findings, call: Callable[[], object], bad: Tensor, what: str) -> None:
    before = bits(bad).clone()
    try:
        call()
    except InputError:
        pass
    else:
        findings.faults.append(f"{what} raised nothing")
    findings.require(torch.equal(bits(bad), before), f"{what} was written to")
