"""Matrix product with an epilogue."""

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Sample, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops.gemm.dense import checks, samples
from tilewright.ops.gemm.dense.args import MatmulArgs, matmul_args
from tilewright.ops.gemm.dense.raw import differentiated, forward_op, gradient_of, wants_activation_gradient
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.dense.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.gemm.operands import FP8, fold, folded_out
from tilewright.ops.gemm.scaled_matmul import reference as scaled_reference
from tilewright.ops.gemm.scaled_matmul import scaled_matmul


@dispatch("matmul")
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D = act(alpha * op(A) @ op(B) + bias) + c, accumulated and finished in float32, rounded once.

    a: (..., M, K), or (..., K, M) with trans_a      b: (K, N), or (N, K) with trans_b      Returns (..., M, N_out).
    dtypes: bf16|fp16|fp32|float8_e4m3fn, the same for a and b.  A transpose costs nothing; an operand without a unit
    stride, or leading dimensions that no stride folds into M, cost one copy.

    scale_a, scale_b: scales of float8 operands, both or none: then this is `scaled_matmul`, which has no gradient.
    bias: (N,).   activation: None, "relu", "gelu" (by tanh), "silu", or "swiglu", for which columns of op(B) are pairs
    (gate_0, up_0, gate_1, up_1, ...) and N_out = N / 2: silu(z[:, 0::2]) * z[:, 1::2].   N_out = N otherwise.
    c: (..., M, N_out), bf16|fp16|fp32, a residual or what is accumulated into; may be `out` itself.
    alpha: a number, or one float32 on the device (the product of two per-tensor float8 scales), which has no gradient.
    out_dtype: bf16|fp16|fp32; by default that of a, and bf16 for float8.
    out: tensor to write, its rows contiguous, instead of allocating; no gradient then.
    backend: run on exactly this backend ("cuda", "cutile", "triton", "torch") or raise BackendError.

    Gradients of a, b, bias and c; those of a and b are products of this op in their dtype.  Where one is wanted an
    activation is a separate step, after z in the dtype of the result: one more rounding, nothing computed twice.
    Raises InputError for shapes that do not fit, mixed dtypes, and every option outside of the above.
    """
    if scale_a is not None or scale_b is not None:
        return scaled_matmul(
            a, b, *_both(scale_a, scale_b), bias=bias, activation=activation, c=c,
            alpha=alpha,  # type: ignore[arg-type]  # which refuses a tensor
            trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, out=out, backend=backend,
        )  # fmt: skip
    if not checks.are_matrices(a, b):
        checks.check_operands("matmul", a, b)
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    rows = left.shape[:-1]
    c_rows = fold("matmul", "c", c, rows)
    args = matmul_args(fold("matmul", "a", left, rows), right, bias, activation, c_rows, alpha, out_dtype)
    if out is not None:
        if a.dim() > 2:  # what is wrong with the operands comes before what is wrong with folding `out`
            with torch.no_grad():
                CONTRACT.check(*args)
        call(CONTRACT, args, backend, folded_out("matmul", out, rows))
        return out
    if wants_activation_gradient(args):
        result = differentiated(CONTRACT, args, backend)
    else:
        result = call(CONTRACT, args, backend)
    return result if a.dim() == 2 else result.view(*rows, result.shape[-1])


def reference(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    if scale_a is not None or scale_b is not None:
        return scaled_reference(
            a, b, *_both(scale_a, scale_b), bias=bias, activation=activation, c=c,
            alpha=alpha,  # type: ignore[arg-type]
            trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype,
        )  # fmt: skip
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    rows = left.shape[:-1]
    c_rows = None if c is None else c.flatten(0, -2)
    result = product(matmul_args(left.flatten(0, -2), right, bias, activation, c_rows, alpha, out_dtype))
    return result.reshape(*rows, result.shape[-1])


def _both(scale_a: Tensor | None, scale_b: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale_a is None or scale_b is None:
        present, absent = ("scale_b", "scale_a") if scale_a is None else ("scale_a", "scale_b")
        raise InputError(
            f"matmul: {present} is given and {absent} is not; give both, or none. Ones (1, 1) scale nothing."
        )
    return scale_a, scale_b


KERNELS = ("sm90.few_rows", "sm90.dense", "triton.dense", "cutile.dense")
FORWARD = forward_op("matmul", KERNELS, batched=False)


def check(args: MatmulArgs) -> None:
    """Raises InputError for what the docstring of `matmul` excludes."""
    checks.check_raw("matmul", 2, args)


BAD_INPUTS = (
    *samples.bad_inputs(()),
    BadInput(
        "one scale alone",
        lambda d: Sample(
            (torch.ones(4, 8, device=d).to(FP8), torch.ones(8, 6, device=d).to(FP8)),
            {"scale_a": torch.ones(1, 1, device=d)},
        ),
        "scale_a is given and scale_b is not",
    ),
    BadInput("vector", lambda d: Sample((torch.ones(8, device=d), torch.ones(8, 6, device=d))), "Add a dimension"),
    BadInput(
        "a batch of b", lambda d: Sample((torch.ones(2, 4, 8, device=d), torch.ones(2, 8, 6, device=d))), r"\(K, N\)"
    ),
    BadInput(
        "c of other leading dimensions",
        lambda d: Sample(
            (torch.ones(2, 3, 8, device=d), torch.ones(8, 6, device=d)), {"c": torch.ones(3, 2, 6, device=d)}
        ),
        r"c is \(3, 2, 6\); its leading dimensions are \(2, 3\)",
    ),
)

CONTRACT = register(
    Contract(
        name="matmul",
        family="gemm",
        summary="matrix product with bias, activation, scale and accumulation",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=gradient_of(FORWARD),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=BAD_INPUTS,
        in_place=("c",),
    )
)
