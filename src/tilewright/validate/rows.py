"""Cut rows out of a batch, for ops whose rows are independent of each other."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright.dispatch import Sample
from tilewright.dispatch.effects import pure
from tilewright.mask import Mask
from tilewright.validate.case import Case, NotApplicable
from tilewright.validate.metrics import testable


def batch_size(case: Case) -> int | None:
    """Rows along the contract's batch dimension; None where it has none."""
    dim = case.contract.batch_dim
    return None if dim is None or case.first.dim() <= dim else case.first.shape[dim]


def rows_of(case: Case, sample: Sample, start: int, length: int) -> Sample:
    """`length` rows of `sample` from `start`: views of all arguments that carry the batch.

    A vector of floating-point numbers counts as weights; one of integers (positions) has an entry for each row.  A mask
    may have ids or tables for each row.
    """
    dim, size = case.contract.batch_dim, batch_size(case)
    assert dim is not None

    def cut(v: object) -> object:
        if isinstance(v, Mask):
            return v.narrow(start, length)
        if not isinstance(v, Tensor) or v.dim() <= dim or v.shape[dim] != size:
            return v
        vector_of_weights = v.dim() == 1 and v.is_floating_point()
        return v if vector_of_weights else v.narrow(dim, start, length)

    first = sample.args[0].narrow(dim, start, length)
    rest, kwargs = tree_map(cut, (sample.args[1:], dict(sample.kwargs)))
    return Sample((first, *rest), kwargs)


def output_rows(case: Case, output: Tensor, start: int, length: int) -> Tensor:
    """The same rows of an output."""
    assert case.contract.batch_dim is not None
    return output.narrow(case.contract.batch_dim, start, length)


def require_independent_rows(case: Case) -> int:
    """Return the batch size.  Raises NotApplicable for fewer than two rows, and if the reference itself mixes rows."""
    size = batch_size(case)
    if size is None:
        raise NotApplicable("the op has no batch dimension")
    if size < 2:
        raise NotApplicable("a batch of fewer than two rows")
    sample = rows_of(case, case.sample(), size - 1, 1)
    with torch.no_grad():
        row_outputs = pure(case.contract, case.contract.reference)(*sample.args, **sample.kwargs)
    for output, standard in zip(row_outputs, case.truth.outputs, strict=True):
        row = output_rows(case, standard.rounded, size - 1, 1)
        tolerance = 0.15 if output.element_size() == 1 else 0.05  # e4m3's neighbours are an eighth apart
        if output.shape != row.shape or not torch.allclose(
            testable(output), testable(row), rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            raise NotApplicable("rows of this sample are not independent in the reference")
    return size
