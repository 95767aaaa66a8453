"""Select the cases of a run: the contracts' declared workloads, by family, op, dtype and direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch

from tilewright.dispatch import Contract, Workload, contracts
from tilewright.dispatch.contract import Direction
from tilewright.errors import UsageError
from tilewright.hardware.ceilings import dtype_name

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """One row to measure.   peers: names of peers that take part besides those that have all rows or this one."""

    contract: Contract
    workload: Workload
    dtype: torch.dtype
    direction: Direction
    peers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """(op, case, dtype, direction): what identifies a row in a result file."""
        return self.contract.name, self.workload.name, dtype_name(self.dtype), self.direction


def known_contracts() -> dict[str, Contract]:
    """Contracts of every op of the library."""
    import_module("tilewright.ops")
    return contracts()


def suites() -> list[str]:
    """Names of the suites: the op families, and "all"."""
    return [*sorted({contract.family for contract in known_contracts().values()}), "all"]


def select(
    suite: str,
    *,
    ops: Sequence[str] | None = None,
    dtype: str | None = None,
    case: Mapping[str, Any] | None = None,
    rows: Sequence[str] | None = None,
    device: torch.device,
) -> list[Case]:
    """The cases of `suite`; raises UsageError, naming what exists, when there are none.

    ops: only these. dtype: every workload in this dtype instead of its declared ones. case: only workloads with these
    parameters; when no workload has them, these parameters are measured as the case "custom". rows: only workloads
    whose name matches one of these shell patterns ("*_m64").
    """
    family = [c for c in known_contracts().values() if suite in ("all", c.family)]
    if not family:
        raise UsageError(f"no bench suite named {suite!r}. Suites: {', '.join(suites())}.")
    unknown = set(ops or ()) - {c.name for c in family}
    if unknown:
        raise UsageError(
            f"suite {suite!r} has no op {', '.join(sorted(unknown))}. Ops: {', '.join(c.name for c in family)}."
        )
    chosen = [c for c in family if not ops or c.name in ops]
    cases = [each for c in chosen for each in _cases_of(c, dtype, case or {}, device)]
    matching = [each for each in cases if rows is None or any(fnmatchcase(each.workload.name, row) for row in rows)]
    if rows is not None and not matching:
        names = ", ".join(dict.fromkeys(each.workload.name for each in cases))
        raise UsageError(f"no row of suite {suite!r} is called {' or '.join(rows)}. Rows: {names}.")
    return matching


def _cases_of(contract: Contract, dtype: str | None, params: Mapping[str, Any], device: torch.device) -> list[Case]:
    declared = contract.workloads if device.type == "cuda" else contract.cpu_workloads
    matching = [w for w in declared if all(w.params.get(name) == value for name, value in params.items())]
    if not matching:
        matching = [_custom(contract, declared, params)]
    if dtype is not None:
        matching = [replace(w, dtypes=(_dtype(contract, dtype),)) for w in matching]
    return [
        Case(contract, workload, each, direction)
        for workload in matching
        for each in workload.dtypes
        for direction in workload.directions
        if direction == "fwd" or contract.gradient is not None
    ]


def _custom(contract: Contract, declared: Sequence[Workload], params: Mapping[str, Any]) -> Workload:
    """A workload with the user's sizes; other parameters come from the first declared workload."""
    if not declared:
        raise UsageError(f"{contract.name} declares no workload for this device")
    model = declared[0]
    unknown = set(params) - {name for w in (*declared, *contract.edge_cases) for name in w.params}
    if unknown:
        raise UsageError(
            f"{contract.name} has no parameter {', '.join(sorted(unknown))}. Parameters: {', '.join(model.params)}."
        )
    return replace(model, name="custom", params={**model.params, **params})


def _dtype(contract: Contract, name: str) -> torch.dtype:
    dtypes = {dtype_name(d): d for d in contract.dtypes}
    dtype = dtypes.get(name.lower(), _SHORT.get(name.lower()))
    if dtype is None or dtype not in contract.dtypes:
        allowed = ", ".join(dtype_name(d) for d in contract.dtypes)
        raise UsageError(f"{contract.name} takes no dtype {name!r}. Allowed: {allowed}.")
    return dtype
