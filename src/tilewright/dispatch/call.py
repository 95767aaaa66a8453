"""One public call: resolve the backend, replay, or check and run; autograd stands outside the raw op.

Eager calls go straight to the raw op, or through one `autograd.Function` when something needs a gradient.  Under
`torch.compile` the call is one op in the graph, `torch.ops.tilewright.<op>`, which AOTAutograd opens up: then ordinary
Python selects, and either the raw op goes into the graph or, where torch is chosen, the reference itself for Inductor
to fuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch import replay
from tilewright.dispatch.arguments import as_declared, refuse_layout
from tilewright.dispatch.contract import Contract, bind, bind_function
from tilewright.dispatch.derivatives import Function, has_tangent, level_is_open
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.raw import LIBRARY, RawOp
from tilewright.errors import InputError

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


def call(contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor | None = None) -> Any:
    """Run the public op on its raw arguments.  `out` is written and returned where given."""
    raw, (requested, numerics) = contract.forward, resolve(backend)
    if torch.compiler.is_compiling():
        return _traced(contract, args, requested, numerics, out)
    signature = replay.lookup(raw, args, requested, numerics, out)
    entry = None if signature is None else signature[0]
    if entry is None:
        return _first(contract, signature, args, requested, numerics, out)
    if signature[1][2] == replay.HOST:  # type: ignore[index]  # checks may read data there, and no key holds data
        args = as_declared(raw, args)
        with torch.no_grad():
            contract.check(*args)
    if out is not None:
        if replay.replay(raw, signature, args, out) is None:  # type: ignore[arg-type]
            return _first(contract, signature, args, requested, numerics, out)
        return _written(out)
    if entry.plan.launch is None:  # torch's, and so is its gradient
        return raw.plain(*args, numerics=numerics)
    if torch.is_grad_enabled() and _any_requires_grad(args):
        return _OpFunction.apply(contract, signature, requested, numerics, *args)
    return replay.replay(raw, signature, args)  # type: ignore[arg-type]


def call_in_place(contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor | None = None) -> Any:
    """`call` of an op that writes into its arguments: autograd learns that what it may have saved is overwritten."""
    result = call(contract, args, backend, out)
    if not torch.compiler.is_compiling():
        for i in contract.forward.mutated:
            if args[i] is not None:
                _written(args[i])
    return result


def _traced(contract: Contract, args: tuple[Any, ...], requested: str, numerics: str, out: Tensor | None) -> Any:
    """One op in the graph."""
    if out is None:
        return getattr(torch.ops.tilewright, contract.name)(*args, requested, numerics)
    with torch.no_grad():  # `_check_out` refuses what requires a gradient
        contract.check(*args)
    _check_out(contract, args, out)
    contract.forward.torch_out(*args, requested, numerics, out0=out)  # type: ignore[misc]
    return out


def _first(
    contract: Contract,
    signature: replay.Signature | None,
    args: tuple[Any, ...],
    requested: str,
    numerics: str,
    out: Tensor | None,
) -> Any:
    """The first call with a signature, or one that may not be replayed: convert, check, then run."""
    raw = contract.forward
    args = as_declared(raw, args)
    if out is None:
        contract.check(*args)
        return _run(contract, args, requested, numerics, signature)
    with torch.no_grad():
        contract.check(*args)
    _check_out(contract, args, out)
    if signature is None:
        raw.torch_out(*args, requested, numerics, out0=out)  # type: ignore[misc]
    else:
        replay.record(raw, signature, args, requested, numerics, out)
    return _written(out)


def _written(out: Tensor) -> Tensor:
    """`out`, after autograd has learned that what it may have saved is overwritten."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def _run(
    contract: Contract, args: tuple[Any, ...], requested: str, numerics: str, signature: replay.Signature | None = None
) -> Any:
    """A checked call: the first of its signature, or one under tracing, transforms or the profiler."""
    raw, wants_grad = contract.forward, torch.is_grad_enabled() and _any_requires_grad(args)
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


def _any_requires_grad(args: Sequence[Any]) -> bool:
    for a in args:
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def _check_out(contract: Contract, args: Sequence[Any], out: Tensor) -> None:
    name = contract.name
    if not isinstance(out, Tensor):
        raise InputError(f"{name}: out is a {type(out).__name__}; needs a torch.Tensor.")
    refuse_layout(name, out=out)
    if torch.is_grad_enabled() and (_any_requires_grad(args) or out.requires_grad):
        raise InputError(
            f"{name}(out=...) has no gradient, and an argument requires one. Drop out=, or use torch.no_grad()."
        )
    if not torch.compiler.is_compiling() and out.is_neg():  # which Dynamo cannot trace
        raise InputError(
            f"{name}(out=...) got a tensor with the negative bit. Write elsewhere, or to out.resolve_neg()."
        )
    if has_tangent(*args, out):
        raise InputError(f"{name}(out=...) has no forward mode, and an argument has a tangent. Drop out=.")
    if contract.forward.torch_out is None:
        raise InputError(f"{name} has {contract.forward.count} outputs and takes no out=.")
    ((shape, dtype, *_),), device = contract.forward.outputs(*args), contract.forward.device_of(args)
    dense = contract.forward.refuses_out is None
    if (
        tuple(out.shape) != tuple(shape)
        or out.dtype != dtype
        or out.device != device
        or (dense and not out.is_contiguous())
    ):
        raise InputError(
            f"{name}(out=...) got {tuple(out.shape)} {out.dtype} on {out.device}, strides {tuple(out.stride())}; "
            f"needs {'contiguous ' if dense else ''}{tuple(shape)} {dtype} on {device}."
        )
    if torch.compiler.is_compiling() or out.is_meta or is_fake(out):  # the rest concerns addresses, which are unknown
        return
    read = [a for i, a in enumerate(args) if isinstance(a, Tensor) and not (i in contract.in_place and _same(out, a))]
    if any(_overlap(out, a) for a in read):
        raise InputError(
            f"{name}(out=...) shares memory with an input, which the kernel still reads. Give it its own memory."
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Are these the same elements in memory?"""
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Do the address ranges of two strided tensors meet?"""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(t: Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.data_ptr() + replay.span(t)


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
