"""How far a product may be from the exact one, element by element, and where the tests run.

An element of A @ B is a sum of K products.  In float32 it is off by at most a small multiple of sqrt(K) roundings of
sum |a||b| if roundings are random, and of K / 8 where matrix units cut instead of rounding; the epilogue multiplies
that by its slope, and the last step is one rounding to the result's dtype.  Nothing is fitted: an element from another
tile, a lost slice of K or a second rounding is outside.

Products of float8 are another matter: Hopper's tensor cores align them to the largest and keep about 14 bits of the
sum, whatever is written around them (arXiv 2412.19437, 3.3.2).
"""

from typing import NamedTuple

import pytest
import torch

from tilewright.errors import RefusedError
from tilewright.validate.layouts import misaligned, padded_rows

TILE = 64
STEEPEST = 1.13  # slope of gelu; silu's is 1.10, relu's 1
FP8_SUM = 2.0**-12  # of sum |a||b|


class Place(NamedTuple):
    """A device and one backend on it."""

    device: str
    backend: str

    def __str__(self) -> str:
        return self.backend if self.device == "cuda" else f"{self.device}-{self.backend}"


KERNELS = tuple(Place("cuda", backend) for backend in ("cuda", "cutile", "triton"))
PLACES = [
    pytest.param(Place("cpu", "torch"), id="cpu-torch"),
    *(pytest.param(place, id=str(place), marks=pytest.mark.gpu) for place in (*KERNELS, Place("cuda", "torch"))),
]


def run(function, *args, place, **options):
    """The public function on the place's backend; a reason in words is a skip, and nothing else is."""
    return unless_refused(function, *args, place=place, backend=place.backend, **options)


def unless_refused(function, *args, place, **options):
    """The same for a backward, which runs on the backend of its forward."""
    try:
        return function(*args, **options)
    except RefusedError as error:
        if place.device == "cpu":
            raise
        pytest.skip(str(error))


def operands(m, n, k, layout, dtype, device, *, lead=(), magnitudes=0):
    """Normal a (M, K) and b (K, N) in any layout, b of size 1/sqrt(K).  magnitudes: octaves, log-uniform."""

    def draw(shape, turned, scale):
        made = torch.randn(*lead, *(reversed(shape) if turned else shape)) * scale
        if magnitudes:
            made *= torch.exp2(magnitudes * (torch.rand_like(made) - 0.5))
        made = made.to(device=device, dtype=dtype)
        return made.mT if turned else made

    return draw((m, k), layout[0] == "t", 1.0), draw((k, n), layout in ("nt", "tt"), k**-0.5)


def exact(a, b, *, bias=None, activation=None, c=None, alpha=1.0):
    """(the result in float64, how far a float32 one may be from it before the last rounding)."""
    float8 = a.dtype == torch.float8_e4m3fn
    wide = [None if t is None else t.to(torch.float64) for t in (a, b, bias, c)]
    a, b, bias, c = wide
    alpha = float(alpha)
    k, u = a.shape[-1], 2.0**-24
    z = alpha * (a @ b)
    off = (FP8_SUM if float8 else (4 * k**0.5 + k / 8) * u) * abs(alpha) * (a.abs() @ b.abs())
    if bias is not None:
        z = z + bias
    off = off + 2 * u * z.abs()
    if activation == "relu":
        d = z.clamp_min(0)
    elif activation == "gelu":
        d = 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    elif activation == "silu":
        d = z * torch.sigmoid(z)
    elif activation == "swiglu":
        gate, up = z[..., 0::2], z[..., 1::2]
        silu = gate * torch.sigmoid(gate)
        d = silu * up
        off_gate, off_up = off[..., 0::2], off[..., 1::2]
        off = STEEPEST * off_gate * (up.abs() + off_up) + silu.abs() * off_up
    else:
        d = z
    if activation not in (None, "swiglu"):
        off = STEEPEST * off
    if activation is not None:  # what exp and tanh of a GPU are off by
        off = off + 2.0**-19 * d.abs() + 2.0**-20
    if c is not None:
        d = d + c
        off = off + u * d.abs()
    return d, off


def faults(made, wanted, off):
    """The tiles (row, column) of `made` in which an element is further from `wanted` than allowed."""
    info = torch.finfo(made.dtype)
    # float32 may end one unit off: the epilogue and the rounding are in the same type
    allowed = off + info.eps * (wanted.abs() + off) * 0.5001 + info.smallest_normal * info.eps
    wrong = (made.double() - wanted).abs() > allowed
    wrong |= made.isnan() != wanted.isnan()
    at = wrong.reshape(-1, *wrong.shape[-2:]).any(0).nonzero() // TILE
    return sorted({(int(i), int(j)) for i, j in at})


def check(made, a, b, **options):
    """Every element of `made` is as near as float32 allows."""
    wanted, off = exact(a, b, **options)
    assert made.shape == wanted.shape
    assert faults(made, wanted, off) == []


VIEWS = {
    "misaligned": misaligned,
    "padded_rows": padded_rows,
    "every_second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "column_major": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
}
