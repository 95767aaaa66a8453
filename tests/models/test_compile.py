"""A patched model under torch.compile: one graph, the same numbers, and layers that share their code."""

import pytest
import torch
from tests.models.zoo import build, tokens
from torch import nn

from tilewright.models import patch


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "phi3", "deepseek_v2"])
def test_fullgraph(name: str) -> None:
    """DeepSeek's experts are asked for data-dependent shapes, so only its dense layers are compiled here."""
    dense = {"first_k_dense_replace": 2} if "deepseek" in name else {}
    model = build(name, **dense)
    patch(model, verify=False)
    ids = tokens()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)


def test_training_step_compiles() -> None:
    ids = tokens()
    model = build("llama").train()
    patch(model, mode="train", verify=False)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)


def test_regional_compile_traces_one_layer_for_all() -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = build("llama", num_hidden_layers=4)
    patch(model, verify=False)
    mlps: list[nn.Module] = [layer.mlp for layer in model.model.layers]
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        for mlp in mlps:
            mlp.compile(backend=counting, fullgraph=True, dynamic=False)
            mlp(x)
    assert len(graphs) == 1


def test_undo_after_compile_runs_the_original() -> None:
    model = build("llama")
    ids = tokens()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        p = patch(model, verify=False)
        compiled = torch.compile(model, backend="aot_eager")
        compiled(input_ids=ids, use_cache=False)
        p.undo()
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)
