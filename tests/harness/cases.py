"""Raw calls of any op, made from its contract alone, on tensors without memory."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Contract, Implementation, RawOp, contracts, implementations, record

SIZES = tuple(1 << k for k in range(18))


class RawCall(NamedTuple):
    """One raw op with meta tensors for arguments; `purpose` says which workload it comes from."""

    purpose: str
    op: RawOp
    args: tuple[Any, ...]

    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors such as the raw op hands to an implementation."""
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.op.outputs(*self.args))


def triton_implementations() -> Iterator[tuple[Contract, RawOp, Implementation]]:
    """Every forward and backward with a Triton implementation."""
    for contract in contracts().values():
        for op in contract.raw_ops:
            implementation = implementations(op.op, op.direction, op.package).get("triton")
            if implementation is not None:
                yield contract, op, implementation


def raw_call(contract: Contract, op: RawOp, purpose: str, params: Mapping[str, Any], dtype: torch.dtype) -> RawCall:
    """What `op`, forward or backward, is given when the public function is called with `params`."""
    with FakeTensorMode():
        sample = contract.inputs(params, dtype, torch.device("cpu"), 0)
    args, kwargs = tree_map(_without_memory, (sample.args, dict(sample.kwargs)))
    with torch.no_grad(), record() as notes:
        outputs = contract.function(*args, **kwargs)
    ((_, raw_args, _, _),) = notes.calls
    if op is contract.forward:
        return RawCall(purpose, op, raw_args)
    gradient = contract.gradient
    assert gradient is not None
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    plain = tuple(None if isinstance(a, Tensor) else a for a in raw_args)
    needs = tuple(isinstance(a, Tensor) for a in raw_args)
    grads = tuple(torch.empty_like(out) for out in outputs)
    return RawCall(purpose, op, gradient.raw_args(grads, gradient.save(raw_args, outputs), plain, needs))


def declared_calls(contract: Contract, op: RawOp, dtype: torch.dtype) -> Iterator[RawCall]:
    """Calls of every workload and edge case that launch something."""
    for workload in (*contract.workloads, *contract.cpu_workloads, *contract.edge_cases):
        call = raw_call(contract, op, workload.name, workload.params, dtype)
        if call.args[0].numel():
            yield call


def call_that_selects(contract: Contract, op: RawOp, config: Any, implementation: Implementation) -> RawCall:
    """A call for which `implementation` chooses `config`: a workload with one size replaced by a power of two."""
    assert implementation.configure is not None
    for workload in (*contract.workloads, *contract.edge_cases):
        for name, size in workload.params.items():
            if type(size) is not int or size == 0:
                continue
            for other in SIZES:
                for dtype in contract.dtypes:
                    params = {**workload.params, name: other}
                    try:
                        call = raw_call(contract, op, f"{workload.name} with {name}={other}", params, dtype)
                    except (ValueError, RuntimeError):
                        continue  # these sizes do not go together, say heads and groups of heads
                    if implementation.configure(op.bucket_of(call.args, "default"), dtype) == config:
                        return call
    raise AssertionError(f"{op.key}[triton]: no size selects {config}; a configuration nothing can choose is dead")


def _without_memory(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
