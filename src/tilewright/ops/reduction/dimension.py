"""The dimension along which a reduction works."""

from torch import Tensor

from tilewright.dispatch.arguments import as_int
from tilewright.errors import InputError


def checked_dim(op: str, x: Tensor, dim: int) -> int:
    """`dim`, as -1 where it is the last of `x`.  Raises InputError for one that x does not have."""
    if type(dim) is not int:
        dim = as_int(op, "dim", dim)
    if dim == -1 or dim == x.dim() - 1:
        return -1
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"{op}: dim is {dim}, x is {tuple(x.shape)}; needs {-x.dim()} <= dim < {x.dim()}.")
    return dim
