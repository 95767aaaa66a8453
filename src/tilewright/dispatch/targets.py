"""Outputs that the caller gives, `out=`: which of them a call may write into."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch.arguments import refuse_layout
from tilewright.dispatch.contract import Contract
from tilewright.dispatch.derivatives import has_tangent
from tilewright.dispatch.raw import OutputSpec
from tilewright.dispatch.replay import Targets, span
from tilewright.errors import InputError


def check_out(contract: Contract, args: Sequence[Any], targets: Targets) -> None:
    """Raise InputError unless each tensor of `targets` is one that its output can be written into."""
    raw = contract.forward
    if raw.torch_out is None:
        raise InputError(f"{contract.name} has {raw.count} outputs and takes no out=.")
    specs = raw.outputs(*args)
    if len(targets) != len(specs):
        raise InputError(f"{contract.name}: out is not a tuple with a tensor for each that the call returns.")
    for i, (out, spec) in enumerate(zip(targets, specs, strict=True)):
        if out is not None:
            _check_one(contract, args, out, spec, "out" if len(specs) == 1 else f"out[{i}]")
    outs = [out for out in targets if out is not None]
    if _has_address(outs[0]) and any(_overlap(a, b) for i, a in enumerate(outs) for b in outs[:i]):
        raise InputError(f"{contract.name}(out=...) got outputs that share memory. Give each its own.")


def several(out: Any, parts: int, total: int, view: Callable[[Any], Any] = lambda t: t) -> Targets | None:
    """`out=` of a public function as `call` takes it: of an op of `total` outputs, of which the caller gets `parts`.

    out: None, or what the function returns: a tensor where `parts` is 1, else a tuple of as many.  What is neither has
    another length then, which `check_out` refuses after the other arguments.   view: how the raw op sees a tensor.
    """
    if out is None:
        return None
    outs = (out,) if parts == 1 else tuple(out) if isinstance(out, tuple | list) else ()
    if len(outs) != parts or any(t is None for t in outs):
        return ()
    return (*map(view, outs), *[None] * (total - parts))


def any_requires_grad(args: Sequence[Any]) -> bool:
    """Does one of these need a gradient?"""
    for a in args:
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def _check_one(contract: Contract, args: Sequence[Any], out: Any, spec: OutputSpec, argument: str) -> None:
    name = contract.name
    if not isinstance(out, Tensor):
        raise InputError(f"{name}: {argument} is a {type(out).__name__}; needs a torch.Tensor.")
    refuse_layout(name, out=out)
    if torch.is_grad_enabled() and (any_requires_grad(args) or out.requires_grad):
        raise InputError(
            f"{name}(out=...) has no gradient, and an argument requires one. Drop out=, or use torch.no_grad()."
        )
    if not torch.compiler.is_compiling() and out.is_neg():  # which Dynamo cannot trace
        raise InputError(
            f"{name}(out=...) got a tensor with the negative bit. Write elsewhere, or to out.resolve_neg()."
        )
    if has_tangent(*args, out):
        raise InputError(f"{name}(out=...) has no forward mode, and an argument has a tangent. Drop out=.")
    (shape, dtype, *_), device = spec, contract.forward.device_of(args)
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
    if not _has_address(out):
        return
    read = [a for i, a in enumerate(args) if isinstance(a, Tensor) and not (i in contract.in_place and _same(out, a))]
    if any(_overlap(out, a) for a in read):
        raise InputError(
            f"{name}(out=...) shares memory with an input, which the kernel still reads. Give it its own memory."
        )


def _has_address(t: Tensor) -> bool:
    """False while tracing, and for tensors without data."""
    return not (torch.compiler.is_compiling() or t.is_meta or is_fake(t))


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
    return t.data_ptr(), t.data_ptr() + span(t)
