"""Raw ops: `torch.ops.tilewright._<op>_fwd` and `_bwd`, opaque to torch, with a choice of implementations behind each.

Registered with `Library.define/impl` plus a fake; autograd stands outside (`dispatch.call`), so the Autograd key only
guards. Outputs are allocated here, as `outputs` declares: what the fake promises is what every implementation gets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch import replay
from tilewright.dispatch.arguments import converters, schema_of
from tilewright.dispatch.backends import missing
from tilewright.dispatch.bounded import Bounded
from tilewright.dispatch.derivatives import has_tangent
from tilewright.dispatch.preference import current_numerics
from tilewright.dispatch.preference import numerics as in_force
from tilewright.dispatch.recording import recordings
from tilewright.dispatch.registry import GENERATION, implementations, list_kernels
from tilewright.dispatch.select import Plan, choose, invariant
from tilewright.dispatch.tables import measured
from tilewright.errors import InputError, KernelMissingError

Strided = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
OutputSpec = tuple[Sequence[int], torch.dtype] | tuple[Sequence[int], torch.dtype, Sequence[int]]
"""(shape, dtype), contiguous, or (shape, dtype, strides)."""

LIBRARY = torch.library.Library("tilewright", "DEF")
_DEVICE_KEYS = ("CPU", "CUDA")
_ENTRY_BYTES, _PLAN_BYTES = 12 << 20, 4 << 20
"""Host memory of one direction of an op: 32 MiB for both."""


_TAKE_ARGUMENTS = {"outputs": 0, "reference": 0, "bucket": 0, "refuses_out": 1, "direct": 1, "compose": 2}
"""Functions of a raw op that take its arguments, and how many others before them."""


@dataclass(eq=False)
class RawOp:
    """One direction of one op.

    args          NamedTuple of the arguments, all tensors first, without `backend` and `numerics`; torch's schema is
                  inferred from its annotations.  The functions below take one as `args`.
    kernels       module names of its kernels below `package`.kernels, preferred ones first: "sm90.dense"
    outputs       (args) -> one `OutputSpec` an output
    reference     (args) -> Tensor or tuple: the same thing in plain torch
    bucket        (args) -> NamedTuple of ints: the sizes a choice may depend on; `bucket_names` are its fields
    batch_fields  fields of the bucket that `numerics("batch_invariant")` ignores; the first, by default
    dtypes        of the first tensor, that implementations take; the reference takes others too
    out           also register the overload `.out`, which writes into given tensors, one an output
    refuses_out   (out, args) -> None, or what an `out` of the right shape and dtype lacks; by default it must be
                  contiguous
    direct        (out, args) -> can implementations write this `out`?  Others get a copy of the result; all by default
    reference_writes  the reference takes `out=` too
    torch_first   (bucket, dtype, backend) -> is the reference a better guess than `backend`, the first that can run,
                  where nothing is measured?  Never, by default
    mutates       tensors among the arguments that the op writes into, such as a cache; arguments of the public function
                  have the same names.  Such an op may have no outputs: `count` is 0.
    compose       (run, outs, args) -> None, of an op that no backend implements, because it is made of others:
                  `run(op, out, *args)` has one of them written into `out`, a tuple where it has several outputs,
                  by the backend that its own sizes choose
    """

    op: str
    direction: str
    args: type[tuple[Any, ...]]
    _: KW_ONLY
    package: str
    outputs: Callable[..., tuple[OutputSpec, ...]]
    reference: Callable[..., Any]
    bucket: Callable[..., tuple[int, ...]]
    bucket_names: tuple[str, ...]
    kernels: Sequence[str] = ()
    batch_fields: Sequence[str] | None = None
    count: int = 1
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    out: bool = False
    refuses_out: Callable[..., str | None] | None = None
    direct: Callable[..., bool] | None = None
    reference_writes: bool = False
    torch_first: Callable[[Any, torch.dtype, str], bool] | None = None
    mutates: Sequence[str] = ()
    compose: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        """Register the op with torch; the functions take arguments one by one from here on, as torch passes them."""
        op, direction, args, count = self.op, self.direction, self.args, self.count
        self.key = op if direction == "fwd" else f"{op}_{direction}"
        schema = self.schema = schema_of(args, self.mutates)
        self.fields: tuple[str, ...] = args._fields  # type: ignore[attr-defined]
        self.pack: Callable[[Sequence[Any]], Any] = args._make  # type: ignore[attr-defined]
        for name, leading in _TAKE_ARGUMENTS.items():
            setattr(self, name, self._packed(getattr(self, name), leading))
        batch = self.bucket_names[:1] if self.batch_fields is None else self.batch_fields
        self.mutated = self.positions(self.mutates)
        self.batch_positions = tuple(self.bucket_names.index(field) for field in batch)
        if self.kernels:
            list_kernels(op, [f"{self.package}.kernels.{kernel}" for kernel in self.kernels])
        self.tensor_count = schema.count("Tensor")
        self.scalars = converters(schema)
        # Each with the generation it was made for
        self._plans: Bounded[tuple[Any, ...], tuple[int, Plan]] = Bounded(_PLAN_BYTES)
        self._has_kernels: dict[tuple[str, int], bool] = {}
        self.entries: Bounded[tuple[Any, ...], replay.Entry] = Bounded(_ENTRY_BYTES)
        name = f"_{op}_{direction}"
        returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        LIBRARY.define(f"{name}({schema}, str backend, str numerics) -> {returns}")
        self._register(name, self._run)
        torch.library.register_fake(f"tilewright::{name}", self._fake, lib=LIBRARY)
        self.torch_op = getattr(torch.ops.tilewright, name).default
        self.torch_out = None
        if self.out:
            outs = ", ".join(f"Tensor({chr(97 + i)}!) out{i}" for i in range(count))
            LIBRARY.define(f"{name}.out({schema}, str backend, str numerics, *, {outs}) -> ()")
            self._register(f"{name}.out", self._run)
            torch.library.register_fake(f"tilewright::{name}.out", self._fake, lib=LIBRARY)
            self.torch_out = getattr(torch.ops.tilewright, name).out

    def _packed(self, function: Any, leading: int = 0) -> Any:
        """`function`, whose argument `leading` is the NamedTuple, for arguments one by one, as torch passes them."""
        if function is None:
            return None
        end = leading + len(self.fields)

        def unpacked(*values: Any) -> Any:
            return function(*values[:leading], self.pack(values[leading:end]), *values[end:])

        return unpacked

    def _register(self, name: str, function: Callable[..., Any]) -> None:
        for key in _DEVICE_KEYS:
            LIBRARY.impl(name, function, key)
        LIBRARY.impl(name, _Guard(name), "Autograd")

    def positions(self, names: Sequence[str]) -> tuple[int, ...]:
        """Where these arguments stand."""
        return tuple(self.fields.index(name) for name in names)

    # What a call looks like to selection.

    def dtype_of(self, args: Sequence[Any]) -> torch.dtype:
        """The dtype a choice is made for: that of the first tensor."""
        return args[0].dtype

    def device_of(self, args: Sequence[Any]) -> torch.device:
        """The device of the call: that of the first tensor."""
        return args[0].device

    def is_empty(self, args: Sequence[Any]) -> bool:
        """Has the first tensor no elements?  Such a call is the reference's."""
        return not args[0].numel()

    def bucket_of(self, args: Sequence[Any], numerics: str) -> tuple[int, ...]:
        """The bucket of one call; under batch invariance, without its batch."""
        bucket = self.bucket(*args)
        return invariant(bucket, self.batch_positions) if numerics == "batch_invariant" else bucket

    def bucket_text(self, bucket: tuple[int, ...]) -> str:
        """`bucket` as tables write it: "M=8192,N=4096"."""
        return ",".join(f"{name}={value}" for name, value in zip(self.bucket_names, bucket, strict=True))

    def plan(self, args: Sequence[Any], backend: str, numerics: str) -> Plan:
        """The cached plan for this call."""
        key = self._plan_key(args, backend, numerics)
        generation, plan = self._plans.get(key, (-1, None))
        if plan is None or generation != GENERATION[0]:
            return self._first_plan(key, args, lambda: choose(self, args, backend, numerics))
        return plan

    def _first_plan(self, key: tuple[Any, ...], args: Sequence[Any], decide: Callable[[], Plan]) -> Plan:
        """Decide; where the settings say so, measure before.  A plan that is still to be measured is not kept."""
        device, (generation, plan) = self.device_of(args), self._decided(decide)
        if measured.is_due(self, plan, device):
            if measured.why_not_measured(args[: self.tensor_count], device) is not None:
                return replace(plan, provisional=True)
            measured.measure(self, plan, self.bucket_of(args, plan.numerics), self.dtype_of(args), device)
            generation, plan = self._decided(decide)
        self._plans.put(key, (generation, plan))
        return plan

    def _decided(self, decide: Callable[[], Plan]) -> tuple[int, Plan]:
        """A decision, and for which generation: another thread may register something meanwhile."""
        generation = GENERATION[0]
        return generation, decide()

    def _plan_key(self, args: Sequence[Any], backend: str, numerics: str) -> tuple[Any, ...]:
        # `args[0]`, not `device_of`; so in `launch`, `plain`, replay.py: they are in every call, a method costs 25 ns
        return backend, numerics, args[0].dtype, args[0].device, self.bucket(*args)

    def note(self, args: Sequence[Any], plan: Plan) -> Plan:
        """`plan` itself, of a call that is being made: recordings hear of it."""
        for recording in recordings():
            recording.add(self, tuple(args), plan.requested, plan.numerics, plan)
        return plan

    def has_kernels(self, device_type: str) -> bool:
        """Can anything but the reference run on such a device?"""
        key = device_type, GENERATION[0]
        if key not in self._has_kernels:
            backends = implementations(self.op, self.direction, device_type)
            self._has_kernels[key] = any(missing(name, device_type) is None for name in backends)
        return self._has_kernels[key]

    def forget_plans(self) -> None:
        """Decide again on the next call (tables or settings changed)."""
        self._plans.clear()
        self.entries.clear()

    # What a call does.

    def __call__(self, *args: Any) -> Any:
        """Run through torch's dispatcher; the last two arguments are backend and numerics."""
        return self.torch_op(*args)

    def _run(self, *args: Any, **outs: Tensor) -> Any:
        """The kernel that torch's dispatcher calls, of the op and of its overload `.out`."""
        *values, backend, numerics = args
        values = [a if i in self.mutated else _with_memory(a) for i, a in enumerate(values)]
        written = tuple(outs.values()) or None
        if written is not None:
            self.require_writable(values, written)
        results = self.launch(values, self.note(values, self.plan(values, backend, numerics)), written)
        if written is not None:
            return None
        return results[0] if self.count == 1 else results or None

    def launch(
        self,
        args: Sequence[Any],
        plan: Plan,
        outs: tuple[Tensor, ...] | None = None,
        without: Mapping[str, str] | None = None,
    ) -> tuple[Tensor, ...]:
        """Carry out `plan`, into `outs` where given, which are writable; returns the outputs.

        without: backends that have no kernel for this call, and why.
        """
        if outs is not None and not self.mutated and not any(out.numel() for out in outs):
            return outs
        if plan.launch is None or args[0].numel() == 0:
            return self._compute(args, plan.numerics, outs)
        results = self.allocate(args, args[0].device) if outs is None else outs
        if self.mutated or any(out.numel() for out in results):
            try:
                plan.launch(results, *args, config=plan.config)
            except KernelMissingError as error:
                without = {**(without or {}), plan.backend: str(error)}
                return self.launch(args, self._plan_without(args, plan, without), outs, without)
        return results

    def _compute(self, args: Sequence[Any], numerics: str, outs: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The reference's results, in memory of their own or in `outs`."""
        if outs is None:
            specs = [_strided(spec) for spec in self.outputs(*args)]
            return self.owned_reference(args, specs, {a.data_ptr() for a in args if isinstance(a, Tensor)}, numerics)
        if self.reference_writes:
            self.plain(*args, *outs, numerics=numerics)
            return outs
        results = self.plain(*args, numerics=numerics)
        for out, value in zip(outs, self._each(results), strict=True):
            out.copy_(value)
        return outs

    def _plan_without(self, args: Sequence[Any], plan: Plan, without: Mapping[str, str]) -> Plan:
        """Another plan, from now on: kernels of `without` are in no cache and cannot be compiled here."""
        key = self._plan_key(args, plan.requested, plan.numerics)
        decision = self._decided(lambda: choose(self, args, plan.requested, plan.numerics, without))
        self._plans.put(key, decision)
        return decision[1]

    def require_writable(self, args: Sequence[Any], outs: Sequence[Tensor]) -> None:
        """Raise InputError for outputs in whose strides no implementation writes."""
        for out in outs if self.refuses_out is not None else ():
            lacking = self.refuses_out(out, *args)  # type: ignore[misc]
            if lacking is not None:
                raise InputError(f"{self.op}(out=...) has strides {out.stride()}; needs {lacking}.")

    def write(self, out: Tensor | tuple[Tensor, ...], args: Sequence[Any], backend: str, numerics: str) -> None:
        """Compute the outputs into `out` without torch's dispatcher: how a composed op runs its parts."""
        outs = out if isinstance(out, tuple) else (out,)
        signature = replay.lookup(self, args, backend, numerics, outs)
        if signature is None:
            run = self._fake if is_fake(outs[0]) else self._run
            run(*args, backend, numerics, **{f"out{i}": each for i, each in enumerate(outs)})
        elif signature[0] is None or replay.replay(self, signature, args, outs) is None:
            replay.record(self, signature, args, backend, numerics, outs)

    def allocate(self, args: Sequence[Any], device: torch.device | str) -> tuple[Tensor, ...]:
        """Uninitialised outputs of one call, with the shapes, dtypes and strides every implementation writes into."""
        return tuple([_empty(spec, device) for spec in self.outputs(*args)])

    def complete(self, args: Sequence[Any], targets: replay.Targets) -> tuple[Tensor, ...]:
        """`targets`, outputs of the caller, with new tensors where it has None."""
        device = self.device_of(args)
        return tuple(
            [
                _empty(spec, device) if out is None else out
                for out, spec in zip(targets, self.outputs(*args), strict=True)
            ]
        )

    def plain(self, *args: Any, numerics: str = "default") -> Any:
        """The reference, in the dtypes of its arguments: autocast is no part of an op's numerics.

        numerics: the reference sees them as `current_numerics`, on autograd's threads too.
        """
        if numerics != current_numerics():
            with in_force(numerics):
                return self.plain(*args, numerics=numerics)
        device = args[0].device.type
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return self.reference(*args)
        with torch.autocast(device, enabled=False):
            return self.reference(*args)

    def owned_reference(
        self, args: Sequence[Any], specs: Sequence[Strided], inputs: set[int], numerics: str
    ) -> tuple[Tensor, ...]:
        """The reference's results with the strides of `specs`, none of them at one of the addresses `inputs`."""
        results = self.plain(*args, numerics=numerics)
        owned = []
        for value, spec in zip(self._each(results), specs, strict=True):
            # A custom op may not return a view of its input, and the fake promised these strides.
            fits = value.stride() == spec[2] and value.data_ptr() not in inputs
            owned.append(value if fits else _empty(spec, value.device).copy_(value))
        return tuple(owned)

    def _fake(self, *args: Any, **outs: Tensor) -> Any:
        """Shapes, dtypes and strides of the outputs, of the op and of its overload `.out`; notes the plan."""
        *values, backend, numerics = args
        results = tuple(outs.values()) or self.allocate(values, self.device_of(values))
        if recordings():
            plan = self.note(values, self.plan(values, backend, numerics))
            if self.compose is not None and plan.launch is not None:
                plan.launch(results, *values, config=plan.config)  # its parts are noted too
        if outs:
            return None
        return results[0] if self.count == 1 else results or None

    def _each(self, results: Any) -> tuple[Tensor, ...]:
        """The tensors that the reference has returned."""
        return (results,) if self.count == 1 else results or ()


def _with_memory(a: Any) -> Any:
    """`a`, or its dense copy if every stride is 0: torch's dispatcher makes such a tensor of zeros without memory,
    which had the strides of a dense one when the call was checked.
    """
    if isinstance(a, Tensor) and a.layout is torch.strided and a.dim() and not any(a.stride()):
        return a.clone(memory_format=torch.contiguous_format)
    return a


def _strided(spec: OutputSpec) -> Strided:
    shape, dtype = spec[:2]
    return tuple(shape), dtype, _empty(spec, "meta").stride()


def _empty(spec: OutputSpec, device: torch.device | str) -> Tensor:
    if len(spec) == 3:
        shape, dtype, strides = spec
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return torch.empty(spec[0], dtype=spec[1], device=device)


class _Guard:
    """The Autograd key of a raw op: passes through, and refuses to lose a gradient silently."""

    def __init__(self, name: str) -> None:
        base, _, overload = name.partition(".")
        self.name, self.base, self.overload = name, base, overload or "default"

    def __call__(self, *args: Any, **outs: Any) -> Any:
        values = (*args, *outs.values())
        if has_tangent(*values):
            raise InputError(
                f"tilewright::{self.name} is a raw op without forward mode, and an input has a tangent. "
                "Call the public function in tilewright.ops."
            )
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in values):
            raise InputError(
                f"tilewright::{self.name} is a raw op without a gradient, and an input requires one. "
                "Call the public function in tilewright.ops, or use torch.no_grad()."
            )
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(torch.ops.tilewright, self.base), self.overload)(*args, **outs)
