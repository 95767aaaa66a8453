"""Product of scaled float8 matrices with an epilogue."""

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, RawOp, Sample, call, dispatch, register
from tilewright.ops.gemm.dense.checks import check_out_dtype
from tilewright.ops.gemm.dense.raw import refuses_out
from tilewright.ops.gemm.operands import FP8, columns_out, copyable, fold, folded_out
from tilewright.ops.gemm.scaled import samples
from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulArgs, scaled_bucket
from tilewright.ops.gemm.scaled.calls import operands, transposed
from tilewright.ops.gemm.scaled.checks import check_scaled
from tilewright.ops.gemm.scaled.reference import product
from tilewright.ops.gemm.scaled.workloads import CPU_WORKLOADS, WORKLOADS


@dispatch("scaled_matmul")
def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    alpha: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """D = act(alpha * op(A * scale_a) @ op(B * scale_b) + bias) + c of float8 matrices, one rounding.

    a: (..., M, K), or (..., K, M) with trans_a      b: (K, N), or (N, K) with trans_b      float8_e4m3fn
    scale_a, scale_b: float32, one for each block of their operand, lying as it does, transposed where it is.  Of
    op(A) (M, K) they are (1, 1), one for all; (M, 1), one a row; (M, ceil(K/128)), 1x128; (ceil(M/128), ceil(K/128)),
    128x128; of op(B) transposed, (N, K), the same.   Returns (..., M, N_out).

    Kernels exist for four pairs: one each; one a row and one a column; 1x128 times 128x128 (activations and weights,
    DeepGEMM's recipe (1, 128, 128)); 1x128 times 1x128 (weight gradients, (1, 1, 128)).  Torch computes the others.
    Products of 128 along K are summed by the tensor core, and those sums, scaled, in float32.  Operands that are not
    contiguous along K (x @ w.T of row-major x and w is), and scales in another layout than the casts of this library
    write, cost a copy, which is logged once.

    bias (N,), activation, c (..., M, N_out), which may be `out`, out: as in `matmul`.   alpha: a number.
    out_dtype: bf16|fp16|fp32, by default bf16.
    backend: run on exactly this backend ("cuda", "triton", "torch") or raise BackendError.
    There is no gradient: raises InputError where one is wanted, and for all that is outside of the above.
    """
    rows, operand_args = operands("scaled_matmul", a, b, scale_a, scale_b, bias, trans_a, trans_b)
    if isinstance(c, Tensor) and c.dim() > 1 and c.stride(-1) != 1:
        c = c.contiguous()
    c = fold("scaled_matmul", "c", c, rows)
    factor = float(alpha) if isinstance(alpha, int) else alpha
    args = ScaledMatmulArgs(*operand_args, c, factor, activation or "", out_dtype or _BF16)
    if out is not None:
        if a.dim() > 2:  # what is wrong with the operands comes before what is wrong with folding `out`
            with torch.no_grad():
                CONTRACT.check(*args)
        call(CONTRACT, args, backend, folded_out("scaled_matmul", out, rows))
        return out
    result: Tensor = call(CONTRACT, args, backend)
    return result if a.dim() == 2 else result.view(*rows, result.shape[-1])


_BF16 = torch.bfloat16


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    alpha: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 operands the result is float64, whatever `out_dtype` says."""
    left, right, left_scale, right_scale = transposed(a, b, scale_a, scale_b, trans_a, trans_b)
    left_scale, c_rows = left_scale.flatten(0, -2), None if c is None else c.flatten(0, -2)
    operand_args = (left.flatten(0, -2), right, left_scale, right_scale, bias, c_rows)
    result = product(ScaledMatmulArgs(*operand_args, alpha, activation or "", out_dtype or _BF16))
    return result.reshape(*left.shape[:-1], result.shape[-1])


FORWARD = RawOp(
    "scaled_matmul",
    "fwd",
    ScaledMatmulArgs,
    package="tilewright.ops.gemm",
    kernels=("sm90.few_rows_scaled", "sm90.fp8", "triton.scaled"),
    outputs=lambda args: (((args.a.shape[0], columns_out(args.b.shape[1], args.activation)), args.out_dtype),),
    reference=product,
    bucket=scaled_bucket,
    bucket_names=ScaledBucket._fields,
    batch_fields=("M",),
    dtypes=(FP8,),
    out=True,
    refuses_out=refuses_out,
    direct=lambda out, args: copyable(out) or not scaled_bucket(args).aligned,
)


def check(args: ScaledMatmulArgs) -> None:
    """Raises InputError for what the docstring of `scaled_matmul` excludes."""
    check_scaled("scaled_matmul", args)
    check_out_dtype("scaled_matmul", FP8, args.out_dtype)


BAD_INPUTS = (
    *samples.bad_inputs(),
    samples.bad("integer result", "out_dtype is torch.int32; of torch.float8_e4m3fn", out_dtype=torch.int32),
    samples.bad("float8 result", "out_dtype is torch.float8_e4m3fn; of", out_dtype=torch.float8_e4m3fn),
    samples.bad("c too wide", r"c is \(4, 7\); needs \(4, 6\)", c=((4, 7),)),
    samples.bad("c of a gate is full", r"c is \(4, 6\); needs \(4, 3\)", c=((4, 6),), activation="swiglu"),
    BadInput(
        "c of other leading dimensions",
        lambda d: Sample(samples.ones(d, a=(2, 3, 256), scale_a=(2, 3, 2)), {"c": torch.ones(3, 2, 6, device=d)}),
        r"c is \(3, 2, 6\); its leading dimensions are \(2, 3\)",
    ),
)

CONTRACT = register(
    Contract(
        name="scaled_matmul",
        family="gemm_fp8",
        summary="product of float8 matrices scaled by tensor, row or block, with bias, activation and accumulation",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=BAD_INPUTS,
        in_place=("c",),
    )
)
