"""The op's registration with torch: schema, fake, autograd, and tracing by AOTAutograd with symbolic sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.validate.case import Case, Findings, RawCall
from tilewright.validate.modes.registry import mode

_SCHEMA, _SYMBOLIC = "test_schema", "test_aot_dispatch_dynamic"
_TESTS = (_SCHEMA, "test_autograd_registration", "test_faketensor", _SYMBOLIC)


@mode("opcheck", heavy=True)
def opcheck(case: Case, findings: Findings) -> None:
    """torch.library.opcheck on the raw ops, their out overload and, but for its trace, the composite op."""
    for call in case.raw_calls(case.sample()):
        _check(findings, call.op.torch_op, (*call.args, *call.preference), {})
    forward, *_ = case.raw_calls(case.sample())
    if forward.op.torch_out is not None:
        outs = {f"out{i}": out.zero_() for i, out in enumerate(forward.op.allocate(forward.args, case.device))}
        _check(findings, forward.op.torch_out, (*forward.args, *forward.preference), outs)
    _check(findings, *_composite(case, forward), {}, [test for test in _TESTS if test != _SYMBOLIC])


@mode("symbolic_sizes", heavy=True)
def symbolic_sizes(case: Case, findings: Findings) -> None:
    """AOTAutograd traces the composite op, forward and backward, with symbolic sizes: opcheck's longest test."""
    forward, *_ = case.raw_calls(case.sample())
    _check(findings, *_composite(case, forward), {}, [_SYMBOLIC])


def _composite(case: Case, forward: RawCall) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """The composite op and its arguments, leaves where there is a gradient."""
    leaves = list(forward.args)
    for i in case.positions:
        leaves[i] = leaves[i].detach().requires_grad_()
    return getattr(torch.ops.tilewright, case.contract.name).default, (*leaves, *forward.preference)


def _check(
    findings: Findings,
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Tensor],
    tests: Sequence[str] = _TESTS,
) -> None:
    if any(isinstance(a, Tensor) and a.is_floating_point() and a.element_size() == 1 for a in args):
        tests = [test for test in tests if test != _SCHEMA]  # it compares inputs, which torch cannot do in float8
    results = torch.library.opcheck(op, args, kwargs, test_utils=tests, raise_exception=False)
    for test, outcome in results.items():
        findings.require(outcome == "SUCCESS", f"{op}: {test}: {outcome}")
