"""The reduction of a split-K product: partial sums added in order, and the epilogue."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.gemm.dense.checks import check_epilogue, check_out_dtype
from tilewright.ops.gemm.operands import ACTIVATIONS, apply_epilogue, columns_out


class SplitkReduceArgs(NamedTuple):
    partials: Tensor  # (S, M, N)
    bias: Tensor | None  # (N,)
    c: Tensor | None  # (M, N_out)
    activation: str  # "" is none
    out_dtype: torch.dtype


class SplitkReduceBucket(NamedTuple):
    M: int
    N: int
    S: int


@dispatch("splitk_reduce")
def splitk_reduce(
    partials: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D = act(partials[0] + partials[1] + ... + bias) + c, added in this order in float32, rounded once.

    partials: (S, M, N) float32, what each of S parts of K contributed to a product.      Returns (M, N_out).
    bias (N,), activation, c (M, N_out), which may be `out`, and N_out as in `matmul`.   out_dtype: bf16|fp16|fp32, by
    default float32.   backend: run on exactly this backend ("triton", "torch") or raise BackendError.

    For products that are split by hand, say over devices; `matmul` splits by itself, in one launch.
    Raises InputError for partials of another dtype or rank, and what `matmul` refuses of an epilogue.
    """
    if isinstance(partials, Tensor):
        partials = partials.contiguous()
    if isinstance(c, Tensor) and c.dim() == 2 and c.stride(-1) != 1:
        c = c.contiguous()
    if isinstance(bias, Tensor):
        bias = bias.contiguous()
    args = SplitkReduceArgs(partials, bias, c, activation or "", out_dtype or torch.float32)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def reference(
    partials: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    return _raw(SplitkReduceArgs(partials, bias, c, activation or "", out_dtype or torch.float32))


def _raw(args: SplitkReduceArgs) -> Tensor:
    partials, bias, c, activation, out_dtype = args
    is_float64 = partials.dtype == torch.float64
    z = partials[0] if partials.shape[0] > 1 else partials[0].clone()  # never a view of the input
    for part in partials[1:]:
        z = z + part
    return apply_epilogue(z, bias, c, activation, torch.float64 if is_float64 else out_dtype)


FORWARD = RawOp(
    "splitk_reduce",
    "fwd",
    SplitkReduceArgs,
    package="tilewright.ops.gemm",
    kernels=("triton.splitk_reduce",),
    outputs=lambda args: (
        ((args.partials.shape[1], columns_out(args.partials.shape[2], args.activation)), args.out_dtype),
    ),
    reference=_raw,
    bucket=lambda args: _bucket(args.partials),
    bucket_names=SplitkReduceBucket._fields,
    batch_fields=("M",),
    dtypes=(torch.float32,),
    out=True,
)


def _bucket(partials: Tensor) -> SplitkReduceBucket:
    s, m, n = partials.shape
    return SplitkReduceBucket(row_bucket(m), hint(n), hint(s))


def check(args: SplitkReduceArgs) -> None:
    """Raises InputError for what the docstring of `splitk_reduce` excludes."""
    op = "splitk_reduce"
    partials, bias, c, activation, out_dtype = args
    if not isinstance(partials, Tensor) or partials.dtype not in (torch.float32, torch.float64):
        got = partials.dtype if isinstance(partials, Tensor) else f"a {type(partials).__name__}"
        raise InputError(f"{op}: partials is {got}; needs a float32 tensor (S, M, N).")
    if partials.dim() != 3 or partials.shape[0] == 0:
        raise InputError(f"{op}: partials is {tuple(partials.shape)}; needs (S, M, N) with S of at least 1.")
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{op}: activation is {activation!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS[1:]))}."
        )
    check_out_dtype(op, torch.float32, out_dtype)
    check_epilogue(op, tuple(partials.shape[1:]), partials, bias, c, activation)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: S, M, N, optional bias, activation, c.  Partials are float32, the result has `dtype`."""
    g = rows.generator(seed)
    s, m, n = params["S"], params["M"], params["N"]
    activation = params.get("activation")
    n += n % 2 if activation == "swiglu" else 0
    partials = rows.random_tensor((s, m, n), torch.float32, device, g, max(s, 1) ** -0.5)
    options: dict[str, Any] = {"out_dtype": dtype}
    if activation is not None:
        options["activation"] = activation
    if params.get("bias"):
        options["bias"] = rows.random_tensor((n,), dtype, device, g)
    if params.get("c"):
        options["c"] = rows.random_tensor((m, columns_out(n, activation or "")), dtype, device, g)
    return Sample((partials,), options)


def cost(sample: Sample, direction: str) -> Cost:
    """One addition a partial sum; each is read once.  The backward is torch's: the same number for every part."""
    (partials,) = sample.args
    s, m, n = partials.shape
    written = m * columns_out(n, sample.kwargs.get("activation") or "") * sample.kwargs["out_dtype"].itemsize
    return Cost(s * m * n, rows.nbytes(partials, sample.kwargs.get("bias"), sample.kwargs.get("c")), written)


def _bad(name: str, match: str, *shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((torch.ones(shape, device=d, dtype=dtype),), options), match)


CONTRACT = register(
    Contract(
        name="splitk_reduce",
        family="gemm",
        summary="partial products added in order, with an epilogue",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            Workload("dsv3_576x7168_m64", {"S": 8, "M": 64, "N": 576}, directions=("fwd",)),
            Workload("llama8b_down_m128", {"S": 4, "M": 128, "N": 4096}, directions=("fwd",)),
        ),
        cpu_workloads=(Workload("small", {"S": 4, "M": 64, "N": 1024}, directions=("fwd",)),),
        edge_cases=(
            Workload("ragged: a block and a bit", {"S": 3, "M": 9, "N": 1100}),
            Workload("one_part: nothing to add", {"S": 1, "M": 4, "N": 64}),
            Workload("many_parts: in order", {"S": 33, "M": 2, "N": 40}),
            Workload("n_1: one column", {"S": 2, "M": 5, "N": 1}),
            Workload("bias_silu: an epilogue", {"S": 4, "M": 6, "N": 96, "bias": True, "activation": "silu"}),
            Workload("bias_gelu: by tanh", {"S": 4, "M": 6, "N": 96, "bias": True, "activation": "gelu"}),
            Workload("relu: with a residual", {"S": 4, "M": 6, "N": 96, "activation": "relu", "c": True}),
            Workload("swiglu: pairs become one", {"S": 2, "M": 7, "N": 258, "activation": "swiglu", "bias": True}),
            Workload("empty: no rows", {"S": 2, "M": 0, "N": 8}),
        ),
        bad_inputs=(
            _bad("halves", "partials is torch.bfloat16; needs a float32", 2, 4, 8, dtype=torch.bfloat16),
            _bad("a matrix", r"partials is \(4, 8\); needs \(S, M, N\)", 4, 8),
            _bad("no parts", "S of at least 1", 0, 4, 8),
            _bad("unknown activation", "activation is 'tanh'; allowed", 2, 4, 8, activation="tanh"),
            _bad("odd gate", "N must be even", 2, 4, 7, activation="swiglu"),
            _bad("double result", "out_dtype is torch.float64", 2, 4, 8, out_dtype=torch.float64),
            _bad("bias too long", r"bias is \(9,\); needs \(8,\)", 2, 4, 8, bias=torch.ones(9)),
        ),
        batch_dim=None,
        in_place=("c",),
    )
)
