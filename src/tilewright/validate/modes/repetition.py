"""The same call again, the same values in another batch, other values at the same addresses."""

from torch import Tensor

from tilewright.dispatch import numerics
from tilewright.validate.bits import replicas, same_bits
from tilewright.validate.case import Case, Findings, NotApplicable, overwrite
from tilewright.validate.modes.registry import mode
from tilewright.validate.rows import output_rows, require_independent_rows, rows_of

RUNS = 20
SINGLE_ROWS = 7


@mode("determinism")
def determinism(case: Case, findings: Findings) -> None:
    """Twenty runs, forward and backward, give the same bits.

    Under numerics("deterministic") for an op that does not promise it always.
    """
    sample = case.sample()
    with numerics("default" if case.contract.promises.deterministic else "deterministic"):
        first = case.call(sample)
        for run in range(1, RUNS):
            same = all(same_bits(a, b) for a, b in zip(first, case.call(sample), strict=True))
            findings.require(same, f"run {run + 1} of {RUNS} gave other bits than the first")
            if not same:
                break
        if not case.positions:
            return
        _, grads = case.differentiate(sample)
        for run in range(1, RUNS):
            _, rerun_grads = case.differentiate(sample)
            changed = [i for i, g in grads.items() if not _same(g, rerun_grads[i])]
            names = ", ".join(case.truth.gradients[i].name for i in changed)
            findings.require(not changed, f"backward run {run + 1} of {RUNS} gave other bits than the first in {names}")
            if changed:
                break


@mode("batch_invariance")
def batch_invariance(case: Case, findings: Findings) -> None:
    """Under numerics("batch_invariant"), a row's bits are the same alone, in part of the batch and in all of it."""
    if not case.contract.promises.batch_invariant:
        raise NotApplicable("the op does not promise it")
    size = require_independent_rows(case)
    with numerics("batch_invariant"):
        sample = case.sample()
        if case.raw_calls(sample)[0].plan().launch is None:
            raise NotApplicable("torch does not promise it for its own kernels")
        full = case.call(sample)
        for start, length in _parts(size):
            part = case.call(rows_of(case, sample, start, length))
            for output, part_output, standard in zip(full, part, case.truth.outputs, strict=True):
                same = same_bits(output_rows(case, output, start, length).contiguous(), part_output.contiguous())
                rows = f"row {start}" if length == 1 else f"rows {start} to {start + length - 1}"
                findings.require(same, f"{rows} of {standard.name}: other bits alone than in the batch of {size}")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)


def _parts(size: int) -> list[tuple[int, int]]:
    """(start, length): single rows from first to last, batches of 2, 4, 8, ..., and all rows but the first."""
    rows = [(i * (size - 1) // SINGLE_ROWS, 1) for i in range(SINGLE_ROWS + 1)]
    return list(dict.fromkeys([*rows, *((0, 1 << k) for k in range(1, (size - 1).bit_length())), (1, size - 1)]))


@mode("changed_inputs")
def changed_inputs(case: Case, findings: Findings) -> None:
    """Other values at the same addresses, and then the first again, give their own results: nothing is cached by
    pointer.
    """
    sample = case.sample()
    case.call(sample)
    if case.positions:
        case.differentiate(sample)
    for values, truth, prefix in ((*case.other(), ""), (case.sample(), case.truth, "the first values again: ")):
        overwrite(sample, values)
        findings.outputs(case.call(sample), prefix, truth)
        if case.positions:
            _, grads = case.differentiate(sample, None, replicas(truth.cotangents))
            findings.gradients(grads, prefix, truth)
