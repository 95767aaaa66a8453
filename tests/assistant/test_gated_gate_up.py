"""Gate, up and what gates them as one product: the same model at the rows the tables name, undone bit for bit."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from tests.assistant.test_changes import Quantised, identity, logits
from tests.harness.simulated_time import simulate_time
from tests.models.fake_table import Planted, gate, planted_backend, product
from torch import nn

from tilewright.assistant import optimize
from tilewright.assistant.changes import Scene
from tilewright.assistant.changes.gated_gate_up import GATED_GATE_UP, Interleaved
from tilewright.assistant.changes.groups import Group
from tilewright.assistant.changes.merged_linear import MERGED_GATE_UP, MERGED_QKV
from tilewright.assistant.changes.op_replacement import OpReplacement
from tilewright.assistant.observation.observe import Observation, Phase, observe, weight_bytes
from tilewright.assistant.workload import Workload, workload
from tilewright.errors import PatchError
from tilewright.models import gated_products

HIDDEN, INNER = 64, 96
ROWS = 32  # the bucket of the first prompt, 24 tokens
FUSED, APART = (24, 2 * INNER, "swiglu"), (24, 2 * INNER, "")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_of(fused: float, apart: float, gating: float = 0.0, dtype: str = "float32") -> list[dict]:
    return [
        product(ROWS, 2 * INNER, HIDDEN, fused, gated=True, dtype=dtype),
        product(ROWS, 2 * INNER, HIDDEN, apart, torch_us=apart, backend="torch", dtype=dtype),
        gate(1, INNER, gating, dtype),
    ]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    with planted_backend(monkeypatch, tmp_path) as backend:
        yield backend


@pytest.fixture
def faster(planted: Planted) -> Planted:
    planted.measure(*rows_of(fused=10.0, apart=9.0, gating=2.0))
    return planted


def work(model: nn.Module) -> Workload:
    return workload(model, prompts=prompts(), new_tokens=4)


def scene(model: nn.Module, *phases: Phase) -> Scene:
    return Scene(model, work(model), Observation(0, 0, "float32", list(phases)), ceilings())


@pytest.mark.parametrize(
    ("fused", "apart", "gating", "won"),
    [(10.0, 9.0, 2.0, {ROWS: 1.0}), (11.0, 9.0, 2.0, {}), (8.0, 9.0, 0.0, {ROWS: 1.0})],
)
def test_it_has_to_beat_the_product_and_the_gate_together(planted: Planted, fused, apart, gating, won) -> None:
    planted.measure(*rows_of(fused, apart, gating))
    assert gated_products.won(2 * INNER, HIDDEN, torch.float32, torch.device("cpu")) == won
    x, weight = torch.randn(24, HIDDEN), torch.randn(2 * INNER, HIDDEN)
    assert gated_products.measured_faster(x, weight) == bool(won)
    assert not gated_products.measured_faster(x[:3], weight), "four rows were not measured"


def test_a_gate_of_more_rows_says_nothing_about_fewer(planted: Planted) -> None:
    fused, apart, _ = rows_of(10.0, 9.0)
    planted.measure(fused, apart, gate(2 * ROWS, INNER, 100.0))
    assert gated_products.won(2 * INNER, HIDDEN, torch.float32, torch.device("cpu")) == {}


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("below", [[], [MERGED_GATE_UP], [OpReplacement(), MERGED_QKV, MERGED_GATE_UP]], ids=len)
def test_outputs_state_and_memory(faster: Planted, below: list, bias: bool) -> None:
    model = tiny_llama(mlp_bias=bias)
    state, outputs, size = copy.deepcopy(model.state_dict()), logits(model), weight_bytes(model)
    for change in below:
        change.apply(model, work(model))
    before, merged = identity(model), logits(model)
    applied = GATED_GATE_UP.apply(model, work(model))
    assert applied.detail == "2 MLPs compute 192 columns and gate them at once"
    faster.launches.clear()
    torch.testing.assert_close(logits(model), outputs, rtol=1e-5, atol=1e-6)
    assert faster.launches == 2 * [FUSED]
    assert weight_bytes(model) == size
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    applied.undo()
    assert identity(model) == before
    assert weight_bytes(model) == size
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), merged)
    if not below:
        storages = [p.untyped_storage().nbytes() for p in model.parameters()]
        assert storages == [p.numel() * p.element_size() for p in model.parameters()]


def test_unmeasured_numbers_of_rows_run_apart(faster: Planted) -> None:
    model = tiny_llama()
    ids = prompts()[0][None, :5]
    with torch.no_grad():
        expected = model(ids).logits
        GATED_GATE_UP.apply(model, work(model))
        faster.launches.clear()
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)
    assert faster.launches == []


def test_the_fused_form_rounds_no_more_than_the_model(planted: Planted) -> None:
    planted.measure(*rows_of(1.0, 2.0, dtype="bfloat16"))
    model = tiny_llama().to(torch.bfloat16)
    exact = logits(copy.deepcopy(model).double())
    own = (logits(model).double() - exact).norm()
    GATED_GATE_UP.apply(model, work(model))
    planted.launches.clear()
    assert (logits(model).double() - exact).norm() <= 1.1 * own
    assert planted.launches == 2 * [FUSED]


@pytest.mark.parametrize("trained", ["", "layers.0.mlp.up_proj"], ids=["all", "up_proj"])
def test_gradients_are_the_models(faster: Planted, trained: str) -> None:
    """Of all weights; and of one whose input needs none, so that nothing but the mode tells the product of it."""
    model, reference = tiny_llama(), tiny_llama()
    GATED_GATE_UP.apply(model, work(model))
    faster.launches.clear()
    for m in (model, reference):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(trained in name)
        m(prompts()[0][None]).logits.square().mean().backward()
    assert faster.launches == []
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_weights_follow_every_legitimate_write(faster: Planted, tmp_path: Path) -> None:
    model, other = tiny_llama(), tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    expected = logits(other)
    GATED_GATE_UP.apply(model, work(model))
    up = model.model.layers[0].mlp.up_proj
    for assign in (False, True):
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        faster.launches.clear()
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
        assert faster.launches == 2 * [FUSED]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    model.double()
    assert up.weight.dtype == up.tilewright_group.weight.dtype == torch.float64
    with torch.no_grad():
        up.weight.zero_()
    assert not up.tilewright_group.weight[1::2].any()
    assert up.tilewright_group.weight[0::2].all()


def test_a_merged_weight_is_let_go(faster: Planted) -> None:
    model = tiny_llama()
    MERGED_GATE_UP.apply(model, work(model))
    former = model.model.layers[0].mlp.gate_proj.tilewright_group
    applied = GATED_GATE_UP.apply(model, work(model))
    assert former.weight is None
    assert isinstance(model.model.layers[0].mlp.gate_proj, Interleaved)
    applied.undo()
    assert former.weight.shape == (2 * INNER, HIDDEN)
    assert model.model.layers[0].mlp.gate_proj.weight.data_ptr() == former.weight.data_ptr()


def test_undo_in_another_order_is_refused_and_changes_nothing(faster: Planted) -> None:
    model = tiny_llama()
    plain = identity(model)
    merged = MERGED_GATE_UP.apply(model, work(model))
    gated = GATED_GATE_UP.apply(model, work(model))
    before, outputs = identity(model), logits(model)
    with pytest.raises(PatchError, match="Undo the later change first"):
        merged.undo()
    assert identity(model) == before
    assert torch.equal(logits(model), outputs)
    gated.undo()
    with pytest.raises(PatchError, match="undone already"):
        gated.undo()
    merged.undo()
    assert identity(model) == plain


def test_a_module_that_cannot_be_specialised_leaves_the_model_as_it_was(faster: Planted, monkeypatch) -> None:
    model = tiny_llama()
    before, outputs = identity(model), logits(model)

    def refuses(cls: type[nn.Module], recipe: object) -> type[nn.Module]:
        raise TypeError("planted")

    monkeypatch.setattr("tilewright.assistant.changes.gated_gate_up.specialise", refuses)
    with pytest.raises(TypeError, match="planted"):
        GATED_GATE_UP.apply(model, work(model))
    assert identity(model) == before
    assert torch.equal(logits(model), outputs)


def test_it_applies_and_predicts_by_the_tables(faster: Planted) -> None:
    model = tiny_llama()
    verdict = GATED_GATE_UP.applies(scene(model))
    assert verdict.ok
    assert verdict.reason == "2 MLPs such as model.layers.0.mlp, measured faster at M=32."
    seen = observe(model, work(model))
    predicted = GATED_GATE_UP.predict(Scene(model, work(model), seen, ceilings()))
    assert predicted.bound_us == pytest.approx(2.0)  # 1 us an MLP, in the prefill
    assert predicted.low < 1.0 < predicted.high


def test_nothing_measured_is_refused(planted: Planted) -> None:
    model = tiny_llama()
    verdict = GATED_GATE_UP.applies(scene(model))
    assert (verdict.ok, "no number of rows" in verdict.reason) == (False, True)
    with pytest.raises(PatchError, match="no gated MLP whose product was measured faster"):
        GATED_GATE_UP.apply(model, work(model))


def test_other_activations_and_modules_are_none_of_its_business(faster: Planted) -> None:
    assert "no module computes" in GATED_GATE_UP.applies(scene(tiny_llama(hidden_act="gelu"))).reason


def test_a_hook_or_another_kind_of_weight_is_refused(faster: Planted) -> None:
    model = tiny_llama()
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "model.layers.1.mlp has hooks" in GATED_GATE_UP.applies(scene(model)).reason
    handle.remove()
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Quantised(mlp.up_proj)
    before = identity(model)
    with pytest.raises(PatchError, match="Quantised"):
        GATED_GATE_UP.apply(model, work(model))
    assert identity(model) == before


def test_an_adapter_put_on_later_is_called(faster: Planted) -> None:
    model = tiny_llama()
    GATED_GATE_UP.apply(model, work(model))
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Identity())
    expected = tiny_llama()
    faster.launches.clear()
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-6)
    assert faster.launches == [FUSED], "the other layer"


@pytest.mark.parametrize(
    ("change", "below"), [(MERGED_GATE_UP, []), (GATED_GATE_UP, []), (GATED_GATE_UP, [MERGED_GATE_UP])]
)
def test_a_failure_in_the_middle_leaves_the_model_as_it_was(faster: Planted, monkeypatch, change, below) -> None:
    model = tiny_llama()
    for other in below:
        other.apply(model, work(model))
    before, outputs = identity(model), logits(model)
    joins, own = [], Group.join

    def running_out(group: Group) -> None:
        joins.append(group)
        if len(joins) == 2:
            raise torch.OutOfMemoryError("planted")
        own(group)

    monkeypatch.setattr(Group, "join", running_out)
    with pytest.raises(torch.OutOfMemoryError):
        change.apply(model, work(model))
    assert identity(model) == before
    assert torch.equal(logits(model), outputs)


def test_fullgraph(faster: Planted) -> None:
    torch._dynamo.reset()
    model = tiny_llama()
    ids = prompts()[0][None]
    expected = logits(model)
    GATED_GATE_UP.apply(model, work(model))
    faster.launches.clear()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)
    assert faster.launches == 2 * [FUSED]
    torch._dynamo.reset()


def test_the_assistant_tries_measures_and_verifies_it(faster: Planted, monkeypatch) -> None:
    simulate_time(monkeypatch)
    model = tiny_llama()
    before = identity(model)
    found = optimize(
        model, prompts=prompts(), changes=[MERGED_GATE_UP, GATED_GATE_UP], new_tokens=4, budget_s=6.0,
        ceilings=ceilings(),
    )  # fmt: skip
    (record,) = [r for r in found.report.changes if r.name == "gated_gate_up"]
    assert record.decision in ("kept", "rejected")
    assert record.accuracy is not None
    assert record.accuracy.passed
    assert record.measured is not None
    found.undo()
    assert identity(model) == before
