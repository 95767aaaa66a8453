"""Shared by every GEMM of this family: majors and layouts of operands, alignment, and the definition of the epilogue.

A transposed operand differs in its strides alone: `a` is always (..., M, K) and `b` (..., K, N), and their majors say
along which dimension memory is contiguous.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError
from tilewright.ops.rows import address

FP8 = torch.float8_e4m3fn
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of results, and of 16-bit and float32 operands."""

ACTIVATIONS = ("", "relu", "gelu", "silu", "swiglu")
"""Names of activations in the raw ops; "" is none, "gelu" the tanh form."""

LAYOUTS = ("nt", "nn", "tn", "tt")
"""Layout codes as BLAS names them, for `a` then `b`: "n" is row-major as written in the product A (M, K) @ B (K, N)."""

VECTOR = 16  # bytes: the alignment of TMA


class Major(IntEnum):
    """The dimension along which an operand is contiguous: K, or its other one (M of `a`, N of `b`)."""

    K = 0
    MN = 1


def major_a(a: Tensor) -> Major | None:
    """Returns the major of `a` (..., M, K); None if neither stride is 1."""
    return _major(a, -1, -2)


def major_b(b: Tensor) -> Major | None:
    """Returns the major of `b` (..., K, N); None if neither stride is 1."""
    return _major(b, -2, -1)


def _major(t: Tensor, k: int, mn: int) -> Major | None:
    # If both strides are 1, one dimension has a single element, and the other one decides
    if hint(t.stride(k)) == 1 and (hint(t.shape[k]) > 1 or hint(t.stride(mn)) != 1):
        return Major.K
    if hint(t.stride(mn)) == 1:
        return Major.MN
    return None


def unit_stride(t: Tensor) -> Tensor:
    """Returns `t` if one of its last two strides is 1, or if it has no strides, else a contiguous copy."""
    try:
        strides = t.stride()
    except RuntimeError:
        return t
    if strides[-1] == 1 or strides[-2] == 1 or t.layout is not torch.strided:
        return t
    # not t.contiguous(), which returns a tensor of one element unchanged
    return t.clone(memory_format=torch.contiguous_format)


def layout_code(a: Tensor, b: Tensor) -> int:
    """Returns 0 for nt, 1 nn, 2 tn, 3 tt: M-major `a` is "t", K-major `b` is "t" of BLAS; row-major x @ w.T is nt."""
    if major_a(a) is Major.MN:
        return 3 if major_b(b) is Major.K else 2
    return 0 if major_b(b) is Major.K else 1


def aligned(a: Tensor, b: Tensor, n_out: int, out_dtype: torch.dtype) -> bool:
    """Returns whether TMA can read `a` and `b` and write a row-contiguous result of `n_out` columns.

    Addresses, every stride but the unit one, and a row of the result must be multiples of 16 bytes.  Tensors without
    memory (fake, meta, wrapped by functorch) count as if their storage began at such an address.
    """
    return copyable(a) and copyable(b) and hint(n_out) * out_dtype.itemsize % VECTOR == 0


def copyable(t: Tensor) -> bool:
    """Returns whether TMA can read or write `t` in place."""
    if address(t) % VECTOR:
        return False
    size, found_unit_stride = t.element_size(), False
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if hint(n) == 1:  # the stride of one element does not matter
            continue
        step = hint(stride)
        if step == 1 and not found_unit_stride and dim >= t.dim() - 2:  # the unit stride is one of the last two
            found_unit_stride = True
        elif step * size % VECTOR or not step:  # TMA cannot broadcast
            return False
    return True


def columns_out(n: int, activation: str) -> int:
    """Returns the columns of the result for `n` columns of op(B): half as many for "swiglu"."""
    return n // 2 if activation == "swiglu" else n


def apply_epilogue(z: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype) -> Tensor:
    """Returns act(z + bias) + c in z's dtype, rounded once to `out_dtype`: the epilogue of every kernel.

    z: (..., M, N) float32 (float64 in the oracle), scaled by alpha already.   bias: (N,)   c: (..., M, N_out)
    """
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = activate(z, activation)
    if c is not None:
        z = z + c.to(z.dtype)
    return z.to(out_dtype)


def activate(z: Tensor, activation: str) -> Tensor:
    """Returns the activation of z in z's dtype.  "swiglu" is silu(z[..., 0::2]) * z[..., 1::2]."""
    if activation == "relu":
        return torch.relu(z)
    if activation == "gelu":
        return F.gelu(z, approximate="tanh")
    if activation == "silu":
        return F.silu(z)
    if activation == "swiglu":
        return F.silu(z[..., 0::2]) * z[..., 1::2]
    return z


def fold(op: str, name: str, t: Any, rows: Sequence[int]) -> Any:
    """Returns `t` (*rows, N) as (M, N), a view where strides allow.  The checks refuse what is no such tensor."""
    if not isinstance(t, Tensor) or (t.dim() == 2 and len(rows) == 1) or t.layout is not torch.strided:
        return t
    if tuple(t.shape[:-1]) != tuple(rows):
        raise InputError(f"{op}: {name} is {tuple(t.shape)}; its leading dimensions are {tuple(rows)}, as those of a.")
    return t.flatten(0, -2)


def folded_out(op: str, out: Any, rows: Sequence[int]) -> Tensor:
    """Returns `out` (*rows, N) as (M, N), the same memory."""
    if not isinstance(out, Tensor):
        raise InputError(f"{op}: out is a {type(out).__name__}; needs a torch.Tensor.")
    # Dimensions of one element do not matter for a fold
    leading = [i for i in range(out.dim() - 1) if out.shape[i] != 1]
    if out.numel() and any(out.stride(i) != out.shape[j] * out.stride(j) for i, j in pairwise(leading)):
        raise InputError(
            f"{op}(out=...) has strides {out.stride()}; its leading dimensions must fold into one. "
            "Pass contiguous memory, or leave out= away."
        )
    folded: Tensor = fold(op, "out", out, rows)
    return folded
