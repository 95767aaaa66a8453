"""The way of one public call: check, resolve the wish into plain arguments, then run; autograd stands outside the raw op.

Eager calls go straight to the raw op, or through one `autograd.Function` when something needs a gradient.  Under
`torch.compile` the call is one op in the graph, `torch.ops.tilewright.<op>`, which AOTAutograd opens up: then ordinary Python
selects, and either the raw op goes into the graph or, where torch is chosen, the reference itself for Inductor to fuse.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.dispatch import fast
from tilewright.dispatch.contract import Contract, bind, bind_function
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.raw import LIBRARY, RawOp
from tilewright.errors import InputError

transforms_active = torch._C._are_functorch_transforms_active
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

    arity = len(raw.torch_op._schema.arguments) - 2

    def composite(*args: Any, **wish: str) -> Any:
        # torch drops trailing arguments that equal their defaults
        backend, numerics = (*args[arity:], *("auto", "default")[len(args) - arity :])
        plain = args[:arity]
        contract.check(*plain)
        return _run(contract, plain, wish.get("backend", backend), wish.get("numerics", numerics))

    LIBRARY.impl(contract.name, composite, "CompositeImplicitAutograd")
    return bind(contract)


def call(contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor | None = None) -> Any:
    """Run the public op on its raw arguments.  `out` is written and returned where given."""
    if out is not None:
        return _call_out(contract, args, backend, out)
    if torch.compiler.is_compiling():
        return getattr(torch.ops.tilewright, contract.name)(*args, *resolve(backend))
    wish, numerics = resolve(backend)
    if torch.is_grad_enabled() and _any_requires_grad(args):
        contract.check(*args)
        return _run(contract, args, wish, numerics)
    return _forward(contract, args, wish, numerics)


def _forward(contract: Contract, args: tuple[Any, ...], wish: str, numerics: str, checked: bool = False) -> Any:
    """The forward without autograd: taped where the fast road is open, through torch's dispatcher elsewhere."""
    raw = contract.forward
    found = fast.signature(raw, args, wish, numerics)
    if found is not None:
        key, pointers = found
        outs = fast.replay(raw, key, pointers, args[0])
        if outs is None:
            if not checked:
                contract.check(*args)
            outs = fast.run_and_tape(raw, key, args, wish, numerics)
        return outs[0] if raw.count == 1 else outs
    if not checked:
        contract.check(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return raw.torch_op(*args, wish, numerics)


def _call_out(contract: Contract, args: tuple[Any, ...], backend: str | None, out: Tensor) -> Tensor:
    contract.check(*args)
    _check_out(contract, args, out)
    contract.forward.torch_out(*args, *resolve(backend), out0=out)  # type: ignore[misc]
    return out


def _run(contract: Contract, args: Sequence[Any], backend: str, numerics: str) -> Any:
    plan = contract.forward.plan(args, backend, numerics)
    if plan.launch is None:
        return contract.forward.reference(*args)
    if contract.gradient is not None and torch.is_grad_enabled() and _any_requires_grad(args):
        # `Function.apply` binds arguments by inspection (20 us) for functorch's sake; without transforms its base does the same
        apply = _OpFunction.apply if transforms_active() else _OpFunction.apply_plain
        return apply(contract, backend, numerics, *args)
    return _forward(contract, tuple(args), backend, numerics, checked=True)


def _any_requires_grad(args: Sequence[Any]) -> bool:
    for a in args:
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def _check_out(contract: Contract, args: Sequence[Any], out: Tensor) -> None:
    name = contract.name
    if torch.is_grad_enabled() and (_any_requires_grad(args) or out.requires_grad):
        raise InputError(f"{name}(out=...) has no gradient, and an argument requires one. Drop out=, or use torch.no_grad().")
    if contract.forward.torch_out is None:
        raise InputError(f"{name} has {contract.forward.count} outputs and takes no out=.")
    ((shape, dtype),) = contract.forward.outputs(*args)
    if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != args[0].device or not out.is_contiguous():
        raise InputError(
            f"{name}(out=...) got {tuple(out.shape)} {out.dtype} on {out.device}, strides {tuple(out.stride())}; "
            f"needs contiguous {tuple(shape)} {dtype} on {args[0].device}."
        )
    if not torch.compiler.is_compiling() and any(_overlap(out, a) for a in args if isinstance(a, Tensor)):
        raise InputError(f"{name}(out=...) shares memory with an input, which the kernel still reads. Give it its own memory.")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Do the address ranges of two strided tensors meet?"""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = _extent(a), _extent(b)
    return a0 < b1 and b0 < a1


def _extent(t: Tensor) -> tuple[int, int]:
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    return t.data_ptr(), t.data_ptr() + span * t.element_size()


def _backward(raw: RawOp, args: tuple[Any, ...], wish: str, numerics: str) -> tuple[Tensor, ...]:
    """One raw backward, by the same two roads as the forward."""
    found = fast.signature(raw, args, wish, numerics)
    if found is None:
        made = raw(*args, wish, numerics)
        return (made,) if raw.count == 1 else tuple(made)
    key, pointers = found
    outs = fast.replay(raw, key, pointers, args[0])
    return fast.run_and_tape(raw, key, args, wish, numerics) if outs is None else outs


class _OpFunction(torch.autograd.Function):
    """Autograd of every op: the contract says what to save and how to call the raw backward.

    Backend and numerics travel in ctx, because autograd's threads do not see the caller's context managers.
    """

    @classmethod
    def apply_plain(cls, *args: Any) -> Any:
        """`apply` where no functorch transform is active."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def forward(contract: Contract, backend: str, numerics: str, *args: Any) -> Any:
        return _forward(contract, args, backend, numerics, checked=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        contract, ctx.backend, ctx.numerics, *args = inputs
        ctx.set_materialize_grads(False)
        ctx.contract = contract
        ctx.args = tuple(None if isinstance(a, Tensor) else a for a in args)
        ctx.save_for_backward(*contract.gradient.save(args, output if isinstance(output, tuple) else (output,)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        contract: Contract = ctx.contract
        gradient = contract.gradient
        assert gradient is not None
        needs = ctx.needs_input_grad[3:]
        raw = gradient.raw_args(grads, ctx.saved_tensors, ctx.args, needs)
        outputs = _backward(gradient.op, raw, ctx.backend, ctx.numerics)
        result: list[Any] = [None] * len(ctx.args)
        for i, grad in zip(gradient.inputs, gradient.expand(outputs) if gradient.expand else outputs, strict=True):
            result[i] = grad if needs[i] else None
        return (None, None, None, *result)
