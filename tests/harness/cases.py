"""Raw calls of any op, made from its contract alone, on tensors without memory."""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Contract, Implementation, RawOp, contracts, implementations
from tilewright.dispatch.recording import first_call

SIZES = tuple(1 << k for k in range(21))
ODD_SIZES = (1, 8, 64, 128, 4096, *((1 << k) + 1 for k in range(9, 18)))
"""Sizes at which rows begin at any element, beside batches for them: for what none of the others selects."""


class RawCall(NamedTuple):
    """One raw op with meta tensors for arguments; `purpose` says which workload it comes from."""

    purpose: str
    op: RawOp
    args: tuple[Any, ...]

    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors such as the raw op hands to an implementation."""
        return self.op.allocate(self.args, "meta")


def triton_implementations() -> Iterator[tuple[Contract, RawOp, Implementation]]:
    """Every forward and backward with a Triton implementation."""
    for contract in contracts().values():
        for op in contract.raw_ops:
            implementation = implementations(op.op, op.direction).get("triton")
            if implementation is not None:
                yield contract, op, implementation


def raw_call(contract: Contract, op: RawOp, purpose: str, params: Mapping[str, Any], dtype: torch.dtype) -> RawCall:
    """What `op`, forward or backward, is given when the public function is called with `params`."""
    with FakeTensorMode():
        sample = contract.inputs(params, dtype, torch.device("cpu"), 0)
    args, kwargs = tree_map(_without_memory, (sample.args, dict(sample.kwargs)))
    with torch.no_grad():
        _, raw_args, _, _ = first_call(contract.function, *args, **kwargs)
    if op is contract.forward:
        return RawCall(purpose, op, raw_args)
    gradient = contract.gradient
    assert gradient is not None
    outputs = contract.forward.allocate(raw_args, "meta")  # all of them; the public function may keep some for itself
    plain = tuple(None if isinstance(a, Tensor) else a for a in raw_args)
    needs = tuple(isinstance(a, Tensor) for a in raw_args)
    grads = tuple(torch.empty_like(out) for out in outputs)
    return RawCall(purpose, op, gradient.raw_args(grads, gradient.save(raw_args, outputs), plain, needs))


def declared_calls(contract: Contract, op: RawOp, dtype: torch.dtype) -> tuple[RawCall, ...]:
    """Calls of every workload and edge case that launch something; made once for all targets."""
    return _declared_calls(contract.name, op.direction, dtype)


@cache
def _declared_calls(name: str, direction: str, dtype: torch.dtype) -> tuple[RawCall, ...]:
    contract = contracts()[name]
    (op,) = [op for op in contract.raw_ops if op.direction == direction]
    workloads = (*contract.workloads, *contract.cpu_workloads, *contract.edge_cases)
    calls = (raw_call(contract, op, w.name, w.params, dtype) for w in workloads)
    return tuple(call for call in calls if call.args[0].numel())


def call_that_selects(contract: Contract, op: RawOp, config: Any, implementation: Implementation) -> RawCall:
    """A call for which `implementation` chooses `config`: a workload with up to two of its sizes replaced.

    The search walks over buckets, which is cheap, and makes a call only of those that select `config`.  What it found
    is kept for all targets.
    """
    return _call_that_selects(contract.name, op.direction, config, implementation)


@cache
def _call_that_selects(name: str, direction: str, config: Any, implementation: Implementation) -> RawCall:
    assert implementation.configure is not None
    contract = contracts()[name]
    (op,) = [op for op in contract.raw_ops if op.direction == direction]
    workloads = {w.name: w for w in (*contract.workloads, *contract.cpu_workloads, *contract.edge_cases)}
    tried = set()
    for among, dtype in product((SIZES, ODD_SIZES), contract.dtypes):
        for declared in declared_calls(contract, op, dtype):
            if implementation.configure(op.bucket(*declared.args), dtype) == config:
                return declared
            params = workloads[declared.purpose].params
            bucket = op.bucket(*declared.args)
            for places in combinations(range(len(bucket)), 2):
                sizes = _selected(bucket, places, dtype, implementation, among).get(config)
                if sizes is None:
                    continue
                for names in permutations([n for n, size in params.items() if type(size) is int], 2):
                    changed = dict(zip(names, sizes, strict=True))
                    problem = dtype, declared.purpose, tuple(sorted(changed.items()))
                    if problem in tried:  # of other places in the bucket
                        continue
                    tried.add(problem)
                    try:
                        call = raw_call(contract, op, f"{declared.purpose}, {changed}", {**params, **changed}, dtype)
                    except (ValueError, RuntimeError):
                        continue  # these sizes do not go together, say heads and groups of heads
                    if implementation.configure(op.bucket(*call.args), dtype) == config:
                        return call
    raise AssertionError(f"{op.key}[triton]: no size selects {config}; a configuration nothing can choose is dead")


@cache
def _selected(
    bucket: tuple[int, ...],
    places: tuple[int, int],
    dtype: torch.dtype,
    implementation: Implementation,
    among: tuple[int, ...],
) -> dict[Any, tuple[int, int]]:
    """Each configuration that some sizes of `among` at two places of `bucket` select, and the first sizes that do."""
    assert implementation.configure is not None
    found: dict[Any, tuple[int, int]] = {}
    like = getattr(type(bucket), "_make", tuple)  # configure reads fields of a bucket by name
    for sizes in product(among, among):
        changed = list(bucket)
        for place, size in zip(places, sizes, strict=True):
            changed[place] = size
        found.setdefault(implementation.configure(like(changed), dtype), sizes)
    return found


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
