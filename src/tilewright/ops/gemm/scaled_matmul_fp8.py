"""Product of scaled float8 matrices that ends in float8."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, RawOp, Workload, call, dispatch, register
from tilewright.ops.gemm.operands import FP8, columns_out
from tilewright.ops.gemm.scaled import samples
from tilewright.ops.gemm.scaled.args import ScaledBucket, ScaledMatmulFp8Args, scaled_bucket, with_result
from tilewright.ops.gemm.scaled.calls import operands, transposed
from tilewright.ops.gemm.scaled.checks import check_scaled
from tilewright.ops.gemm.scaled.reference import requantised
from tilewright.ops.gemm.scaled.workloads import LLAMA_8B, layer
from tilewright.ops.quant.formats import pair
from tilewright.ops.quant.layout import TOKEN


@dispatch("scaled_matmul_fp8")
def scaled_matmul_fp8(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Z = act(alpha * op(A * scale_a) @ op(B * scale_b) + bias), cast to float8 with one scale for 128 of a row.

    Arguments as those of `scaled_matmul`.   Returns (q (..., M, N_out) float8_e4m3fn, scales (..., M, ceil(N_out/128))
    float32), what `scaled_matmul` takes next as a and scale_a: scale = max(amax, 1e-4) / 448 of 128 neighbours in a
    row, q = Z / scale.  Z is never rounded to another dtype: the scales are of the float32 result.

    There is no gradient and no out=.  Raises InputError for what `scaled_matmul` refuses.
    """
    rows, operand_args = operands("scaled_matmul_fp8", a, b, scale_a, scale_b, bias, trans_a, trans_b)
    factor = float(alpha) if isinstance(alpha, int) else alpha
    q, scales = call(CONTRACT, ScaledMatmulFp8Args(*operand_args, factor, activation or ""), backend)
    return (q, scales) if a.dim() == 2 else (q.view(*rows, q.shape[1]), scales.unflatten(0, tuple(rows)))


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch; of float64 operands q is Z / scale, not rounded, and both are float64."""
    left, right, left_scale, right_scale = transposed(a, b, scale_a, scale_b, trans_a, trans_b)
    operand_args = (left.flatten(0, -2), right, left_scale.flatten(0, -2), right_scale, bias)
    q, scales = requantised(ScaledMatmulFp8Args(*operand_args, alpha, activation or ""))
    return q.view(*left.shape[:-1], q.shape[1]), scales.unflatten(0, left.shape[:-1])


FORWARD = RawOp(
    "scaled_matmul_fp8",
    "fwd",
    ScaledMatmulFp8Args,
    package="tilewright.ops.gemm",
    kernels=("sm90.fp8", "triton.scaled"),
    outputs=lambda args: pair((args.a.shape[0], columns_out(args.b.shape[1], args.activation)), TOKEN),
    reference=requantised,
    bucket=lambda args: scaled_bucket(with_result(args, FP8)),
    bucket_names=ScaledBucket._fields,
    batch_fields=("M",),
    dtypes=(FP8,),
    count=2,
)


def check(args: ScaledMatmulFp8Args) -> None:
    """Raises InputError for what the docstring of `scaled_matmul_fp8` excludes."""
    check_scaled("scaled_matmul_fp8", with_result(args, torch.float32))


WORKLOADS = (
    *layer("dsv3_7168x2048", 7168, 2048, (16, 4096)),
    *layer("llama8b_gate_up_swiglu", *LLAMA_8B["gate_up"], (1, 64, 4096), activation="swiglu"),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 512, "K": 512}, directions=("fwd",)),)

CONTRACT = register(
    Contract(
        name="scaled_matmul_fp8",
        family="gemm_fp8",
        summary="product of scaled float8 matrices, cast to float8 with one scale for 128 elements of a row",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.quantising_inputs,
        cost=samples.quantising_cost,
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=samples.QUANTISING_CASES,
        bad_inputs=samples.bad_inputs(),
        dtypes=(torch.float8_e4m3fn,),
    )
)
