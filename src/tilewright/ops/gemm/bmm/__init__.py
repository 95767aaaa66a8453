"""A batch of matrix products with an epilogue.  The contract; backends are in the other files of this folder."""

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Sample, Workload, call, dispatch, register
from tilewright.ops.gemm.bmm.workloads import CPU_WORKLOADS, WORKLOADS
from tilewright.ops.gemm.dense import checks, samples
from tilewright.ops.gemm.dense.args import forward_op, gradient_of
from tilewright.ops.gemm.dense.calls import arguments, differentiated, wants_activation_gradient
from tilewright.ops.gemm.dense.reference import product


@dispatch("bmm")
def bmm(
    a: Tensor,
    b: Tensor,
    *,
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
    """D[i] = act(alpha * op(A[i]) @ op(B[i]) + bias) + c[i]: `matmul` of every matrix of a batch, in one launch.

    a: (B, M, K), or (B, K, M) with trans_a      b: (B, K, N), or (B, N, K) with trans_b      Returns (B, M, N_out).
    bias: (N,), one for the whole batch.      c: (B, M, N_out).      Everything else as in `matmul`, gradients included.
    """
    if not checks.are_matrices(a, b):
        checks.check_operands("bmm", a, b)
    args = arguments(a.mT if trans_a else a, b.mT if trans_b else b, bias, activation, c, alpha, out_dtype)
    if out is None and wants_activation_gradient(args):
        return differentiated(CONTRACT, args, backend)
    result: Tensor = call(CONTRACT, args, backend, out)
    return result


def reference(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch; on float64 the result is float64, whatever `out_dtype` says."""
    left, right = (a.mT if trans_a else a), (b.mT if trans_b else b)
    return product(*arguments(left, right, bias, activation, c, alpha, out_dtype))


FORWARD = forward_op("bmm", __name__, batched=True)


def check(*args: object) -> None:
    """Raises InputError for what the docstring of `bmm` excludes."""
    checks.check_raw("bmm", 3, *args)  # type: ignore[arg-type]


CONTRACT = register(
    Contract(
        name="bmm",
        family="gemm",
        summary="a batch of matrix products with bias, activation, scale and accumulation",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=gradient_of(FORWARD),
        workloads=WORKLOADS,
        cpu_workloads=CPU_WORKLOADS,
        edge_cases=(
            *(Workload(w.name, {"B": 3, **w.params}, w.dtypes) for w in samples.EDGE_CASES),
            Workload("one: a batch of one", {"B": 1, "M": 36, "N": 72, "K": 40}),
            Workload("no_batch: nothing to multiply", {"B": 0, "M": 4, "N": 8, "K": 16}),
        ),
        bad_inputs=(
            *samples.bad_inputs((2,)),
            BadInput(
                "batches differ",
                lambda d: Sample((torch.ones(2, 4, 8, device=d), torch.ones(3, 8, 6, device=d))),
                "agree in B",
            ),
            BadInput(
                "one b for all",
                lambda d: Sample((torch.ones(2, 4, 8, device=d), torch.ones(8, 6, device=d))),
                r"needs \(B, M, K\) and \(B, K, N\)",
            ),
        ),
        in_place=(3,),
    )
)
