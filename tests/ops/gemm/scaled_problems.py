"""Scaled float8 operands, and what their product is, by an index arithmetic of its own."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.ops.gemm.operands import apply_epilogue
from tilewright.ops.gemm.scaled.scaling import GRANULARITIES
from tilewright.ops.quant.layout import ScaleLayout

FP8 = torch.float8_e4m3fn
PAIRS = {
    "tensor": ("one for all", "one for all"),
    "row": ("one a row", "one a row"),
    "token_block": ("1x128", "128x128"),
    "token_token": ("1x128", "1x128"),
}
OTHERS = {"block_token": ("128x128", "1x128"), "row_tensor": ("one a row", "one for all")}


class Operands(NamedTuple):
    """a (..., M, K), b (..., K, N), K-major; scale_b (..., N blocks, K blocks), as raw ops and engines take it."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor

    def public(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As the public function takes them: scale_b lies as b."""
        return self.a, self.b, self.scale_a, self.scale_b.mT

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """a and b in float64."""
        of_b = every(self.scale_b, self.b.shape[-1], self.b.shape[-2])
        return self.a.double() * every(self.scale_a, *self.a.shape[-2:]), self.b.double() * of_b.mT

    def exact(self, bias=None, c=None, alpha=1.0, activation="") -> Tensor:
        """The result in float64."""
        a, b = self.dequantised()
        return apply_epilogue(alpha * (a @ b), bias, c, activation, torch.float64)


def every(scales: Tensor, rows: int, depth: int) -> Tensor:
    """One scale for each element, in float64: block i holds elements 128 i to 128 i + 127, or one, or all."""

    def index(blocks: int, size: int) -> Tensor:
        step = 1 if blocks == size else size if blocks == 1 else 128
        return torch.arange(size, device=scales.device) // step

    along_rows, along_depth = index(scales.shape[-2], rows), index(scales.shape[-1], depth)
    return scales.double()[..., along_rows, :][..., along_depth]


def operands(
    m: int, n: int, k: int, pair: str = "token_block", batch: tuple[int, ...] = (), device: str = "cpu"
) -> Operands:
    """Normal values, log-uniform scales over six octaves, and NaN in whatever lies between the scales."""
    of_a, of_b = (GRANULARITIES[name] for name in (PAIRS | OTHERS)[pair])
    a = torch.randn(*batch, m, k).to(device=device, dtype=FP8)
    b = torch.randn(*batch, n, k).to(device=device, dtype=FP8).mT
    return Operands(a, b, scales(of_a, m, k, batch, device), scales(of_b, n, k, batch, device) * k**-0.5)


def scales(layout: ScaleLayout, rows: int, depth: int, batch: tuple[int, ...], device: str) -> Tensor:
    """Where `layout` puts them."""
    made = layout.empty(rows, depth, device, *batch)
    whole = made.as_strided((made.untyped_storage().nbytes() // 4,), (1,))
    whole.fill_(torch.nan)
    return made.copy_(torch.exp2(6 * torch.rand(made.shape) - 3))
