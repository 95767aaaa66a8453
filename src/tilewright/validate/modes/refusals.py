"""Calls that must fail: with the contract's error and text, before anything is written."""

import re

import torch

from tilewright.validate.bits import memory
from tilewright.validate.case import Case, Findings, NotApplicable, tensors
from tilewright.validate.modes.registry import mode


@mode("bad_inputs", once=True, computes=False)
def bad_inputs(case: Case, findings: Findings) -> None:
    """Every bad input of the contract raises its error and writes neither to its inputs nor to out=."""
    if not case.contract.bad_inputs:
        raise NotApplicable("the contract lists none")
    for bad in case.contract.bad_inputs:
        _refuses(case, findings, bad.name, {})
        if case.contract.forward.torch_out is not None:
            _refuses(case, findings, bad.name, {"out": torch.full((8, 8), 7.0, device=case.device)})


def _refuses(case: Case, findings: Findings, name: str, options: dict[str, torch.Tensor]) -> None:
    (bad,) = (b for b in case.contract.bad_inputs if b.name == name)
    sample = bad.make(case.device)
    watched = [*tensors(sample), *options.values()]
    before = [memory(t).clone() for t in watched]
    what = f"{name}{', with out=' if options else ''}"
    try:
        case.call(sample, **options)
    except bad.error as error:
        findings.require(
            re.search(bad.match, str(error)) is not None, f"{what}: the text {str(error)!r} lacks {bad.match!r}"
        )
    except Exception as error:  # noqa: BLE001 - whatever else it raised is the finding
        findings.faults.append(f"{what}: raised {type(error).__name__}: {error}; expected {bad.error.__name__}")
    else:
        findings.faults.append(f"{what}: raised nothing; expected {bad.error.__name__}")
    unchanged = all(torch.equal(memory(t), old) for t, old in zip(watched, before, strict=True))
    findings.require(unchanged, f"{what}: a tensor was written to before the error")
