"""The contract: everything a public op promises, as data.

`validate`, `bench`, the documentation and the command line read contracts and know no op by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tilewright.dispatch.arguments import refuse_layout
from tilewright.dispatch.derivatives import has_tangent
from tilewright.dispatch.raw import RawOp
from tilewright.errors import InputError

Direction = Literal["fwd", "bwd"]
_Others = Callable[[tuple[Any, ...], tuple[Any, ...], Any, Any], Mapping[Any, Tensor]]


@dataclass(frozen=True)
class Sample:
    """Arguments of one call of the public function."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """A named problem: `params` are the sizes (`M`, `N`, ...) and options that `Contract.inputs` understands.

    into: the keyword argument that the bench also gives as `out`, for what is added to in place.
    """

    name: str
    params: Mapping[str, Any]
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    into: str | None = None


@dataclass(frozen=True)
class BadInput:
    """A call that must raise `error` with `match` in its text before anything is launched or written."""

    name: str
    make: Callable[[torch.device], Sample]
    match: str
    error: type[Exception] = InputError


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and the fewest bytes that must pass through device memory."""

    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Promises:
    """Bitwise promises of every implementation: the same call repeated; a row alone against the row in a batch; its
    outputs against the reference's on the same device, which few can promise: casts, whose steps have one right result.
    """

    deterministic: bool = True
    batch_invariant: bool = True
    reference_bits: bool = False


@dataclass(frozen=True)
class Gradient:
    """How the raw backward op is fed.

    save        (args, outputs) -> the tensors that the backward needs.
    raw_args    (grads, saved, args, needs) -> arguments of the raw backward op.  `args` has None for tensors; `needs`,
                with the fields of `args`, says which want a gradient; the gradient of an unused output is None.
    inputs      names of the arguments whose gradients the raw op returns, in its order.
    expand      outputs -> gradients, where one output is the gradient of two arguments.
    others      (grads, saved, args, needs) -> by name, gradients of further arguments, which plain torch computes.
    covers      (args) -> False for arguments without a gradient as one op: the public function splits such a call.
    recomputes  Does the reference of the backward run the forward again?  Then torch does not serve a forward of ours.
    """

    op: RawOp
    inputs: tuple[Any, ...]
    save: Callable[[Any, tuple[Tensor, ...]], tuple[Tensor | None, ...]]
    raw_args: Callable[[tuple[Any, ...], tuple[Any, ...], Any, Any], tuple[Any, ...]]
    expand: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
    others: _Others | None = None
    covers: Callable[[Any], bool] = lambda args: True
    recomputes: bool = True


@dataclass(frozen=True)
class Contract:
    """One public op.

    reference   the op in plain torch with the public function's arguments (without `out`, `backend`).  On float64
                inputs it is the oracle; on low-precision inputs it fixes the rounding points.
    check       (args) raises InputError for raw forward arguments that cannot run; called before any launch.
    inputs      (params, dtype, device, seed) -> Sample, with fresh random tensors.
    cost        (sample, direction) -> Cost.
    workloads   what the bench measures on a GPU; `cpu_workloads` on a CPU; `edge_cases` are for `validate.check`.
    edge_grid   values of params that the grid of edge sizes (`validate.edge_grid`) cannot know: some, or a function of
                the other params that returns them; None leaves a param out.
    tolerance   times torch's error that an output may have; `gradient_tolerance` a gradient, but those of the inputs in
                `other_gradients`, which have their own.
    batch_dim   dimension of `args[0]` along which rows are independent; None where there is none.
    in_place    names of raw arguments that `out` may be: an element is read before it is written, by one thread.
    """

    name: str
    family: str
    summary: str
    reference: Callable[..., Any]
    forward: RawOp
    check: Callable[..., None]
    inputs: Callable[[Mapping[str, Any], torch.dtype, torch.device, int], Sample]
    cost: Callable[[Sample, Direction], Cost]
    workloads: tuple[Workload, ...]
    cpu_workloads: tuple[Workload, ...]
    edge_cases: tuple[Workload, ...]
    bad_inputs: tuple[BadInput, ...]
    gradient: Gradient | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    batch_dim: int | None = 0
    in_place: tuple[Any, ...] = ()
    promises: Promises = Promises()
    tolerance: float = 2.0
    gradient_tolerance: float = 3.0
    other_gradients: Mapping[str, float] = field(default_factory=dict)
    edge_grid: Mapping[str, Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]] = field(default_factory=dict)

    def tolerance_of(self, name: str) -> float:
        """Times torch's error that the gradient of this input may have."""
        return self.other_gradients.get(name, self.gradient_tolerance)

    @property
    def widest_gradient_tolerance(self) -> float:
        """The largest of them: for gradients that are judged together."""
        return max(self.gradient_tolerance, *self.other_gradients.values(), 0.0)

    @property
    def function(self) -> Callable[..., Any]:
        """The public function bound by `@dispatch(name)`."""
        return _functions[self.name]

    @property
    def raw_ops(self) -> tuple[RawOp, ...]:
        """The raw ops that backends implement: forward and backward where they are not composed of other ops."""
        ops = (self.forward,) if self.gradient is None else (self.forward, self.gradient.op)
        return tuple(op for op in ops if op.compose is None)


_contracts: dict[str, Contract] = {}
_functions: dict[str, Callable[..., Any]] = {}


def bind(contract: Contract) -> Contract:
    """Make `contract` known; its checks begin with layouts.  Its public function must be decorated with
    `@dispatch(contract.name)`.
    """
    check, forward, gradient = contract.check, contract.forward, contract.gradient

    def checked(*args: Any) -> None:
        refuse_layout(contract.name, **dict(zip(forward.fields, args, strict=True)))
        if forward.mutated:
            _check_mutated(contract.name, forward, args)
        check(forward.pack(args))

    if gradient is not None:
        gradient = _packed(gradient, forward)
    bound = replace(contract, check=checked, gradient=gradient, in_place=forward.positions(contract.in_place))
    _contracts[contract.name] = bound
    return bound


def _check_mutated(name: str, forward: RawOp, args: tuple[Any, ...]) -> None:
    """Refuse derivatives in an op that writes into its arguments, and elements that share memory."""
    for field_name, value in zip(forward.fields, args, strict=True):
        if isinstance(value, Tensor) and torch.is_grad_enabled() and value.requires_grad:
            raise InputError(
                f"{name} writes into its arguments and has no gradient, and {field_name} requires one. "
                "Detach it, or use torch.no_grad()."
            )
        if has_tangent(value):
            raise InputError(f"{name} has no forward mode, and {field_name} has a tangent. Call it on the primal.")
    for i in forward.mutated:
        if isinstance(args[i], Tensor) and not torch.compiler.is_compiling() and args[i].is_neg():
            raise InputError(
                f"{name}: {forward.fields[i]} has the negative bit and would be written to. Resolve it first."
            )
        if isinstance(args[i], Tensor) and 0 in (
            s for n, s in zip(args[i].shape, args[i].stride(), strict=True) if n > 1
        ):
            raise InputError(
                f"{name}: {forward.fields[i]} is expanded, strides {args[i].stride()}, and would be written to. "
                "Pass a tensor with memory for every element."
            )


def _packed(gradient: Gradient, forward: RawOp) -> Gradient:
    """`gradient` for callers that have the arguments as a sequence: its functions get `forward`'s NamedTuple."""
    pack, raw_args, others = forward.pack, gradient.raw_args, gradient.others
    return replace(
        gradient,
        inputs=forward.positions(gradient.inputs),
        save=lambda args, outputs: gradient.save(pack(args), outputs),
        raw_args=lambda grads, saved, args, needs: raw_args(grads, saved, pack(args), pack(needs)),
        covers=lambda args: gradient.covers(pack(args)),
        others=others and (lambda grads, saved, args, needs: others(grads, saved, pack(args), pack(needs))),
    )


def bind_function(name: str, function: Callable[..., Any]) -> None:
    """Make `function` the public face of op `name`."""
    _functions[name] = function


def contracts() -> dict[str, Contract]:
    """Contracts of the imported ops, in alphabetical order; `tilewright.dispatch.contracts` imports all ops first."""
    return dict(sorted(_contracts.items()))


def contract(name: str) -> Contract:
    """The contract of one op.  Raises InputError naming the ops that exist."""
    if name not in _contracts:
        raise InputError(f"no op named {name!r}. Ops: {', '.join(sorted(_contracts)) or 'none imported'}.")
    return _contracts[name]
