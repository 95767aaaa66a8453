"""`patch(model, fp8=True)`: which layers run in float8, what they compute, how that is judged and taken back."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.fake_table import Planted, planted_backend, product
from tests.models.zoo import VOCABULARY, build, tokens
from torch import Tensor, nn

from tilewright import ops
from tilewright.errors import InputError, VerificationError
from tilewright.generate.checks import fingerprint
from tilewright.models import fp8_linears, patch
from tilewright.models.specialise import Patched
from tilewright.ops.quant import numbers
from tilewright.ops.quant.layout import BLOCK, TOKEN

H, INNER = 512, 640
WIDE: dict[str, Any] = {
    "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128
}  # fmt: skip


def wide(name: str = "llama", **options: Any) -> nn.Module:
    """A model of the zoo whose layers are large enough for float8."""
    return build(name, **{**WIDE, **options})


def logits(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(1, 8) if ids is None else ids).logits


def rounded(x: Tensor, layout: Any) -> Tensor:
    """What is left of x after a cast, in float64."""
    q, scales = numbers.cast(x.detach(), layout)
    return numbers.restore(q.double(), scales.double(), layout, torch.float64)


def rows(model: nn.Module, kind: str = "fp8", **options: Any) -> dict[str, tuple[str, str]]:
    """Status and text by the last name of a path, of all rows of a kind."""
    with patch(model, verify=False, **options) as p:
        return {row.path.rpartition(".")[2]: (row.status, row.text) for row in p.report().rows if row.kind == kind}


def test_which_layers_are_replaced() -> None:
    made = rows(wide(), fp8=True)
    assert {name for name, (status, _) in made.items() if status == "replaced"} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "mlp"
    }  # fmt: skip
    assert made["gate_proj"][1] == made["up_proj"][1] == made["down_proj"][1] == "within its MLP's float8 products"
    assert made["lm_head"] == ("left", "the head of a model stays as it is")
    assert rows(wide()) == {}


def test_small_layers_and_odd_sizes_are_left() -> None:
    made = rows(wide(num_key_value_heads=1, intermediate_size=520), fp8=True)
    assert made["k_proj"] == ("left", "512 inputs and 128 outputs; below 512 a layer stays as it is")
    assert made["up_proj"] == ("left", "512 inputs and 520 outputs are not multiples of 16, as float8 products need")
    assert made["q_proj"][0] == "replaced"
    assert "mlp" not in made
    assert rows(build("llama"), fp8=True)["q_proj"][0] == "left"


def test_a_tied_head_is_a_head_without_being_asked_for() -> None:
    model = nn.Sequential(nn.Embedding(512, 512), nn.Linear(512, 512), nn.Linear(512, 512, bias=False))
    model[2].weight = model[0].weight
    made = rows(model, fp8=True)
    assert {name: status for name, (status, _) in made.items()} == {"1": "replaced", "2": "left"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_multiplies_rounded_numbers(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(H, INNER, bias=bias, dtype=dtype).requires_grad_(False)
    patch(layer, fp8=True, verify=False)
    for x in (torch.randn(2, 3, H, dtype=dtype), torch.randn(1, H, dtype=dtype)):
        exact = rounded(x.flatten(0, -2), TOKEN) @ rounded(layer.weight, BLOCK).mT
        exact = (exact + (layer.bias.double() if bias else 0)).view(*x.shape[:-1], INNER)
        got = layer(x)
        assert got.dtype == dtype
        assert (got.double() - exact).norm() <= (2e-6 if dtype == torch.float32 else 3e-3) * exact.norm()
    assert layer(input=x).shape == (1, INNER), "torch's name of the argument"


def test_an_mlp_is_two_products() -> None:
    torch.manual_seed(0)
    model = wide()
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, H)
    p = patch(model, fp8=True, verify=False)
    with torch.no_grad():
        got = mlp(x)
    pair = rounded(torch.stack((mlp.gate_proj.weight, mlp.up_proj.weight), 1).flatten(0, 1), BLOCK)
    both = rounded(x.flatten(0, 1), TOKEN) @ pair.mT
    inner = F.silu(both[:, 0::2]) * both[:, 1::2]
    exact = rounded(inner.float(), TOKEN) @ rounded(mlp.down_proj.weight, BLOCK).mT
    assert (got.flatten(0, 1).double() - exact).norm() < 2e-3 * exact.norm()  # a sum that rounds the other way
    assert type(mlp.gate_proj) is nn.Linear
    p.undo()
    assert got.shape == mlp(x).shape


def test_hooks_on_a_projection_are_not_passed_by() -> None:
    model, seen = wide(), []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *args: seen.append(1))
    patch(model, fp8=True, verify=False)
    logits(model)
    assert seen == [1]
    assert isinstance(mlp.up_proj, Patched)
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear


def test_calls_that_want_a_gradient_run_as_before() -> None:
    model = wide()
    plain = copy.deepcopy(model)
    patch(model, fp8=True, ops=[], verify=False)
    ids = tokens(1, 8)
    got, wanted = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert torch.equal(got, wanted)
    assert not torch.equal(logits(model, ids), wanted)
    got.sum().backward()
    wanted.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def inside(model: nn.Module) -> list[Any]:
    return [
        (path, type(m), inspect.getattr_static(m, "forward"), list(vars(m)), [id(value) for value in vars(m).values()])
        for path, m in model.named_modules()
    ]


def test_undo_leaves_no_trace() -> None:
    model = wide()
    before, state, expected = inside(model), model.state_dict(), logits(model)
    p = patch(model, fp8=True)
    assert list(model.state_dict()) == list(state)
    assert all(value.data_ptr() == state[key].data_ptr() for key, value in model.state_dict().items())
    assert (logits(model) - expected).norm() > 1e-3 * expected.norm()
    p.undo()
    assert inside(model) == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_run_in_float8_on_their_own_weights(how: Any) -> None:
    model = wide()
    p = patch(model, fp8=True, verify=False)
    expected = logits(model)
    twin = how(model)
    p.undo()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin), expected)


def test_weights_that_are_loaded_later_count() -> None:
    model, other = wide(), wide()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    patch(model, fp8=True, verify=False)
    patch(other, fp8=True, verify=False)
    assert not torch.equal(logits(model), logits(other))
    model.load_state_dict(other.state_dict())
    assert torch.equal(logits(model), logits(other))


def test_weights_are_cast_when_a_model_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    patch(model, fp8=True, verify=False)
    monkeypatch.setattr(fp8_linears, "per_block_cast_to_fp8", None)  # as a CUDA graph would capture the cast
    logits(model)


def test_uncounted_writes_are_said_to_the_patch() -> None:
    model, other = wide(), wide()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    p = patch(model, fp8=True, verify=False)
    patch(other, fp8=True, verify=False)
    logits(model)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        ours.data.copy_(theirs)
    p.requantise()
    assert torch.equal(logits(model), logits(other))


def test_an_undone_patch_holds_no_float8_weights() -> None:
    model = wide()
    p = patch(model, fp8=True, verify=False)
    casts = list(p._fp8.values())
    assert any(c.addresses() for c in casts)
    p.undo()
    assert not any(c.addresses() for c in casts)


def test_tangents_run_as_before() -> None:
    layer = nn.Linear(H, H).requires_grad_(False)
    x, tangent = torch.randn(2, H), torch.randn(2, H)
    wanted = torch.func.jvp(layer, (x,), (tangent,))
    patch(layer, fp8=True, verify=False)
    for ours, theirs in zip(torch.func.jvp(layer, (x,), (tangent,)), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_the_decoders_fingerprint_knows_where_float8_weights_lie() -> None:
    model = wide()
    before = fingerprint(model)
    p = patch(model, fp8=True, verify=False)
    patched = fingerprint(model)
    p.undo()
    assert len(patched) > len(before)
    assert fingerprint(model) == before


@pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec:FutureWarning")
def test_compiled() -> None:
    model = wide()
    patch(model, fp8=True, verify=False)
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 3, H)
    with torch.no_grad():
        made = torch.compile(mlp, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(made, mlp(x))
        layer = model.model.layers[0].self_attn.q_proj
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


# ------------------------------------------------------------------------------------ the verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_error_is_stated_beside_torchs(dtype: torch.dtype) -> None:
    result = patch(wide().to(dtype), fp8=True, inputs=tokens()).verify(tokens())
    assert 0.01 < result.logits.narrow < 0.2
    assert result.logits.error == pytest.approx(result.logits.narrow, rel=0.02)
    assert "the same numbers in plain torch" in str(result)
    assert patch(wide().to(dtype)).verify(tokens()).logits.narrow == 0.0


def test_a_wrong_product_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by a tenth, which is what float8 itself makes of these logits."""
    real = fp8_linears.fp8_linear

    def coarser(*args: Any) -> Tensor:
        y = real(*args)
        return y if args[-1] == "torch" else 1.1 * y

    monkeypatch.setattr(fp8_linears, "fp8_linear", coarser)
    model = wide()
    with pytest.raises(
        VerificationError, match=r"(?s)the patched model lost accuracy\..*the same numbers in plain torch"
    ):
        patch(model, fp8=True, inputs=tokens())
    assert not any(isinstance(m, Patched) or fp8_linears.CASTS in vars(m) for m in model.modules())


def test_other_replacements_are_judged_without_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.rms_norm

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        y = real(*args, **kwargs)
        return y if kwargs.get("backend") == "torch" else y * 1.001

    monkeypatch.setattr(ops, "rms_norm", wrong)
    with pytest.raises(VerificationError, match="without float8 already"):
        patch(wide(), fp8=True, inputs=tokens())


def test_a_model_that_float8_spoils_is_refused() -> None:
    """Every logit is the difference of two large products."""

    class Cancelling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(H, H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) - self.right(x)

    torch.manual_seed(0)
    model = Cancelling()
    with torch.no_grad():
        model.right.weight.copy_(model.left.weight + 1e-3 * torch.randn(H, H))
    with pytest.raises(VerificationError, match=r"limit 1.1 of their sum, and 0.25"):
        patch(model, fp8=True, inputs={"x": torch.randn(8, H)})


def test_training_is_refused() -> None:
    with pytest.raises(InputError, match=r"FP8Linear is the layer that trains in float8"):
        patch(wide(), fp8=True, mode="train")


# ------------------------------------------------------------------------------------ beside other kinds of products


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    with planted_backend(monkeypatch, tmp_path) as backend:
        yield backend


def test_measured_products_are_for_what_float8_leaves(planted: Planted) -> None:
    planted.measure(product(8, INNER, H, 3.0), product(8, VOCABULARY, H, 3.0))
    model = wide()
    assert rows(model, "linear", fp8=True).keys() == {"lm_head"}
    assert rows(model, "linear").keys() == {"gate_proj", "up_proj", "lm_head"}
    patch(model, fp8=True, verify=False)
    logits(model)
    assert [(n, act) for _, n, act in planted.launches] == [(VOCABULARY, "")]


def test_a_layer_with_a_forward_of_its_own_is_not_a_linear() -> None:
    class Member(nn.Linear):  # as merged projections are
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight, self.bias)

    assert fp8_linears.find(Member(H, H), frozenset(), None) is None


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model = wide(hidden_size=1024, intermediate_size=1536, head_dim=256).cuda().bfloat16()
    p = patch(model, fp8=True)
    assert p.verify(tokens().cuda()).logits.narrow > 0.01
    layer, x = model.model.layers[0], torch.randn(4, 1, 1024, device="cuda").bfloat16()
    with torch.no_grad():
        layer.mlp(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.mlp(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer.mlp(x))
