"""gated_mlp: a Hugging Face MLP as one op, which keeps x, gate and up for its backward, or x alone."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import BitNetConfig, Gemma2Config, LlamaConfig
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from tilewright import ops

H, INNER, M = 24, 40, 6
SIZES = {"hidden_size": H, "intermediate_size": INNER}
ONE_AFTER_THE_OTHER = {
    "silu": ops.swiglu,
    "gelu_tanh": ops.geglu,
    "gelu_erf": lambda gate, up: ops.geglu(gate, up, approximate="none"),
    "relu2": ops.relu2,
}


def problem(dtype=torch.float32, batch=2):
    x = torch.randn(batch, M, H, dtype=dtype)
    weights = [torch.randn(n, k, dtype=dtype) * k**-0.5 for n, k in ((INNER, H), (INNER, H), (H, INNER))]
    return [t.requires_grad_() for t in (x, *weights)]


def separate(x, w_gate, w_up, w_down, activation):
    gate, up = (ops.matmul(x, w, trans_b=True) for w in (w_gate, w_up))
    return ops.matmul(ONE_AFTER_THE_OTHER[activation](gate, up), w_down, trans_b=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ONE_AFTER_THE_OTHER)
def test_the_bits_of_the_separate_ops(activation, dtype):
    inputs = problem(dtype)
    with torch.no_grad():
        wanted = separate(*inputs, activation)
    for recompute in (False, True):
        assert torch.equal(ops.gated_mlp(*inputs, activation=activation, recompute=recompute), wanted)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ONE_AFTER_THE_OTHER)
def test_the_gradients_of_the_separate_ops(activation, recompute):
    inputs = problem()
    dy = torch.randn(2, M, H)
    ours, theirs = ops.gated_mlp(*inputs, activation=activation, recompute=recompute), separate(*inputs, activation)
    grads, wanted = (torch.autograd.grad(y, inputs, dy) for y in (ours, theirs))
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (lambda: LlamaMLP(LlamaConfig(**SIZES, num_attention_heads=2)), "silu"),
        (lambda: Gemma2MLP(Gemma2Config(**SIZES)), "gelu_tanh"),
        (lambda: BitNetMLP(BitNetConfig(**SIZES)), "relu2"),
    ],
)
def test_it_is_hugging_faces_module(module, activation):
    mlp, x = module(), torch.randn(2, M, H)
    if activation == "relu2":
        mlp.ffn_sub_norm = torch.nn.Identity()  # a norm between the product and down_proj
    weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    assert torch.equal(ops.gated_mlp(x, *weights, activation=activation, backend="torch"), mlp(x))


def kept(function, leaves):
    """Elements that autograd keeps, other than those of `leaves`."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = function()
    for leaf in leaves:
        seen.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(seen.values()), y


@pytest.mark.parametrize(("recompute", "elements"), [(False, 2 * 2 * M * INNER), (True, 0)])
def test_what_is_kept_beside_x_and_the_weights(recompute, elements):
    inputs = problem()
    count, y = kept(lambda: ops.gated_mlp(*inputs, recompute=recompute), inputs)
    assert count == elements
    assert y.requires_grad
    apart, _ = kept(lambda: separate(*inputs, "silu"), inputs)
    assert apart >= 3 * 2 * M * INNER


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_weights_get_no_gradient(recompute):
    x, w_gate, w_up, w_down = problem()
    w_gate.requires_grad_(False)
    w_down.requires_grad_(False)
    ops.gated_mlp(x, w_gate, w_up, w_down, recompute=recompute).sum().backward()
    assert w_gate.grad is None
    assert w_down.grad is None
    wanted = torch.autograd.grad(separate(x, w_gate, w_up, w_down, "silu").sum(), (x, w_up))
    torch.testing.assert_close((x.grad, w_up.grad), wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_gradients(recompute):
    shapes = (1, 3, 4), (5, 4), (5, 4), (2, 5)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradgradcheck(lambda *tensors: ops.gated_mlp(*tensors, recompute=recompute), inputs)
