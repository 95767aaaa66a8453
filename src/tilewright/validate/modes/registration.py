"""The op's registration with torch: schema, fake, autograd, and tracing by AOTAutograd with symbolic sizes."""

from typing import Any

import torch
from torch import Tensor

from tilewright.validate.case import Case, Findings
from tilewright.validate.modes.registry import mode

_OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
_ALL = ("test_schema", *_OTHERS)  # test_schema compares inputs before and after, which torch cannot do in float8


@mode("opcheck", heavy=True)
def opcheck(case: Case, findings: Findings) -> None:
    """torch.library.opcheck on the raw ops, their out overload and the composite op."""
    for call in case.raw_calls(case.sample()):
        _check(findings, call.op.torch_op, (*call.args, *call.preference), {})
    forward, *_ = case.raw_calls(case.sample())
    if forward.op.torch_out is not None:
        outs = {f"out{i}": out.zero_() for i, out in enumerate(forward.op.allocate(forward.args, case.device))}
        _check(findings, forward.op.torch_out, (*forward.args, *forward.preference), outs)
    composite = getattr(torch.ops.tilewright, case.contract.name).default
    leaves = list(forward.args)
    for i in case.positions:
        leaves[i] = leaves[i].detach().requires_grad_()
    _check(findings, composite, (*leaves, *forward.preference), {})


def _check(findings: Findings, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Tensor]) -> None:
    eight_bits = any(isinstance(a, Tensor) and a.is_floating_point() and a.element_size() == 1 for a in args)
    results = torch.library.opcheck(op, args, kwargs, test_utils=_OTHERS if eight_bits else _ALL, raise_exception=False)
    for test, outcome in results.items():
        findings.require(outcome == "SUCCESS", f"{op}: {test}: {outcome}")
