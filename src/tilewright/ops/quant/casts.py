"""Shared by the casts to e4m3: the arguments of those that can transpose, and what their contracts have in common."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload
from tilewright.ops.quant import samples
from tilewright.ops.quant.formats import SOURCES, check_matrix


class StripCastArgs(NamedTuple):
    """Arguments of the casts whose kernels take 128 rows of a strip of columns, and write it plain or transposed."""

    x: Tensor  # (..., R, C)
    transpose: bool
    ue8m0: bool


def cast_contract(
    forward: RawOp,
    *,
    summary: str,
    reference: Callable[..., tuple[Tensor, Tensor]],
    cost: Callable[[Sample, str], Cost],
    workloads: tuple[Workload, ...],
    edge_cases: tuple[Workload, ...],
    form: str = "(..., M, K)",
    options: tuple[str, ...] = (),
    check: Callable[[Any], None] | None = None,
    bad_inputs: tuple[BadInput, ...] = (),
    batch_dim: int | None = None,
) -> Contract:
    """The contract of a cast of x, whose results are the bits of the reference.

    form: shape of x, as errors write it.   options: keyword arguments of the public function that params may give.
    check: default: x is a matrix that can be cast, or a batch of them.   bad_inputs: in addition to those of such an x.
    """

    def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
        """params: M (rows), N (columns), optional B, scale, special, and `options`."""
        kwargs = {name: params[name] for name in options if name in params}
        return Sample((samples.matrix(params, dtype, device, seed),), kwargs)

    return Contract(
        name=forward.op,
        promises=Promises(reference_bits=True),
        family="quant",
        summary=summary,
        reference=reference,
        forward=forward,
        check=check or (lambda args: check_matrix(forward.op, args.x, form=form)),
        inputs=inputs,
        cost=cost,
        dtypes=SOURCES,
        batch_dim=batch_dim,
        workloads=workloads,
        cpu_workloads=samples.small(),
        edge_cases=edge_cases,
        bad_inputs=(
            samples.bad("integers", "x is torch.int32", 4, 128, dtype=torch.int32),
            samples.bad("float64", "x is torch.float64", 4, 128, dtype=torch.float64),
            samples.bad("vector", f"needs {re.escape(form)}", 128),
            BadInput("not a tensor", lambda device: Sample(([1.0],)), "x is a list"),
            *bad_inputs,
        ),
    )
