"""The contestants of a case, each as one callable for each sample: the forward, or the backward of a prepared graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.bench.accuracy import tensors
from tilewright.bench.cases import Case
from tilewright.bench.peers import Call, available_peers, bound
from tilewright.dispatch import Contract, Plan, RawOp, Sample, implementations, record
from tilewright.dispatch.contract import Direction
from tilewright.dispatch.effects import as_tuple, pure, written
from tilewright.dispatch.options import runnable
from tilewright.errors import InputError


@dataclass(frozen=True)
class Contestant:
    """One implementation.   make: sample -> call that computes the op's outputs; None if it lacks an option.

    judge: (sample, outputs) -> are they right, of a library that draws random numbers of its own.
    """

    name: str
    ours: bool
    make: Callable[[Sample], Call | None]
    judge: Callable[[Sample, Any], bool] | None = None


@dataclass(frozen=True)
class Choice:
    """Dispatch's answer for one case: the backends that can run, the one `auto` takes, and the plan of each."""

    names: tuple[str, ...]
    chosen: str
    plans: dict[str, Plan]
    raw: RawOp
    raw_args: tuple[Any, ...]


def choice(case: Case, sample: Sample, cotangents: Sequence[Tensor | None]) -> Choice:
    """Ask dispatch which implementations of this direction can run `sample`."""
    contract = case.contract
    with torch.no_grad(), record() as recording:
        contract.function(*sample.args, **sample.kwargs)
    forward, forward_args, *preference = recording.calls[0]
    forward_plan = forward.plan(forward_args, *preference)  # what ran: the recorded plan may lack a kernel here
    if case.direction == "fwd":
        return _choice(forward, forward_args, forward_plan.backend)
    gradient = contract.gradient
    assert gradient is not None, "a case has a backward only where the contract has one"
    positions = gradient.inputs
    needs = [position in positions for position in range(len(forward_args))]
    with torch.no_grad():
        outputs = tensors(forward(*forward_args, *preference))  # with outputs that the public function does not return
    grads = random_cotangents(outputs[: len(cotangents)], 0)  # the public function's results may have other dimensions
    unused = (None,) * (len(outputs) - len(cotangents))
    saved = gradient.save(forward_args, tuple(outputs))
    plain = tuple(None if isinstance(a, Tensor) else a for a in forward_args)
    raw_args = tuple(gradient.raw_args((*grads, *unused), tuple(saved), plain, needs))
    if forward_plan.backend == "torch":  # then torch's own autograd runs, whatever the backward's table row is
        return _choice(gradient.op, raw_args, "torch")
    with torch.no_grad():
        gradient.op(*raw_args, "auto", "default")  # as in the forward, running it finds out which kernels can run
    auto_backend = gradient.op.plan(raw_args, "auto", "default").backend
    # A torch backward that recomputes our forward is neither ours nor torch's autograd
    return _choice(gradient.op, raw_args, "auto" if auto_backend == "torch" and gradient.recomputes else auto_backend)


def contestants(case: Case, selection: Choice, device: torch.device, against: Sequence[str] | None) -> list[Contestant]:
    """Our implementations, then the peers."""
    function = case.contract.function
    names = selection.names if selection.chosen in selection.names else (*selection.names, selection.chosen)
    ours = [Contestant(name, True, partial(_our_call, function, name, case.workload.into)) for name in names]
    peers = available_peers(case.contract, device, against, case=case.workload.name, invited=case.peers)
    return ours + [Contestant(peer.name, False, peer.make, getattr(peer, "judge", None)) for peer in peers]


def prepare(contestant: Contestant, sample: Sample, case: Case, cotangents: Sequence[Tensor | None]) -> Call | None:
    """The timed call on a private copy of `sample`: some libraries write into inputs, and shared ones would be cached.

    Backward: runs the forward now, on the current stream, and returns the gradient computation alone, repeatable.
    """
    if case.direction == "fwd":
        private = copied(sample)
        return _with_effects(contestant.make(private), written(case.contract, private.args, private.kwargs))
    private = copied(sample, gradient_inputs(case.contract))
    call = contestant.make(private)
    if call is None:
        return None
    leaves = [a for a in private.args if isinstance(a, Tensor) and a.requires_grad]
    with torch.enable_grad():
        outputs = tensors(call())
    if len(outputs) != len(cotangents):
        raise InputError(f"{contestant.name} returned {len(outputs)} outputs, the op has {len(cotangents)}")
    outputs, grads = _with_gradients(outputs, cotangents)
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def _with_effects(call: Call | None, targets: Sequence[Tensor]) -> Call | None:
    """`call`, whose results are followed by the arguments that it writes into."""
    if call is None or not targets:
        return call
    return lambda: (*as_tuple(call()), *targets)


def copied(sample: Sample, require_grad: Sequence[int] = ()) -> Sample:
    """A copy of every tensor in `sample`; the positional ones in `require_grad` become leaves."""
    args, kwargs = tree_map(_copy, (sample.args, dict(sample.kwargs)))
    for position in require_grad:
        if position < len(args) and isinstance(args[position], Tensor):  # an optional argument may be absent
            args[position].requires_grad_()
    return Sample(args, kwargs)


def _copy(v: Any) -> Any:
    """Copy with the strides of the original: kernels need the padding between lines of scales."""
    if not isinstance(v, Tensor):
        return v
    if any(stride == 0 and size > 1 for size, stride in zip(v.shape, v.stride(), strict=True)):
        return v.detach().clone()
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device).copy_(v.detach())


def gradient_inputs(contract: Contract) -> tuple[int, ...]:
    """Positions of the arguments that get a gradient."""
    return contract.gradient.inputs if contract.gradient is not None else ()


def random_cotangents(outputs: Sequence[Tensor], seed: int) -> list[Tensor | None]:
    """One random tensor an output, in its shape and dtype; None for integers, such as the ids of a router."""
    generator = torch.Generator(outputs[0].device).manual_seed(seed)

    def drawn(o: Tensor) -> Tensor:
        return torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.float32).to(o.dtype)

    return [drawn(o) if o.is_floating_point() else None for o in outputs]


def _with_gradients(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs that have a cotangent, their cotangents in their dtypes, copied)."""
    pairs = [(o, g.to(o.dtype, copy=True)) for o, g in zip(outputs, cotangents, strict=True) if g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def reference_outputs(
    contract: Contract, sample: Sample, direction: Direction, cotangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """Run the reference on `sample`, in its dtype: outputs, or gradients for `cotangents`."""
    if direction == "fwd":
        with torch.no_grad():
            return tensors(pure(contract, contract.reference)(*sample.args, **sample.kwargs))
    leaves = copied(sample, gradient_inputs(contract))
    outputs = tensors(contract.reference(*leaves.args, **leaves.kwargs))
    inputs = [a for a in leaves.args if isinstance(a, Tensor) and a.requires_grad]
    outputs, grads = _with_gradients(outputs, cotangents)
    return list(torch.autograd.grad(outputs, inputs, grads))


def _choice(raw: RawOp, raw_args: tuple[Any, ...], chosen: str) -> Choice:
    impls = implementations(raw.op, raw.direction)
    names = tuple(runnable(raw, impls, raw_args, "default"))
    return Choice(names, chosen, {name: raw.plan(raw_args, f"{name}!", "default") for name in names}, raw, raw_args)


def _our_call(function: Callable[..., object], backend: str, into: str | None, sample: Sample) -> Call:
    destination = {} if into is None else {"out": sample.kwargs[into]}
    return bound(partial(function, backend=backend, **destination), sample)
