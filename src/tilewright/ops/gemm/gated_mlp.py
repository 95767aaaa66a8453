"""A whole gated MLP: three products and the gate between them, forward and backward."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import Contract, Gradient, RawOp, call, dispatch, register
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.gemm.mlp import args as arguments
from tilewright.ops.gemm.mlp import compose, samples
from tilewright.ops.gemm.mlp import reference as plain
from tilewright.ops.gemm.mlp.args import ACTIVATIONS, GatedMlpArgs, GatedMlpBackwardArgs, GatedMlpBucket, mlp_bucket


@dispatch("gated_mlp")
def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: str = "silu",
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """y = (act(x w_gate^T) * (x w_up^T)) w_down^T, and of what the backward needs it keeps as little as asked.

    x: (..., H) bf16|fp16|fp32.   w_gate, w_up: (I, H), w_down: (O, I) of its dtype, as `nn.Linear` has them.
    Returns (..., O) of x's dtype: the bits of `matmul` and `swiglu`, `geglu` or `relu2` called one after the other.

    activation: "silu" (Llama, Qwen, Mistral), "gelu_tanh" (Gemma), "gelu_erf" or "relu2" (BitNet).
    recompute: if False, x and the two products of it are kept for the backward, M * (H + 2 I) elements; separate ops
    keep act(gate) * up too, torch's also act(gate).   If True, x alone, and the backward makes two products more.
    Gradients of x and the weights.   That of x is a sum of two products, of which the first is rounded before.
    backend: preferred by the ops that this one is made of ("cuda", "triton", "torch").
    Raises InputError for other dtypes, shapes and activations.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020; recomputation: Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", 2016.
    """
    y: Tensor = call(CONTRACT, GatedMlpArgs(x, w_gate, w_up, w_down, activation, recompute), backend)[0]
    return y


def reference(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *, activation: str = "silu", recompute: bool = False
) -> Tensor:
    """Plain torch; equals the Hugging Face modules bit for bit."""
    return plain.forward(GatedMlpArgs(x, w_gate, w_up, w_down, activation, recompute))[0]


FORWARD = RawOp(
    "gated_mlp",
    "fwd",
    GatedMlpArgs,
    package="tilewright.ops.gemm",
    outputs=arguments.outputs,
    reference=plain.forward,
    bucket=mlp_bucket,
    bucket_names=GatedMlpBucket._fields,
    count=3,
    compose=compose.forward,
)
BACKWARD = RawOp(
    "gated_mlp",
    "bwd",
    GatedMlpBackwardArgs,
    package="tilewright.ops.gemm",
    outputs=arguments.gradients,
    reference=plain.backward,
    bucket=mlp_bucket,
    bucket_names=GatedMlpBucket._fields,
    count=4,
    compose=compose.backward,
)


def check(args: GatedMlpArgs) -> None:
    """Raise InputError for what the docstring of `gated_mlp` excludes."""
    x, w_gate, w_up, w_down = args[:4]
    tensors = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    rows.check_floating("gated_mlp", **tensors)
    for name, t in tensors.items():
        if t.dtype != x.dtype:
            raise InputError(f"gated_mlp: {name} is {t.dtype}, x is {x.dtype}; they must have one dtype.")
    if w_gate.dim() != 2 or w_gate.shape[1] != x.shape[-1]:
        raise InputError(f"gated_mlp: w_gate is {tuple(w_gate.shape)}; needs (I, {x.shape[-1]}), as x has columns.")
    if w_up.shape != w_gate.shape:
        raise InputError(f"gated_mlp: w_up is {tuple(w_up.shape)}; needs {tuple(w_gate.shape)}, as w_gate.")
    if w_down.dim() != 2 or w_down.shape[1] != w_gate.shape[0]:
        raise InputError(
            f"gated_mlp: w_down is {tuple(w_down.shape)}; needs (O, {w_gate.shape[0]}), as w_gate has rows."
        )
    if args.activation not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise InputError(f"gated_mlp: activation is {args.activation!r}; allowed are {allowed}.")


def _raw_args(grads: Any, saved: Any, args: GatedMlpArgs, needs: GatedMlpArgs) -> GatedMlpBackwardArgs:
    flags = (bool(need) for need in needs[:4])
    return GatedMlpBackwardArgs(grads[0], *saved, args.activation, args.recompute, *flags)  # type: ignore[call-arg]


CONTRACT = register(
    Contract(
        name="gated_mlp",
        family="gemm",
        summary="a gated MLP, which keeps as little for its backward as is asked",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=samples.inputs,
        cost=samples.cost,
        gradient=Gradient(
            BACKWARD,
            inputs=("x", "w_gate", "w_up", "w_down"),
            save=lambda args, outputs: (*args[:4], *outputs[1:]),
            raw_args=_raw_args,
            recomputes=False,
        ),
        workloads=samples.WORKLOADS,
        cpu_workloads=samples.CPU_WORKLOADS,
        edge_cases=samples.EDGE_CASES,
        bad_inputs=samples.BAD_INPUTS,
    )
)
