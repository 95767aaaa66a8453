"""A batch of matrix products with an epilogue."""

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Sample, Workload, call, dispatch, register
from tilewright.ops.gemm.dense import checks, samples
from tilewright.ops.gemm.dense.args import MatmulArgs, matmul_args
from tilewright.ops.gemm.dense.raw import differentiated, forward_op, gradient_of, wants_activation_gradient
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
    args = matmul_args(a.mT if trans_a else a, b.mT if trans_b else b, bias, activation, c, alpha, out_dtype)
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
    return product(matmul_args(left, right, bias, activation, c, alpha, out_dtype))


KERNELS = ("sm90.few_rows", "sm90.dense", "triton.dense", "cutile.dense")
FORWARD = forward_op("bmm", KERNELS, batched=True)


def check(args: MatmulArgs) -> None:
    """Raises InputError for what the docstring of `bmm` excludes."""
    checks.check_raw("bmm", 3, args)


def _row(name: str, b: int, m: int, n: int, k: int, layout: str) -> Workload:
    return Workload(name, {"B": b, "M": m, "N": n, "K": k, "layout": layout}, directions=("fwd",))


WORKLOADS = (
    # DeepSeek-V3's absorbed projections, 128 heads: queries to the latent (128 -> 512) and back to values
    _row("mla_absorb_m64", 128, 64, 512, 128, "nn"),
    _row("mla_absorb_m4096", 128, 4096, 512, 128, "nn"),
    _row("mla_values_m64", 128, 64, 128, 512, "nt"),
    _row("experts_m512", 8, 512, 4096, 7168, "nt"),
    _row("experts_m4096", 8, 4096, 4096, 7168, "nt"),
)
CPU_WORKLOADS = (_row("small", 4, 64, 128, 128, "nt"),)

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
        in_place=("c",),
    )
)
