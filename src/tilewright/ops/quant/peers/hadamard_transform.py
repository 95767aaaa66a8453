"""Other Hadamard transforms: Dao-AILab's, for powers of two, and the product with the matrix, by torch."""

import torch

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call, LibraryPeer
from tilewright.ops.quant.hadamard import factor, transform

_WIDEST = 8192  # columns: beyond it the matrix alone takes longer to read than most inputs


def _dao(sample: Sample) -> Call | None:
    from fast_hadamard_transform import hadamard_transform

    (x,) = sample.args
    n = x.shape[-1]
    if factor(n) != 1:
        return None  # its matrices of other sizes are not ours
    scale = sample.kwargs.get("scale", n**-0.5)
    return lambda: hadamard_transform(x, scale)


def _product(sample: Sample) -> Call | None:
    (x,) = sample.args
    n = x.shape[-1]
    if n > _WIDEST:
        return None
    matrix = transform(torch.eye(n, device=x.device)) * sample.kwargs.get("scale", n**-0.5)
    matrix = matrix.to(x.dtype)
    return lambda: x @ matrix


PEERS = (
    LibraryPeer("dao", "fast_hadamard_transform", _dao),
    LibraryPeer("torch_matmul", None, _product),
)
