"""Same values, other strides, alignments and sizes."""

from tilewright.dispatch import Sample
from tilewright.validate.case import Case, Findings, NotApplicable, tensors
from tilewright.validate.layouts import LAYOUTS, misaligned, odd_singles
from tilewright.validate.modes.registry import mode
from tilewright.validate.rows import batch_size, rows_of


@mode("non_contiguous")
def non_contiguous(case: Case, findings: Findings) -> None:
    """Transposed and strided inputs and cotangents, the gaps between elements filled with NaN."""
    for name, change in LAYOUTS.items():
        with findings.part(name) as prefix:
            findings.outputs(case.call(case.mapped(change)), prefix)
        if case.positions:
            with findings.part(f"{name}, with gradients") as prefix:
                cotangents = [change(c) for c in case.truth.cotangents]
                outputs, grads = case.differentiate(case.mapped(change), None, cotangents)
                findings.outputs(outputs, prefix)
                findings.gradients(grads, prefix)


@mode("offset")
def offset(case: Case, findings: Findings) -> None:
    """Contiguous views that start one element after an aligned address."""
    findings.outputs(case.call(case.mapped(misaligned)))
    if case.positions:
        with findings.part("with gradients") as prefix:
            cotangents = [misaligned(c) for c in case.truth.cotangents]
            _, grads = case.differentiate(case.mapped(misaligned), None, cotangents)
            findings.gradients(grads, prefix)


@mode("single_elements")
def single_elements(case: Case, findings: Findings) -> None:
    """Dimensions of one element with strides that no dense tensor has."""
    if not any(1 in t.shape for t in tensors(case.sample())):
        raise NotApplicable("no dimension has one element")
    findings.outputs(case.call(case.mapped(odd_singles)))
    if case.positions:
        cotangents = [odd_singles(c) for c in case.truth.cotangents]
        outputs, grads = case.differentiate(case.mapped(odd_singles), None, cotangents)
        findings.outputs(outputs, "with gradients: ")
        findings.gradients(grads)


@mode("empty")
def empty(case: Case, findings: Findings) -> None:
    """No rows at all: empty outputs of the right shape, zero gradients, no launch error."""
    if batch_size(case) is None:
        raise NotApplicable("the op has no batch dimension")
    empty_sample: Sample = rows_of(case, case.sample(), 0, 0)
    truth = case.truth_of(empty_sample)
    findings.outputs(case.call(empty_sample), "", truth)
    if case.positions:
        _, grads = case.differentiate(empty_sample, None, truth.cotangents)
        findings.gradients(grads, "", truth)
