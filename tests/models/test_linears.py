"""Linears run on our product at the numbers of rows where the table says so, and on torch's everywhere else."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.fake_table import Planted, planted_backend, product
from tests.models.zoo import build, tokens
from torch import Tensor, nn

from tilewright import use_backend
from tilewright.dispatch import contract, numerics
from tilewright.dispatch.tables.measured import by_rows, measured_us
from tilewright.errors import PatchError, VerificationError
from tilewright.models import linears, patch
from tilewright.models.specialise import Patched

K, N = 32, 48  # gate_proj and up_proj of the zoo's Llama


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    with planted_backend(monkeypatch, tmp_path) as backend:
        yield backend


@pytest.fixture
def fast_at_4(planted: Planted) -> Planted:
    """(48, 32) measured at 1, 4 and 8 rows; ours won at 4, and at 8 with a backend that this machine has not."""
    planted.measure(
        product(1, N, K, 5.0, torch_us=5.0, backend="torch"),
        product(4, N, K, 3.0, torch_us=7.0),
        product(8, N, K, 3.0, backend="cuda"),
    )
    return planted


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias).requires_grad_(False)


def test_the_table_is_asked_for_all_numbers_of_rows(fast_at_4: Planted) -> None:
    forward = contract("matmul").forward
    rows = by_rows(forward, linears.sizes(N, K, torch.float32), "float32", "cpu")
    assert {m: row.backend for m, row in rows.items()} == {1: "torch", 4: "planted", 8: "cuda"}
    assert by_rows(forward, linears.sizes(N, K, torch.float32, gated=True), torch.float32, "cpu") == {}
    assert by_rows(forward, linears.sizes(N, K, torch.bfloat16), torch.bfloat16, "cpu") == {}
    assert linears.won(N, K, torch.float32, torch.device("cpu")) == {4: 4.0, 8: 6.0}
    assert linears.saved_us(3, N, K, torch.float32, torch.device("cpu")) == 4.0
    assert linears.saved_us(1, N, K, torch.float32, torch.device("cpu")) == 0.0


def test_time_of_a_plan_is_that_of_what_it_runs(fast_at_4: Planted) -> None:
    forward = contract("matmul").forward

    def us(m: int) -> float | None:
        args = (torch.randn(m, K), torch.randn(N, K).mT, None, None, None, 1.0, "", torch.float32)
        return measured_us(forward.plan(args, "auto", "default"))

    assert us(1) == 5.0
    assert us(4) == 3.0
    assert us(8) is None, "cuda cannot run here, so no row has what runs instead"
    assert us(16) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 8, 64])
def test_each_number_of_rows_goes_its_way(fast_at_4: Planted, rows: int, bias: bool) -> None:
    module = layer(bias)
    x = torch.randn(1, rows, K)
    expected = module(x)
    patch(module, verify=False)
    got = module(x)
    assert fast_at_4.launches == ([(rows, N, "")] if rows in (3, 4) else [])
    torch.testing.assert_close(got, expected)
    assert module(input=x).shape == expected.shape, "torch's name of the argument"


def test_only_measured_sizes_are_proposed(fast_at_4: Planted) -> None:
    model = build("llama")
    expected = logits(model, tokens(1, 4))
    p = patch(model, verify=False)
    rows = [row for row in p.report().rows if row.kind == "linear"]
    assert {row.path.rpartition(".")[2] for row in rows} == {"gate_proj", "up_proj"}
    assert {row.text for row in rows} == {"ops.matmul, measured faster at M=4, 8 (bitwise)"}
    torch.testing.assert_close(logits(model, tokens(1, 4)), expected)
    assert fast_at_4.launches == 4 * [(4, N, "")]
    logits(model, tokens(2, 24))
    assert len(fast_at_4.launches) == 4, "48 rows were not measured"


def test_nothing_measured_is_nothing_proposed(planted: Planted) -> None:
    model = build("llama")
    assert not any(row.kind == "linear" for row in patch(model, verify=False).report().rows)
    with pytest.raises(PatchError, match="nothing in Linear can be replaced"):
        patch(layer(), verify=False)


def test_a_size_that_torch_won_everywhere_is_not_proposed(planted: Planted) -> None:
    planted.measure(product(1, N, K, 5.0, torch_us=5.0, backend="torch"))
    assert linears.find(layer(), None) is None


def test_undo_leaves_no_trace(fast_at_4: Planted) -> None:
    model = build("llama")
    ids = tokens(1, 4)
    before, state, expected = [type(m) for m in model.modules()], model.state_dict(), logits(model, ids)
    p = patch(model, verify=False)
    assert all(value.data_ptr() == state[key].data_ptr() for key, value in model.state_dict().items())
    p.undo()
    assert [type(m) for m in model.modules()] == before
    assert torch.equal(logits(model, ids), expected)
    assert fast_at_4.launches == []


def test_copies_and_pickles_stay_replaced(fast_at_4: Planted) -> None:
    model = build("llama")
    patch(model, verify=False, ops=["linear"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.model.layers[0].mlp.up_proj, Patched)
        assert torch.equal(logits(other, tokens(1, 4)), logits(model, tokens(1, 4)))


def test_a_gradient_is_torchs(fast_at_4: Planted) -> None:
    model, reference = build("llama"), build("llama")
    ids = tokens(1, 4)
    patch(model, verify=False, ops=["linear"])
    for m in (model, reference):
        m(input_ids=ids, labels=ids).loss.backward()
    assert fast_at_4.launches == []
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_frozen_layer_hands_its_inputs_gradient_on(fast_at_4: Planted) -> None:
    module = layer()
    patch(module, verify=False)
    x = torch.randn(4, K, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, module.weight.sum(0).expand(4, K))
    assert fast_at_4.launches == []


def test_training_leaves_linears(fast_at_4: Planted) -> None:
    rows = [row for row in patch(build("llama"), mode="train", verify=False).report().rows if row.kind == "linear"]
    assert {(row.status, row.text) for row in rows} == {("left", "F.linear computes whatever a gradient is wanted of")}


def test_torch_keeps_what_it_defines(fast_at_4: Planted) -> None:
    module = layer()
    x = torch.randn(4, K)
    patch(module, verify=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == torch.bfloat16
    assert torch.equal(module(x[0]), F.linear(x[0], module.weight, module.bias))
    assert module(x[:0]).shape == module(x[:0, None]).reshape(0, N).shape == (0, N)
    with pytest.raises(RuntimeError, match="same dtype"):
        module(x.bfloat16())
    assert fast_at_4.launches == []
    fast_at_4.measure(product(2, N, K, 1.0))
    module(x[:0])
    module(x[:2])
    assert fast_at_4.launches == [(2, N, "")], "no rows are no bucket"


def test_preferences_are_honoured(fast_at_4: Planted) -> None:
    module = layer()
    patch(module, verify=False)
    with use_backend("torch"):
        module(torch.randn(4, K))
    assert fast_at_4.launches == []
    with numerics("batch_invariant"):
        module(torch.randn(64, K))
    assert fast_at_4.launches == [(64, N, "")]


def test_a_new_table_is_heard(fast_at_4: Planted) -> None:
    module = layer()
    patch(module, verify=False)
    module(torch.randn(2, K))
    assert fast_at_4.launches == []
    fast_at_4.measure(product(2, N, K, 1.0))
    module(torch.randn(2, K))
    assert fast_at_4.launches == [(2, N, "")]


def test_a_wrong_kernel_is_caught(planted: Planted) -> None:
    planted.measure(product(64, N, K, 1.0))
    planted.factor = 1.05
    model = build("llama")
    with pytest.raises(VerificationError, match="lost accuracy"):
        patch(model, inputs=tokens(2, 32))
    assert planted.launches
    assert not any(isinstance(m, Patched) for m in model.modules())


def test_other_linears_are_left(fast_at_4: Planted) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert linears.find(Scaled(K, N), None) is None
    assert linears.find(layer().to(torch.float64), None) is None
    hooked = layer()
    hooked.forward = hooked.forward  # type: ignore[method-assign]
    assert "overridden on the instance" in patch(nn.Sequential(layer(), hooked), verify=False).report().rows[1].text


def test_fullgraph(fast_at_4: Planted) -> None:
    torch._dynamo.reset()
    model = build("llama")
    patch(model, verify=False)
    ids = tokens(1, 4)
    expected = logits(model, ids)
    fast_at_4.launches.clear()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)
    assert fast_at_4.launches.count((4, N, "")) == 4
    torch._dynamo.reset()
