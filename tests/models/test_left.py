"""Modules that look like ours and compute something else: each must be left, with the reason."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.models.zoo import build
from torch import Tensor, nn

from tilewright.models import decoder_layers, gated_norms, mlps, norms, patch
from tilewright.models.rotary import functions
from tilewright.models.stand_in import NotReplaceable


class Norm(nn.Module):
    """Right in every respect; each case below breaks one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class NormIgnoresEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)


class NormPlusTwo(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return ((2 + self.weight) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class NormEpsOutsideTheRoot(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).to(x.dtype)


class NormOffsetInBf16(Norm):
    """Adds one, but to a weight rounded to bf16: agrees with 1 + weight in float32 only."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight).bfloat16()).to(x.dtype)


class GatedNorm(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * F.silu(gate)


class ConditionedNorm(Norm):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) * scale + shift


class NormWithoutEps(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.eps


class NormWithDropout(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (NormIgnoresEps, "none of the known formulas"),
        (NormPlusTwo, "none of the known formulas"),
        (NormEpsOutsideTheRoot, "none of the known formulas"),
        (NormOffsetInBf16, "none of the known formulas"),
        (NormWithDropout, "none of the known formulas"),
        (NormWithoutEps, "no eps"),
        (lambda: nn.BatchNorm1d(16), "raised RuntimeError"),
        (lambda: nn.GroupNorm(4, 16), "raised RuntimeError"),
        (lambda: nn.RMSNorm(16), "no eps"),
        (lambda: nn.LayerNorm((4, 4)), "more than one dimension"),
        (lambda: nn.LayerNorm(16, elementwise_affine=False), "no weight"),
    ],
)
def test_norm_is_left(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(NotReplaceable, match=reason):
        norms.find(make(), None)


@pytest.mark.parametrize(("make", "reason"), [(GatedNorm, "no known RMSNorm"), (ConditionedNorm, "is no RMSNorm")])
def test_norm_with_a_gate_is_left(make: Callable[[], nn.Module], reason: str) -> None:
    assert norms.find(make(), None) is None
    with pytest.raises(NotReplaceable, match=reason):
        gated_norms.find(make(), None)


def test_an_eps_alone_makes_no_norm() -> None:
    class Threshold(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.abs() > self.eps, x * self.weight, x)

    assert norms.find(Threshold(), None) is None


def test_the_norm_the_cases_break_is_found() -> None:
    found = norms.find(Norm(), None)
    assert found is not None
    assert found.text == "ops.rms_norm, cast then weight (bitwise)"


def test_weights_of_one_do_not_hide_the_formula() -> None:
    class InFloat32(Norm):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return (self.weight.float() * normed).to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        found = norms.find(InFloat32().to(dtype), None)
        assert found is not None
        assert found.text == "ops.rms_norm, weight in float32 (bitwise)"


def test_forward_overridden_on_the_instance_is_left() -> None:
    module = Norm()
    module.forward = module.forward  # type: ignore[method-assign]
    with pytest.raises(NotReplaceable, match="overridden on the instance"):
        norms.find(module, None)


def test_class_that_registers_its_subclasses_is_left() -> None:
    registry = []

    class RegisteringNorm(Norm):
        def __init_subclass__(cls) -> None:
            registry.append(cls)

    with pytest.raises(NotReplaceable, match="acts on being subclassed"):
        norms.find(RegisteringNorm(), None)
    assert not registry


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 32, bias=False)
        self.b = nn.Linear(16, 32, bias=False)
        self.c = nn.Linear(32, 16, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x)) * self.b(x))


class SecondIsTheGate(Mlp):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.c(self.act(self.b(hidden)) * self.a(hidden))


class Relu(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * self.b(x))


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.c(self.act(self.a(x)) * self.b(x))


class Clamped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.a(x).clamp(max=1.0)) * self.b(x))


class DropsInside(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.dropout(self.act(self.a(x)) * self.b(x), 0.5, self.training))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(16, 64)
        self.out = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


@pytest.mark.parametrize("make", [Relu, Scaled, Clamped, DropsInside, Packed])
def test_mlp_is_left(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(NotReplaceable, match="is not down"):
        mlps.find(make(), None)


def test_roles_come_from_behaviour_not_from_names() -> None:
    found, swapped = mlps.find(Mlp(), None), mlps.find(SecondIsTheGate(), None)
    assert found is not None
    assert swapped is not None
    assert found.text == "ops.swiglu, silu(a) * b (bitwise)"
    assert swapped.text == "ops.swiglu, silu(b) * a (bitwise)"


def test_replaced_forward_keeps_its_argument_name() -> None:
    model = nn.ModuleList([SecondIsTheGate()])
    x = torch.randn(3, 16)
    expected = model[0](hidden=x)
    patch(model, verify=False)
    torch.testing.assert_close(model[0](hidden=x), expected)
    torch.testing.assert_close(model[0](x), expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_activations_are_told_apart(activation: str) -> None:
    report = patch(build("llama", hidden_act=activation), verify=False, ops=["mlp"]).report()
    names = {"gelu": "gelu(gate", "gelu_pytorch_tanh": "gelu_tanh(gate", "silu": "silu(gate"}
    assert [names[activation] in row.text for row in report.rows if row.kind == "mlp"] == [True, True]


def apply_rotary_with_the_wrong_sign(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) - torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    return rotated(q), rotated(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_with_the_wrong_sign(q, k, cos, sin)


def test_wrong_rotation_is_left() -> None:
    with pytest.raises(
        NotReplaceable, match=r"apply_rotary_with_the_wrong_sign\(q, k, cos, sin\) is none of the rotations"
    ):
        functions.find(Attention(), frozenset(), None)


def test_scaled_residual_is_left() -> None:
    """Granite multiplies both branches before the add by one number; this layer leaves out the second."""
    from transformers.models.granite.modeling_granite import GraniteDecoderLayer

    class ScalesOnce(GraniteDecoderLayer):
        def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended * self.residual_multiplier
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    model = build("granite")
    for layer in model.model.layers:
        layer.__class__ = ScalesOnce
    report = patch(model, verify=False).report()
    assert {row.text for row in report.rows if row.kind == "add_norm"} == {
        "does not compute h = x + attention(norm(x)), then h + mlp(norm(h))"
    }


def test_residual_dropout_is_left() -> None:
    model = build("phi3", resid_pdrop=0.1)
    assert "add_norm" not in patch(model, verify=False).report().counts()


def test_functional_residual_dropout_is_left() -> None:
    """Invisible in evaluation mode, and not a child module: only the probe in training mode can find it."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class DroppingLayer(LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + F.dropout(attended, 0.1, self.training)
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    model = build("llama")
    model.model.layers[0].__class__ = DroppingLayer
    report = patch(model, verify=False).report()
    assert [row.status for row in report.rows if row.kind == "add_norm"] == ["left", "replaced"]


def test_hooked_norm_is_not_fused() -> None:
    model = build("llama")
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: None)
    report = patch(model, verify=False).report()
    assert report.counts()["add_norm"] == 1
    assert [r.text for r in report.rows if r.kind == "add_norm" and r.status == "left"] == [
        "post_attention_layernorm has hooks, which a fused call would skip"
    ]


def test_layer_with_one_norm_is_no_candidate() -> None:
    assert decoder_layers.find(Mlp(), {}, None) is None
