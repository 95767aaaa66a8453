"""`quantize_` and `patch(model, quant=)`: which layers change, what they compute, what is said, stored and undone."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.zoo import build, tokens
from torch import Tensor, nn

import tilewright
from tilewright.errors import InputError, PatchError
from tilewright.generate.checks import fingerprint
from tilewright.models.quantise import FORMATS, LAYERS, converted, plain
from tilewright.nn import WeightOnlyLinear

WIDE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128
}  # fmt: skip
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ERRORS = {"int8": 0.02, "w8a8_int8": 0.05, "mxfp8": 0.12, "fp8": 0.12, "int4": 0.3, "nvfp4": 0.3, "mxfp4": 0.4}
INPUTS: dict[str, Any] = {"w8a8_int8_smooth": {"inputs": tokens(2, 8)}}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(1, 8)).logits.float()


def relative(made: Tensor, wanted: Tensor) -> float:
    return float((made - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize("format", FORMATS)
def test_every_layer_but_the_head(format: str) -> None:
    model = build("llama", **WIDE)
    before = logits(model)
    report = tilewright.quantize_(model, format, **INPUTS.get(format, {}))
    cls = LAYERS.get(format, WeightOnlyLinear)
    changed = {path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, cls)}
    assert changed == LINEARS
    assert report.counts() == {"quant": 7 * len(model.model.layers)}
    left = {row.path: row.text for row in report.rows if row.status == "left"}
    assert left == {"lm_head": "the head of a model, or tied to an embedding, stays as it is"}
    assert 0 < relative(logits(model), before) < ERRORS[plain(format)]


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp8", "mxfp4", "nvfp4"])
def test_a_layer_multiplies_by_what_it_dequantises_to(format: str) -> None:
    linear = nn.Linear(96, 40)
    layer = WeightOnlyLinear.from_linear(linear, format)
    x = torch.randn(2, 3, 96)
    wanted = F.linear(x, layer.dequantize(torch.float32), linear.bias)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    assert relative(layer.dequantize(torch.float32), linear.weight) < 0.15
    assert sum(t.nbytes for t in layer.parts()) < 0.3 * linear.weight.nbytes + 100


@pytest.mark.parametrize("format", ["int4", "nvfp4", "mxfp8"])
def test_state_dict_dtypes_and_copies(format: str) -> None:
    layer = WeightOnlyLinear.from_linear(nn.Linear(160, 24), format)
    x = torch.randn(3, 160)
    wanted = layer(x)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = WeightOnlyLinear(160, 24, format=format)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), wanted)
    assert torch.equal(copy.deepcopy(layer)(x), wanted)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert [t.dtype for t in half.parts()] == [t.dtype for t in layer.parts()]
    assert [t.stride() for t in half.parts()] == [t.stride() for t in layer.parts()]
    assert half(x.bfloat16()).dtype == torch.bfloat16
    wide = nn.Linear(160, 24)
    other.load_state_dict(wide.state_dict())
    assert torch.equal(other(x), WeightOnlyLinear.from_linear(wide, format)(x))


def test_a_gradient_goes_to_the_input() -> None:
    layer = WeightOnlyLinear.from_linear(nn.Linear(64, 32), "mxfp4")
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize(torch.float32).sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


def test_what_is_left_is_said() -> None:
    model = build("llama", **WIDE)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *a: None)
    report = tilewright.quantize_(
        model, skip=("q_proj", "model.layers.1.self_attn.k_proj"), filter=lambda path, layer: "v_proj" not in path
    )
    text = {row.path: row.text for row in report.rows}
    assert text["model.layers.0.mlp.up_proj"] == text["model.layers.1.mlp.up_proj"]
    assert text["model.layers.0.mlp.up_proj"] == "its weight is shared with another module"
    assert text["model.layers.0.mlp.down_proj"] == "it has hooks or a parametrization"
    assert text["model.layers.0.self_attn.q_proj"] == text["model.layers.1.self_attn.k_proj"] == "named in skip="
    assert text["model.layers.0.self_attn.v_proj"] == "the filter leaves it"
    assert text["model.layers.0.self_attn.k_proj"] == "nn.WeightOnlyLinear of int4"


def test_refusals() -> None:
    with pytest.raises(InputError, match="format is 'int3'; allowed are 'int8', 'int4', 'fp8'"):
        tilewright.quantize_(nn.Linear(512, 512), "int3")
    with pytest.raises(PatchError, match=r"(?s)nothing in Linear can be quantised to int4.*the model itself"):
        tilewright.quantize_(nn.Linear(512, 512))
    with pytest.raises(InputError, match=r"is 'w8a8_int8_smooth', which is calibrated. Give inputs="):
        tilewright.quantize_(nn.Linear(512, 512), "w8a8_int8_smooth")
    with pytest.raises(PatchError, match="w8a8_int8_smooth is calibrated. Call"):
        converted(nn.Linear(16, 16), "w8a8_int8_smooth")
    with pytest.raises(InputError, match="40 inputs; mxfp4 needs a multiple of 32"):
        WeightOnlyLinear.from_linear(nn.Linear(40, 32), "mxfp4")
    model = build("llama", **WIDE)
    with tilewright.patch(model, verify=False), pytest.raises(PatchError, match="this model is patched"):
        tilewright.quantize_(model)


@pytest.mark.parametrize("format", ["w8a8_int8_smooth", "mxfp4", "int4_rotated"])
def test_a_patch_is_verified_and_undone(format: str) -> None:
    model = build("llama", **WIDE)
    before, prints, linear = logits(model), fingerprint(model), model.model.layers[0].mlp.up_proj
    with tilewright.patch(model, quant=format, **INPUTS.get(format, {})) as p:
        assert p.report().counts()["quant"] == 7 * len(model.model.layers)
        result = p.verify()
        assert result.passed and result.logits.narrow > 0
        assert isinstance(model.model.layers[0].mlp.up_proj, LAYERS.get(format, WeightOnlyLinear))
        assert relative(logits(model), before) > 1e-4
    assert model.model.layers[0].mlp.up_proj is linear
    assert fingerprint(model) == prints
    assert torch.equal(logits(model), before)


def test_generation_and_compilation() -> None:
    model = build("llama", **WIDE)
    tilewright.quantize_(model, "int4")
    made = model.generate(tokens(1, 8), max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 12)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 512)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), layer(x))
    nvfp4 = WeightOnlyLinear.from_linear(nn.Linear(512, 512), "nvfp4")
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(nvfp4, backend="aot_eager", fullgraph=True)(x), nvfp4(x))
