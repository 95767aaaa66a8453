"""Grouped problems with an oracle in float64: where groups lie, what surrounds them, how far a result may be off.

Outputs are given as `out=`, filled with a number that no product gives: an element left out and one written beside the
groups both fail.
"""

from itertools import accumulate

import pytest
import torch
from tests.ops.gemm.bounds import FP8_SUM, PLACES, Place, exact, faults, run

from tilewright.ops.gemm.grouped.reference import scaled
from tilewright.ops.gemm.grouped_matmul import grouped_matmul
from tilewright.ops.gemm.k_grouped_matmul import k_grouped_matmul
from tilewright.ops.gemm.masked_matmul import masked_matmul
from tilewright.ops.gemm.scaled.scaling import Scaling

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
POISON = -77.0
INTERPRETER = pytest.param(Place("cpu", "triton"), id="interpreter", marks=pytest.mark.interp)
on_every_place = pytest.mark.parametrize("place", [*PLACES, INTERPRETER])


def int32(numbers, device):
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def operand(shape, dtype, device, *, scale=1.0, turned=False, layout=None):
    """(..., R, K), its scales by `layout`, log-uniform over six octaves, or None."""
    size = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    made = (torch.randn(size) * (8 if layout else scale)).to(device=device, dtype=dtype)
    made = made.mT if turned else made
    if layout is None:
        return made, None
    scales = layout.empty(*shape[-2:], device, *shape[:-2])
    return made, scales.copy_(torch.exp2(6 * torch.rand(scales.shape) - 3) * (scale / 8))


def judge(made, a, scale_a, b, scale_b, activation=None, c=None):
    """Tiles of `made` that are further from float64 than sums in float32, or of float8, may be."""
    if not made.numel():
        return []
    left = scaled(a, scale_a).double() if scale_a is not None else a
    right = scaled(b.mT, scale_b).mT.double() if scale_b is not None else b
    wanted, off = exact(left, right, activation=activation, c=c)
    if scale_a is not None:
        off = off + FP8_SUM * (left.abs() @ right.abs())
    return faults(made, wanted, off)


def grouped(place, sizes, n=72, k=40, *, gaps=None, dtype=HALF, scaling=None, layout="nt", behind=3, **options):
    """Rows of `sizes` one behind the other, or `gaps[g]` rows before group g; `behind` rows that belong to none."""
    device = place.device
    starts, at = [], 0
    for i, size in enumerate(sizes):
        at += gaps[i] if gaps else 0
        starts.append(at)
        at += size
    layouts = Scaling(scaling).layouts if scaling is not None else (None, None)
    a, scale_a = operand((at + behind, k), dtype, device, layout=layouts[0])
    w, scale_w = operand((len(sizes), n, k), dtype, device, scale=k**-0.5, turned=layout == "nn", layout=layouts[1])
    options |= {} if scale_a is None else {"scale_a": scale_a, "scale_b": scale_w.mT}
    options |= {"starts": int32(starts, device)} if gaps else {}
    ends = int32([s + size for s, size in zip(starts, sizes, strict=True)], device)
    n_out = n // 2 if options.get("activation") == "swiglu" else n
    result = options.get("out_dtype") or (HALF if dtype == FP8 else dtype)
    out = torch.full((at + behind, n_out), POISON, dtype=result, device=device)
    made = run(grouped_matmul, a, w.mT, ends, place=place, out=out, **options)
    assert made is out
    outside = torch.ones(at + behind, dtype=torch.bool)
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        outside[rows] = False
        left = None if scale_a is None else scale_a[rows] if scale_a.shape[0] > 1 else scale_a
        right = None if scale_w is None else scale_w[g]
        found = judge(out[rows], a[rows], left, w[g].mT, right, options.get("activation"))
        assert found == [], f"group {g} of {sizes}: tiles {found}"
    assert (out.cpu()[outside] == POISON).all(), "rows of no group were written"


def masked(place, sizes, most, n=72, k=40, *, dtype=HALF, scaling=None, **options):
    """`sizes` of `most` rows count."""
    device, groups = place.device, len(sizes)
    layouts = Scaling(scaling).layouts if scaling is not None else (None, None)
    a, scale_a = operand((groups, most, k), dtype, device, layout=layouts[0])
    w, scale_w = operand((groups, n, k), dtype, device, scale=k**-0.5, layout=layouts[1])
    options |= {} if scale_a is None else {"scale_a": scale_a, "scale_b": scale_w.mT}
    n_out = n // 2 if options.get("activation") == "swiglu" else n
    out = torch.full((groups, most, n_out), POISON, dtype=HALF if dtype == FP8 else dtype, device=device)
    run(masked_matmul, a, w.mT, int32(sizes, device), place=place, out=out, **options)
    for g, size in enumerate(sizes):
        left = None if scale_a is None else scale_a[g, :size] if scale_a.shape[1] > 1 else scale_a[g]
        right = None if scale_w is None else scale_w[g]
        found = judge(out[g, :size], a[g, :size], left, w[g].mT, right, options.get("activation"))
        assert found == [], f"group {g} of {sizes}: tiles {found}"
        assert (out[g, size:] == POISON).all(), f"group {g}: rows that do not count were written"


def along_k(
    place, sizes, m=72, n=40, *, layout="tn", dtype=HALF, scaled_=False, c=False, into=False, behind=0, **options
):
    """Sums over groups of `sizes` rows; `behind` rows that belong to none."""
    device, groups, total = place.device, len(sizes), sum(sizes) + behind
    layouts = Scaling.TOKEN_TOKEN.layouts if scaled_ else (None, None)
    depth = max(*sizes, 1)
    a, scale_a = operand((m, total), dtype, device, turned=layout[0] == "t", layout=layouts[0])
    w, scale_w = operand((n, total), dtype, device, scale=depth**-0.5, turned=layout[1] == "n", layout=layouts[1])
    addend = torch.randn(groups, m, n).to(device) if c or into else None
    options |= {} if scale_a is None else {"scale_a": scale_a, "scale_b": scale_w.mT}
    out = torch.full((groups, m, n), POISON, dtype=options.get("out_dtype", torch.float32), device=device)
    if into:
        out.copy_(addend)
    given = out if into else addend
    run(k_grouped_matmul, a, w.mT, int32(accumulate(sizes), device), place=place, c=given, out=out, **options)
    at = 0
    left = a if scale_a is None else scaled(a, scale_a).double()
    right = w if scale_w is None else scaled(w, scale_w).double()
    for g, size in enumerate(sizes):
        depth = slice(at, at + size)
        wanted, off = exact(left[:, depth], right[:, depth].mT, c=None if addend is None else addend[g])
        off = off + (FP8_SUM * left[:, depth].abs() @ right[:, depth].abs().mT if scaled_ else 0)
        assert faults(out[g], wanted, off) == [], f"group {g} of {sizes}"
        at += size
