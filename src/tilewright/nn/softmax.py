"""Softmax and sparsemax as modules."""

from torch import Tensor, nn

from tilewright import ops


class Softmax(nn.Softmax):
    """`ops.softmax`; takes the place of torch.nn.Softmax(dim).  Without parameters.

    dim: -1 where it is not given, which torch only guesses.
    """

    def __init__(self, dim: int = -1, *, backend: str | None = None) -> None:
        super().__init__(dim)
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., N, ...) -> the same shape and dtype; sums along `dim` are one."""
        assert self.dim is not None
        return ops.softmax(input, self.dim, backend=self.backend)


class Sparsemax(nn.Module):
    """`ops.sparsemax`: probabilities most of which are 0.  Without parameters."""

    def __init__(self, dim: int = -1, *, backend: str | None = None) -> None:
        super().__init__()
        self.dim, self.backend = dim, backend

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., N, ...) -> the same shape and dtype; sums along `dim` are one."""
        return ops.sparsemax(input, self.dim, backend=self.backend)

    def extra_repr(self) -> str:
        """The dimension, for `print(model)`."""
        return f"dim={self.dim}"
