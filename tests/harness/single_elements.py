"""Dimensions of one element, whose strides say nothing: calls of every op with any stride there.

torch leaves such a stride open, and views of fused projections, of `expand` and of `as_strided` have odd ones.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Contract, Sample, contracts
from tilewright.dispatch.effects import as_tuple, pure
from tilewright.errors import InputError
from tilewright.validate.oracle import differentiate, gradient_inputs

STRIDES = (0, 1, 7, 1 << 33)
LARGEST = 20000  # elements of a case: the interpreter is slow
ATTENTION = {"fmha", "fmha_fp8", "fmha_varlen", "mla", "merge_states"}  # its own tests ask the same


class Single(NamedTuple):
    """A call of `contract` that has a dimension of one element."""

    contract: Contract
    params: dict[str, Any]

    @property
    def sample(self) -> Sample:
        return self.contract.inputs(self.params, self.contract.dtypes[0], torch.device("cpu"), 3)


def restrided(t: Tensor, first: int) -> Tensor:
    """`t`, each dimension of one element with another of `STRIDES`, from the one at place `first` on."""
    strides = [
        STRIDES[(first + dim) % len(STRIDES)] if size == 1 else stride
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True))
    ]
    return t.as_strided(t.shape, strides)


def singles(names: set[str] | None = None) -> Iterator[Single]:
    """Every edge case with each of its sizes made 1, where that is a call."""
    for name, contract in contracts().items():
        if name in ATTENTION or (names is not None and name not in names):
            continue
        seen = set()
        for case in contract.edge_cases:
            sizes = [key for key, value in case.params.items() if type(value) is int and value > 1]
            for params in (dict(case.params), *({**case.params, key: 1} for key in sizes)):
                single = Single(contract, params)
                if repr(sorted(params.items(), key=str)) not in seen and _runs(single):
                    yield single
                seen.add(repr(sorted(params.items(), key=str)))


def _runs(single: Single) -> bool:
    if 0 in single.params.values():
        return False
    try:
        sample = single.sample
        single.contract.function(*sample.args, backend="torch", **sample.kwargs)
    except (InputError, ValueError, RuntimeError, IndexError):
        return False  # these sizes do not go together
    tensors = [t for t in tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(t, Tensor)]
    return any(1 in t.shape for t in tensors) and sum(t.numel() for t in tensors) <= LARGEST


def results(single: Single, function: Callable[..., Any], first: int | None) -> list[Tensor]:
    """Outputs and gradients of one call; with `first`, of restrided inputs and cotangents."""

    def change(value: Any) -> Any:
        return value if first is None or not isinstance(value, Tensor) else restrided(value, first)

    sample = single.sample
    positions = gradient_inputs(single.contract, sample)
    sample = Sample(*tree_map(change, (sample.args, dict(sample.kwargs))))
    if not positions:
        return [*pure(single.contract, function)(*sample.args, **sample.kwargs)]
    with torch.no_grad():
        shapes = as_tuple(single.contract.function(*sample.args, backend="torch", **sample.kwargs))
    g = torch.Generator().manual_seed(1)
    cotangents = [change(torch.randn(o.shape, generator=g).to(o.dtype)) for o in shapes]
    outputs, gradients = differentiate(function, sample, positions, cotangents)
    return [*outputs, *(g for _, g in sorted(gradients.items()) if g is not None)]
