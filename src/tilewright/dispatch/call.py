"""One public call: resolve the backend, replay, or check and run; autograd stands outside the raw op.

Eager calls go straight to the raw op, or through one `autograd.Function` when something needs a gradient.  Under
`torch.compile` the call is one op in the graph, `torch.ops.tilewright.<op>`, which AOTAutograd opens up: then ordinary
Python selects, and either the raw op goes into the graph or, where torch is chosen, the reference itself for Inductor
to fuse.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewright.dispatch import replay
from tilewright.dispatch.arguments import as_declared
from tilewright.dispatch.contract import Contract, bind, bind_function
from tilewright.dispatch.derivatives import Function, level_is_open
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.raw import LIBRARY, RawOp
from tilewright.dispatch.targets import any_requires_grad, check_out

F = TypeVar("F", bound=Callable[..., Any])


def dispatch(name: str) -> Callable[[F], F]:
    """Make the decorated function the public face of op `name`; the contract follows in the same module."""

    def decorate(function: F) -> F:
        bind_function(name, function)
        return function

    return decorate


def register(contract: Contract) -> Contract:
    """Make `contract` known and define its composite op `torch.ops.tilewright.<name>`."""
    raw = contract.forward
    returns = "Tensor" if raw.count == 1 else f"({', '.join(['Tensor'] * raw.count)})"
    LIBRARY.define(f'{contract.name}({raw.schema}, str backend="auto", str numerics="default") -> {returns}')

    arity, bound = len(raw.torch_op._schema.arguments) - 2, bind(contract)

    def composite(*values: Any, **options: str) -> Any:
        # torch drops trailing arguments that equal their defaults
        args, positional = values[:arity], dict(zip(("backend", "numerics"), values[arity:], strict=False))
        bound.check(*args)
        options = {"backend": "auto", "numerics": "default", **positional, **options}
        return _run(bound, args, options["backend"], options["numerics"])

    LIBRARY.impl(contract.name, composite, "CompositeImplicitAutograd")
    return bound


def call(
    contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor | replay.Targets | None = None
) -> Any:
    """Run the public op on its raw arguments.

    out: written and returned where given; of an op with several outputs a tuple, None for those to be allocated.
    """
    raw, (requested, numerics) = contract.forward, resolve(backend)
    targets = None if out is None else (out,) if raw.count == 1 else out
    if torch.compiler.is_compiling():
        return _traced(contract, args, requested, numerics, targets)  # type: ignore[arg-type]
    signature = replay.lookup(raw, args, requested, numerics, targets)  # type: ignore[arg-type]
    entry = None if signature is None else signature[0]
    if entry is None:
        return _first(contract, signature, args, requested, numerics, targets)  # type: ignore[arg-type]
    if signature[1][2] == replay.HOST:  # type: ignore[index]  # checks may read data there, and no key holds data
        args = as_declared(raw, args)
        with torch.no_grad():
            contract.check(*args)
    if targets is not None:
        results = replay.replay(raw, signature, args, targets)  # type: ignore[arg-type]
        if results is None:
            return _first(contract, signature, args, requested, numerics, targets)  # type: ignore[arg-type]
        return _written(targets, results)  # type: ignore[arg-type]
    if entry.plan.launch is None:  # torch's, and so is its gradient
        return raw.plain(*args, numerics=numerics)
    if torch.is_grad_enabled() and any_requires_grad(args):
        return _OpFunction.apply(contract, signature, requested, numerics, *args)
    return replay.replay(raw, signature, args)  # type: ignore[arg-type]


def call_in_place(contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor | None = None) -> Any:
    """`call` of an op that writes into its arguments: autograd learns that what it may have saved is overwritten."""
    result = call(contract, args, backend, out)
    if not torch.compiler.is_compiling():
        for i in contract.forward.mutated:
            if args[i] is not None:
                _count_write(args[i])
    return result


def _traced(
    contract: Contract, args: tuple[Any, ...], requested: str, numerics: str, targets: replay.Targets | None
) -> Any:
    """One op in the graph."""
    if targets is None:
        return getattr(torch.ops.tilewright, contract.name)(*args, requested, numerics)
    with torch.no_grad():  # `check_out` refuses what requires a gradient
        contract.check(*args)
    check_out(contract, args, targets)
    return _run_into(contract.forward, args, requested, numerics, targets)


def _run_into(raw: RawOp, args: tuple[Any, ...], requested: str, numerics: str, targets: replay.Targets) -> Any:
    """Through torch's dispatcher, into outputs of the caller."""
    outs = raw.complete(args, targets)
    raw.torch_out(*args, requested, numerics, **{f"out{i}": out for i, out in enumerate(outs)})  # type: ignore[misc]
    return outs[0] if len(outs) == 1 else outs


def _first(
    contract: Contract,
    signature: replay.Signature | None,
    args: tuple[Any, ...],
    requested: str,
    numerics: str,
    targets: replay.Targets | None,
) -> Any:
    """The first call with a signature, or one that may not be replayed: convert, check, then run."""
    raw = contract.forward
    args = as_declared(raw, args)
    if targets is None:
        contract.check(*args)
        return _run(contract, args, requested, numerics, signature)
    with torch.no_grad():
        contract.check(*args)
    check_out(contract, args, targets)
    if signature is None:
        return _written(targets, _run_into(raw, args, requested, numerics, targets))
    return _written(targets, replay.record(raw, signature, args, requested, numerics, targets))


def _written(targets: replay.Targets, results: Any) -> Any:
    """`results`, after autograd has learned that what it may have saved of `targets` is overwritten."""
    for out in targets:
        if out is not None:
            _count_write(out)
    return results


def _count_write(t: Tensor) -> None:
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def _run(
    contract: Contract, args: tuple[Any, ...], requested: str, numerics: str, signature: replay.Signature | None = None
) -> Any:
    """A checked call: the first of its signature, or one under tracing, transforms or the profiler."""
    raw, wants_grad = contract.forward, torch.is_grad_enabled() and any_requires_grad(args)
    plan = raw.plan(args, requested, numerics)
    if plan.launch is not None:
        reason = _only_reference(contract, plan.backend, requested, raw.device_of(args).type, wants_grad)
        if reason is not None:
            plan = replace(raw.plan(args, "torch", numerics), why=reason, requested=requested)
    if plan.launch is None:
        raw.note(args, plan)
        result = raw.plain(*args, numerics=numerics)
        if signature is not None:
            replay.keep(raw, signature, replay.Entry(plan, None, args[: raw.tensor_count], ()))
        return result
    if wants_grad:
        return _OpFunction.apply(contract, signature, requested, numerics, *args)
    return _launch(raw, signature, args, requested, numerics)


def _only_reference(contract: Contract, backend: str, requested: str, device_type: str, wants_grad: bool) -> str | None:
    """Why the reference runs although `backend` could, in words; None where `backend` runs."""
    if level_is_open():
        return f"a level of forward mode is open, which {backend} does not have"
    if wants_grad and replay.transforms() is not None:  # torch.func.grad differentiates its own gradients at any depth
        return f"a function transform wants a gradient, through which {backend} has none"
    if wants_grad and not _has_backward(contract, backend, requested, device_type):
        return f"a gradient is wanted, and {backend} has no backward kernel"
    return None


def _has_backward(contract: Contract, backend: str, requested: str, device_type: str) -> bool:
    """Is a kernel's forward worth its backward?  Where no backend has a backward kernel, the reference's own autograd
    is faster than a backward that computes the forward again; only `backend=` in the call insists on the kernel.
    """
    if contract.gradient is None:
        return False
    op = contract.gradient.op
    return op.compose is not None or requested == f"{backend}!" or op.has_kernels(device_type)


def _launch(
    raw: RawOp, signature: replay.Signature | None, args: tuple[Any, ...], requested: str, numerics: str
) -> Any:
    """One raw op: replayed, recorded, or through torch's dispatcher."""
    if signature is None or signature[0] is None:  # a backward gets the scalars of a call that was replayed unconverted
        args = as_declared(raw, args)
    if signature is None:
        with torch._C._AutoDispatchBelowAutograd():
            return raw.torch_op(*args, requested, numerics)
    if signature[0] is not None:
        return replay.replay(raw, signature, args)
    return replay.record(raw, signature, args, requested, numerics)


class _OpFunction(Function):
    """Autograd of every op: the contract says what to save and how to call the raw backward.

    Backend and numerics travel in ctx, because autograd's threads do not see the caller's context managers.
    """

    @staticmethod
    def forward(contract: Contract, signature: replay.Signature | None, backend: str, numerics: str, *args: Any) -> Any:
        return _launch(contract.forward, signature, args, backend, numerics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        contract, _, backend, numerics, *args = inputs
        plain = tuple([None if isinstance(a, Tensor) else a for a in args])
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.call = (contract, backend, numerics, plain)
        ctx.save_for_backward(*contract.gradient.save(args, outputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        contract, backend, numerics, plain = ctx.call
        gradient, needs = contract.gradient, ctx.needs_input_grad[4:]
        result: list[Any] = [None] * len(plain)
        if all(grad is None for grad in grads):
            return (None, None, None, None, *result)
        saved = ctx.saved_tensors  # once: checkpoints compute them anew for a second look
        if any(needs[i] for i in gradient.inputs):
            args = gradient.raw_args(grads, saved, plain, needs)
            results = _differentiate(gradient.op, args, backend, numerics)
            outputs = (results,) if gradient.op.count == 1 else tuple(results)
            for i, grad in zip(gradient.inputs, gradient.expand(outputs) if gradient.expand else outputs, strict=True):
                result[i] = grad if needs[i] else None
        if gradient.others is not None:
            others = gradient.others(grads, saved, plain, needs)
            for i, grad in zip(contract.forward.positions(tuple(others)), others.values(), strict=True):
                result[i] = grad
        return (None, None, None, None, *result)


def _differentiate(op: RawOp, args: tuple[Any, ...], backend: str, numerics: str) -> Any:
    """The raw backward; its reference, which is differentiable, where a graph of the gradient is wanted, or tangents
    go through it.
    """
    if torch.is_grad_enabled() or level_is_open():  # the former in a backward only for a graph of its own
        why = "the gradient is itself differentiated, which only the reference is"
        op.note(args, replace(op.plan(args, "torch", numerics), why=why, requested=backend))
        return op.plain(*args, numerics=numerics)
    return _launch(op, replay.lookup(op, args, backend, numerics), args, backend, numerics)
