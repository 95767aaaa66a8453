"""A batch of matrix products that are symmetric, on half of the tiles."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import refuse_layout
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.dense.raw import refuses_out
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.operands import Major, aligned, copyable, major_a

OP = "symmetric_matmul"


class SymmetricArgs(NamedTuple):
    a: Tensor  # (B, M, K), contiguous along K
    b: Tensor | None  # (B, M, K), contiguous along K; None is a
    c: Tensor | None  # (B, M, M), contiguous rows
    alpha: float
    beta: float


class SymmetricBucket(NamedTuple):
    B: int  # rounded up to a power of two
    M: int
    K: int
    aligned: int  # TMA can read a and b in place, and write a contiguous result


@dispatch(OP)
def symmetric_matmul(
    a: Tensor,
    b: Tensor | None = None,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D = alpha * A @ B^T + beta * C where that is symmetric: the lower triangle is computed, the upper one its mirror.

    a: (M, K) or (B, M, K) bf16|fp16|fp32.   b: the same as a; a itself where it is None, the Gram matrix A @ A^T (SYRK
    of BLAS, which stores one triangle).   c: (M, M) or (B, M, M), of a's dtype; its upper triangle is not used.
    Returns (M, M) or (B, M, M) of a's dtype, symmetric bit for bit, whether A @ B^T and C are symmetric or not.

    Sums are float32, in which alpha and beta are applied, rounded once.  Tiles above the diagonal are not computed:
    M * (M + 1) * K multiplications and additions instead of 2 * M * M * K.  Products of polynomials of one symmetric
    matrix are symmetric, as Newton-Schulz iterations have them.
    Operands that are not contiguous along K, and rows of c that are not contiguous, cost a copy.

    out: tensor with contiguous rows to write instead of allocating; may be c.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    There is no gradient: raises InputError where one is wanted, and for other shapes and dtypes.
    Source: Dongarra et al., "A set of level 3 basic linear algebra subprograms", 1990.
    """
    refuse_layout(OP, a=a, b=b, c=c)
    if not isinstance(a, Tensor) or a.dim() not in (2, 3):
        raise InputError(f"{OP}: a is {_described(a)}; needs a tensor (M, K) or (B, M, K).")
    single = a.dim() == 2
    a, b, c = (_unit_columns(_batched(t) if single else t) for t in (a, b, c))
    args = SymmetricArgs(a, b, c, alpha, beta)
    if single and out is not None:
        call(CONTRACT, args, backend, _batched(out))
        return out
    result: Tensor = call(CONTRACT, args, backend, out)
    return result[0] if single else result


def _batched(t: Any) -> Any:
    """Returns a matrix as a batch of one; the checks refuse what is none."""
    return t.unsqueeze(0) if isinstance(t, Tensor) and t.dim() == 2 else t


def _unit_columns(t: Any) -> Any:
    matrices = isinstance(t, Tensor) and t.dim() == 3
    return t.clone(memory_format=torch.contiguous_format) if matrices and t.stride(2) != 1 else t


def _described(t: Any) -> str:
    return f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"


def reference(
    a: Tensor, b: Tensor | None = None, *, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """The same in plain torch, which computes all of the product."""
    return _mirrored(SymmetricArgs(a, b, c, alpha, beta))


def _mirrored(args: SymmetricArgs) -> Tensor:
    a, b, c, alpha, beta = args
    other = a if b is None else b
    if c is None and alpha == 1.0:
        z = product(plain_args(a, other.mT, a.dtype))
    else:
        kind = rows.accumulate_dtype(a.dtype)
        z = product(plain_args(a, other.mT, kind)) * alpha
        z = (z if c is None else z + beta * c.to(kind)).to(a.dtype)
    lower = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
    return torch.where(lower, z, z.mT)


def bucket_of(args: SymmetricArgs) -> SymmetricBucket:
    """Returns the sizes and properties that a config is chosen by."""
    a, b = args.a, args.a if args.b is None else args.b
    batch, m, k = a.shape
    is_aligned = along_k(a, b) and aligned(a, b.mT, m, a.dtype)
    return SymmetricBucket(row_bucket(batch), hint(m), hint(k), int(is_aligned))


def along_k(a: Tensor, b: Tensor) -> bool:
    """Returns whether TMA can read both along K: it takes a single column for a row."""
    return major_a(a) is Major.K and major_a(b) is Major.K


FORWARD = RawOp(
    OP,
    "fwd",
    SymmetricArgs,
    package="tilewright.ops.gemm",
    kernels=("triton.symmetric",),
    outputs=lambda args: (((*args.a.shape[:2], args.a.shape[1]), args.a.dtype),),
    reference=_mirrored,
    bucket=bucket_of,
    bucket_names=SymmetricBucket._fields,
    out=True,
    refuses_out=refuses_out,
    direct=lambda out, args: copyable(out) or not bucket_of(args).aligned,
)


def check(args: SymmetricArgs) -> None:
    """Raises InputError for what the docstring of `symmetric_matmul` excludes."""
    a, b, c, _, _ = args
    if a.dtype not in rows.FLOATS:
        raise InputError(f"{OP}: a is {a.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    for name, t, shape in (("b", b, tuple(a.shape)), ("c", c, (*a.shape[:2], a.shape[1]))):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype != a.dtype or tuple(t.shape) != shape:
            raise InputError(f"{OP}: {name} is {_described(t)}; of a {tuple(a.shape)} it needs {shape} {a.dtype}.")
        if t.device != a.device:
            raise InputError(f"{OP}: {name} is on {t.device}, a on {a.device}. Move them to one device.")
    if any(t is not None and t.dim() == 3 and t.stride(2) != 1 for t in (a, b, c)):
        raise InputError(f"{OP}: the last stride of a, b and c must be 1. Call .contiguous().")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a, b, c)):
        raise InputError(f"{OP} has no gradient, and an operand requires one. Use bmm, or torch.no_grad().")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M, K, optional B, c, alpha, beta, b (True: polynomials of one symmetric matrix, of M columns)."""
    g = rows.generator(seed)
    batch, m = params.get("B", 1), params["M"]
    k = m if params.get("b") else params["K"]
    options = {name: params[name] for name in ("alpha", "beta") if name in params}
    if params.get("c"):
        c = rows.random_tensor((batch, m, m), dtype, device, g)
        options["c"] = ((c + c.mT) / 2).contiguous()
    a = rows.random_tensor((batch, m, k), dtype, device, g, max(k, 1) ** -0.5)
    if not params.get("b"):
        return Sample((a,), options)
    x_fp32 = a.to(rows.accumulate_dtype(dtype))
    symmetric = x_fp32 + x_fp32.mT
    return Sample((symmetric.to(dtype), (symmetric @ symmetric + 0.5 * symmetric).to(dtype)), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Half of the products of elements; operands and a triangle of c are read once, the result is written once."""
    a = sample.args[0]
    batch, m, k = a.shape
    c, elements = sample.kwargs.get("c"), batch * m * (m + 1) // 2
    read = rows.nbytes(*sample.args) + (0 if c is None else elements * c.element_size())
    return Cost(2 * elements * k, read, batch * m * m * a.element_size())


def _row(name: str, m: int, k: int, **options: Any) -> Workload:
    return Workload(name, {"M": m, "K": k, **options}, directions=("fwd",))


WORKLOADS = (
    _row("llama8b_up_gram", 4096, 14336),
    _row("llama8b_up_polynomial", 4096, 4096, c=True, alpha=2.0315, beta=-4.775),
    _row("llama8b_kv_gram_b8", 1024, 4096, B=8),
)
CPU_WORKLOADS = (_row("small", 128, 256),)
EDGE_CASES = (
    _row("ragged: two tiles and a bit, in a batch", 136, 72, B=2, c=True, alpha=-0.5, beta=0.25),
    _row("odd_sizes: no row is aligned", 45, 33, c=True),
    _row("two: operands that commute", 72, 72, b=True, beta=2.0, c=True),
    _row("k_1: an outer product", 40, 1),
    _row("one: a single row", 1, 64),
    _row("no_k: nothing to sum", 8, 0, c=True),
    _row("empty: no rows", 0, 32),
)


def _bad(name: str, match: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **c: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        options = {key: torch.ones(value, device=device) for key, value in c.items()}
        return Sample(tuple(torch.ones(shape, device=device).to(dtype) for shape in shapes), options)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("a vector", r"a is \(8,\) torch.float32; needs a tensor \(M, K\)", (8,)),
    _bad("integers", "a is torch.int32; needs one of", (4, 8), dtype=torch.int32),
    _bad("other K", r"b is \(1, 4, 6\) .*; of a \(1, 4, 8\) it needs \(1, 4, 8\)", (4, 8), (4, 6)),
    _bad("other batch", r"b is \(3, 4, 8\)", (2, 4, 8), (3, 4, 8)),
    _bad("c too wide", r"c is \(1, 4, 5\).* it needs \(1, 4, 4\)", (4, 8), c=(4, 5)),
    _bad("c in float32", r"c is \(1, 4, 4\) torch.float32; .*bfloat16", (4, 8), dtype=torch.bfloat16, c=(4, 4)),
)

CONTRACT = register(
    Contract(
        name=OP,
        family="gemm",
        summary="symmetric matrix products, on half of the tiles",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=EDGE_CASES,
        bad_inputs=BAD_INPUTS,
        in_place=("c",),
    )
)
