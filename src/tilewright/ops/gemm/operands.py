"""What every GEMM of this family shares: majors and layouts of operands, alignment, and the one definition of the
epilogue.

A transposed operand is nothing but strides here: `a` is always (..., M, K) and `b` (..., K, N), and their majors say
along which dimension memory is contiguous.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError

ACTIVATIONS = ("", "relu", "gelu", "silu", "swiglu")
"""What the raw ops call activations; "" is none, "gelu" the tanh form."""

LAYOUTS = ("nt", "nn", "tn", "tt")
"""Layout codes as BLAS names them, for `a` then `b`: "n" is row-major as written in the product A (M, K) @ B (K, N)."""

VECTOR = 16  # bytes: what the copy engine moves at once, and its alignment


class Major(IntEnum):
    """The dimension along which an operand is contiguous: K, or its other one (M of `a`, N of `b`)."""

    K = 0
    MN = 1


def major_a(a: Tensor) -> Major | None:
    """Major of `a` (..., M, K); None where neither stride is 1."""
    return _major(a, -1, -2)


def major_b(b: Tensor) -> Major | None:
    """Major of `b` (..., K, N); None where neither stride is 1."""
    return _major(b, -2, -1)


def _major(t: Tensor, k: int, mn: int) -> Major | None:
    # Where both strides are 1 one of the two dimensions has a single element, and the other decides
    if hint(t.stride(k)) == 1 and (hint(t.shape[k]) > 1 or hint(t.stride(mn)) != 1):
        return Major.K
    if hint(t.stride(mn)) == 1:
        return Major.MN
    return None


def unit_stride(t: Tensor) -> Tensor:
    """`t` itself if one of its last two strides is 1, else a contiguous copy.  What has no strides is left for the
    checks.
    """
    try:
        strides = t.stride()
    except RuntimeError:
        return t
    if strides[-1] == 1 or strides[-2] == 1 or t.layout is not torch.strided:
        return t
    # not t.contiguous(), which gives back a tensor of one element whatever its strides
    return t.clone(memory_format=torch.contiguous_format)


def layout_code(a: Tensor, b: Tensor) -> int:
    """0 nt, 1 nn, 2 tn, 3 tt: `a` M-major is the first "t", `b` K-major the second; `x @ w.T` of row-major x and w is
    nt.
    """
    if major_a(a) is Major.MN:
        return 3 if major_b(b) is Major.K else 2
    return 0 if major_b(b) is Major.K else 1


def aligned(a: Tensor, b: Tensor, n_out: int, out_dtype: torch.dtype) -> bool:
    """Can the copy engine read `a` and `b` and write a row-contiguous result of `n_out` columns?

    Addresses and every stride but the unit one have to be multiples of 16 bytes, and so has a row of the result.
    Addresses of tensors without memory of their own (fake, meta, wrapped by functorch) are their storage offsets.
    """
    return copyable(a) and copyable(b) and hint(n_out) * out_dtype.itemsize % VECTOR == 0


def copyable(t: Tensor) -> bool:
    """Can the copy engine read or write `t` as it lies in memory?"""
    if _address(t) % VECTOR:
        return False
    size, found = t.element_size(), False
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if hint(n) == 1:  # one element steps nowhere
            continue
        step = hint(stride)
        if step == 1 and not found and dim >= t.dim() - 2:  # a batch has no line of its own, whatever its stride
            found = True
        elif step * size % VECTOR or not step:  # the copy engine repeats no row
            return False
    return True


def _address(t: Tensor) -> int:
    if t.is_meta or is_fake(t) or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return hint(t.storage_offset()) * t.element_size()
    return t.data_ptr()


def columns_out(n: int, activation: str) -> int:
    """Columns of the result for `n` columns of op(B): half of them where pairs of columns become one."""
    return n // 2 if activation == "swiglu" else n


def apply_epilogue(z: Tensor, bias: Tensor | None, c: Tensor | None, activation: str, out_dtype: torch.dtype) -> Tensor:
    """act(z + bias) + c in z's dtype, rounded once to `out_dtype`: what every engine does with its accumulator.

    z: (..., M, N) float32 (float64 in the oracle), scaled by alpha already.   bias: (N,)   c: (..., M, N_out)
    """
    if bias is not None:
        z = z + bias.to(z.dtype)
    z = activate(z, activation)
    if c is not None:
        z = z + c.to(z.dtype)
    return z.to(out_dtype)


def activate(z: Tensor, activation: str) -> Tensor:
    """The activation in z's dtype.  "swiglu" gates: silu(z[..., 0::2]) * z[..., 1::2]."""
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
    """`t` (*rows, N) as (M, N): a view where strides allow.  Anything but such a tensor is left for the checks."""
    if not isinstance(t, Tensor) or (t.dim() == 2 and len(rows) == 1) or t.layout is not torch.strided:
        return t
    if tuple(t.shape[:-1]) != tuple(rows):
        raise InputError(f"{op}: {name} is {tuple(t.shape)}; its leading dimensions are {tuple(rows)}, as those of a.")
    return t.flatten(0, -2)


def folded_out(op: str, out: Any, rows: Sequence[int]) -> Tensor:
    """`out` (*rows, N) as (M, N), the same memory."""
    if not isinstance(out, Tensor):
        raise InputError(f"{op}: out is a {type(out).__name__}; needs a torch.Tensor.")
    # A dimension of one element steps nowhere: it neither breaks a fold nor vouches for one
    leading = [i for i in range(out.dim() - 1) if out.shape[i] != 1]
    if out.numel() and any(out.stride(i) != out.shape[j] * out.stride(j) for i, j in pairwise(leading)):
        raise InputError(
            f"{op}(out=...) has strides {out.stride()}; its leading dimensions must fold into one. "
            "Pass contiguous memory, or leave out= away."
        )
    folded: Tensor = fold(op, "out", out, rows)
    return folded
