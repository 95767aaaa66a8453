"""Product of scaled float8 matrices that ends in float8.  The contract; backends are in this folder."""

import torch
from torch import Tensor

from tilewright.dispatch import Contract, call, dispatch, register
from tilewright.ops.gemm.scaled import samples
from tilewright.ops.gemm.scaled.args import quantising_op
from tilewright.ops.gemm.scaled.calls import operands, transposed
from tilewright.ops.gemm.scaled.checks import check_scaled
from tilewright.ops.gemm.scaled.reference import requantised
from tilewright.ops.gemm.scaled_matmul_fp8.workloads import CPU_WORKLOADS, WORKLOADS


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
    q, scales = call(CONTRACT, (*operand_args, factor, activation or ""), backend)
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
    q, scales = requantised(*operand_args, alpha, activation or "")
    return q.view(*left.shape[:-1], q.shape[1]), scales.unflatten(0, left.shape[:-1])


FORWARD = quantising_op(__name__)


def check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    alpha: float,
    activation: str,
) -> None:
    """Raises InputError for what the docstring of `scaled_matmul_fp8` excludes."""
    check_scaled("scaled_matmul_fp8", a, b, scale_a, scale_b, bias, None, alpha, activation)


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
