"""Accuracy: forward, backward, and under the context managers a caller may have around the call."""

import torch

from tilewright.dispatch import Sample
from tilewright.dispatch.effects import pure
from tilewright.validate.bits import other_bits, replicas
from tilewright.validate.case import Case, Findings, NotApplicable
from tilewright.validate.modes.registry import mode


@mode("eager")
def eager(case: Case, findings: Findings) -> None:
    """Forward without gradients, first call and second: the second may replay what the first prepared."""
    findings.outputs(case.call(case.sample()))
    findings.outputs(case.call(case.sample()), "second call: ")
    if case.backend in (None, "auto"):
        findings.notes.extend(f"auto takes {name}" for name in _planned(case)[:1])


@mode("reference_bits")
def reference_bits(case: Case, findings: Findings) -> None:
    """Outputs have the bits of the reference: a result rounded to the wrong neighbour is no rounding error."""
    if not case.contract.promises.reference_bits:
        raise NotApplicable("the op does not promise it")
    sample = case.sample()
    with torch.no_grad():
        expected = pure(case.contract, case.contract.reference)(*sample.args, **sample.kwargs)
    for standard, ours, theirs in zip(case.truth.outputs, case.call(case.sample()), expected, strict=True):
        differing = other_bits(ours, theirs)
        position = ", ".join(str(tuple(index)) for index in differing.nonzero()[:1].tolist())
        findings.require(
            position == "",
            f"{standard.name}: {int(differing.sum())} elements have other bits; first difference at {position}",
        )


@mode("backward")
def backward(case: Case, findings: Findings) -> None:
    """Forward with gradients, and the gradient of every input for random cotangents."""
    needs_gradient(case)
    for prefix in ("", "second call: "):
        outputs, grads = case.differentiate(case.sample())
        findings.outputs(outputs, prefix)
        findings.gradients(grads, prefix)
    ran = _planned(case)
    if len(ran) == 2 and ran[0] == case.backend != ran[1]:
        findings.notes.append(f"the backward is {ran[-1]}'s: {case.backend} has none for this call")


@mode("gradient_subsets")
def gradient_subsets(case: Case, findings: Findings) -> None:
    """Each input alone requiring a gradient; each output alone used; an expanded cotangent, as of `.sum()`."""
    needs_gradient(case)
    names = {i: s.name for i, s in case.truth.gradients.items()}
    if len(case.positions) > 1:
        for i in case.positions:
            _, grads = case.differentiate(case.sample(), (i,))
            findings.gradients(grads, f"only {names[i]}: ")
    if len(case.truth.outputs) > 1:
        for k, output in enumerate(case.truth.outputs):
            used = [c if j == k else torch.zeros_like(c) for j, c in enumerate(case.truth.cotangents)]
            truth = case.truth_of(case.sample(), used)
            _, grads = case.differentiate(case.sample(), None, [c if j == k else None for j, c in enumerate(used)])
            findings.gradients(grads, f"only {output.name} used: ", truth)
    ones = [c.new_ones(()).expand(c.shape) for c in case.truth.cotangents]
    _, grads = case.differentiate(case.sample(), None, ones)
    findings.gradients(grads, "expanded cotangent: ", case.truth_of(case.sample(), ones))


@mode("inference_mode")
def inference_mode(case: Case, findings: Findings) -> None:
    """Under torch.inference_mode, on ordinary tensors and on tensors made inside."""
    outside = case.sample()
    with torch.inference_mode():
        inside = Sample(replicas(outside.args), replicas(dict(outside.kwargs)))
        outputs = case.call(outside), case.call(inside)
        findings.outputs([o.clone() for o in outputs[0]], "ordinary tensors: ")
        findings.outputs([o.clone() for o in outputs[1]], "inference tensors: ")


@mode("autocast")
def autocast(case: Case, findings: Findings) -> None:
    """Under torch.autocast: same dtypes and accuracy, because an op ignores autocast."""
    kind = case.device.type
    for dtype in (torch.bfloat16, torch.float16) if kind == "cuda" else (torch.bfloat16,):
        with torch.autocast(kind, dtype):
            findings.outputs(case.call(case.sample()), f"{dtype}: ")
            if case.positions:
                outputs, grads = case.differentiate(case.sample())
                findings.outputs(outputs, f"{dtype}, with gradients: ")
                findings.gradients(grads, f"{dtype}: ")


def _planned(case: Case) -> list[str]:
    """The backends of a call's raw ops: forward, and backward where there is one."""
    try:
        return [call.plan().backend for call in case.raw_calls(case.sample())]
    except NotApplicable:
        return []


def needs_gradient(case: Case) -> None:
    """Raise NotApplicable for an op without gradients."""
    if not case.positions:
        raise NotApplicable("the op has no gradient")
