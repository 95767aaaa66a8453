"""`--case`: a declared workload or edge case by its name, or sizes that the user chooses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.dispatch import Contract, Sample, Workload


def workload(contract: "Contract", text: str) -> "Workload":
    """The workload or edge case called `text` (its first word is enough), or the first one with sizes "M=8,N=4096"."""
    if "=" in text:
        first = contract.workloads[0]
        return replace(first, name="custom", params={**first.params, **sizes(text, [contract])})
    declared = _declared(contract)
    for each in declared:
        if text in (each.name, each.name.partition(":")[0]):
            return each
    names = ", ".join(dict.fromkeys(each.name.partition(":")[0] for each in declared))
    raise UsageError(f"--case {text}: {contract.name} has no such case. Give sizes (M=8,N=4096) or one of: {names}.")


def sizes(text: str, contracts: "Sequence[Contract]") -> dict[str, Any]:
    """{"M": 8, "N": 4096} from "M=8,N=4096".

    Raises UsageError for a name that one of the ops does not have, and for a value that it cannot take.
    """
    sizes_given = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not (name and sign and value):
            raise UsageError(f"--case {text}: write it as M=8,N=4096.")
        sizes_given[name] = value
    values: dict[str, Any] = {}
    for contract in contracts:
        examples = _examples(contract)
        for name, value in sizes_given.items():
            if name not in examples:
                raise UsageError(f"--case {text}: {contract.name} has no {name!r}. It has: {', '.join(examples)}.")
            values[name] = _read(name, value, examples[name])
        try:
            shapes(contract, replace(contract.workloads[0], params={**contract.workloads[0].params, **values}))
        except Exception as error:  # declared sizes are known to work, so the user's do not
            raise UsageError(f"--case {text}: {contract.name} has no such inputs: {error}") from error
    return values


def shapes(contract: "Contract", case: "Workload", dtype: torch.dtype | None = None) -> "Sample":
    """The arguments of a call as fake CPU tensors: any size, no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return contract.inputs(case.params, dtype or case.dtypes[0], torch.device("cpu"), 0)


def _declared(contract: "Contract") -> "list[Workload]":
    return [*contract.workloads, *contract.cpu_workloads, *contract.edge_cases]


def _examples(contract: "Contract") -> dict[str, bool | int | float | str]:
    """Parameter names, each with one value that some workload gives it."""
    examples: dict[str, bool | int | float | str] = {}
    for case in _declared(contract):
        for name, value in case.params.items():
            if isinstance(value, bool | int | float | str):
                examples.setdefault(name, value)
    return examples


def _read(name: str, text: str, example: bool | int | float | str) -> Any:
    """`text` as a value of the example's type."""
    if isinstance(example, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UsageError(f"--case {name}={text}: allowed are true and false.")
    if isinstance(example, int):
        if text.isdecimal():
            return int(text)
        raise UsageError(f"--case {name}={text}: it has to be a whole number, as in {name}={example}.")
    if isinstance(example, float):
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"--case {name}={text}: it has to be a number, as in {name}={example}.") from None
    return text
