"""Each change: what it does to a model, that it is exact or nearly, and that undo leaves no trace."""

import copy
import shutil

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from torch import nn

from tilewright.assistant.changes import Scene, catalogue, chosen
from tilewright.assistant.changes.cast import BF16, FP32_ON_CPU
from tilewright.assistant.changes.merged_linear import MERGED_GATE_UP, MERGED_QKV, shared_inputs
from tilewright.assistant.changes.op_replacement import OpReplacement
from tilewright.assistant.changes.regional_compile import LayerView, RegionalCompile, blocks
from tilewright.assistant.changes.static_decode import StaticDecode
from tilewright.assistant.observation.observe import Observation, weight_bytes
from tilewright.assistant.workload import greedy, workload
from tilewright.errors import InputError, PatchError

MERGES = (MERGED_QKV, MERGED_GATE_UP)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(model):
    with torch.no_grad():
        return model(prompts()[0][None]).logits


def scene(model):
    return Scene(model, workload(model, prompts=prompts(), new_tokens=4), Observation(0, 0, "float32", []), ceilings())


def identity(model):
    """What undo has to bring back: classes, attributes, hooks, parameter objects, values."""
    return {
        path: (type(m), set(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks), [*map(id, m.parameters())])
        for path, m in model.named_modules()
    }


@pytest.mark.parametrize("change", [*MERGES, BF16, OpReplacement(), StaticDecode()], ids=lambda change: change.name)
def test_undo_restores_objects_values_and_logits_bit_for_bit(change):
    model = tiny_llama()
    state, before, outputs = copy.deepcopy(model.state_dict()), identity(model), logits(model)
    applied = change.apply(model, scene(model).work)
    assert applied.detail
    applied.undo()
    assert identity(model) == before
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), outputs)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("change", MERGES, ids=lambda change: change.name)
def test_merging_keeps_state_memory_and_outputs(change, bias):
    model = tiny_llama(attention_bias=bias, mlp_bias=bias)
    state, outputs, size = copy.deepcopy(model.state_dict()), logits(model), weight_bytes(model)
    applied = change.apply(model, scene(model).work)
    torch.testing.assert_close(logits(model), outputs, rtol=1e-5, atol=1e-6)
    assert weight_bytes(model) == size
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    applied.undo()
    assert weight_bytes(model) == size
    storages = [p.untyped_storage().nbytes() for p in model.parameters()]
    assert storages == [p.numel() * p.element_size() for p in model.parameters()]


def test_merged_projections_run_as_one_product():
    model = tiny_llama()
    work = scene(model).work
    products = []
    for change in MERGES:
        change.apply(model, work)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                products.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    with Count():
        logits(model)
    assert products.count((64, 64 + 32 + 32)) == 2
    assert products.count((64, 96 + 96)) == 2
    assert len(products) == 2 * 4 + 1  # a layer: qkv, output, gate and up, down; then the head


def test_merged_weights_follow_every_legitimate_write():
    model, other = tiny_llama(), tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    expected = logits(other)
    for change in MERGES:
        change.apply(model, scene(model).work)
    q = model.model.layers[0].self_attn.q_proj
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    model.double()
    assert q.weight.dtype == q.tilewright_group.weight.dtype == torch.float64
    with torch.no_grad():
        q.weight.zero_()
    assert not q.tilewright_group.weight[: q.out_features].any()


def test_merged_projections_have_gradients():
    model, reference = tiny_llama(), tiny_llama()
    for change in MERGES:
        change.apply(model, scene(model).work)
    for m in (model, reference):
        m(prompts()[0][None]).logits.square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_a_saved_merged_model_loads(tmp_path):
    model = tiny_llama()
    for change in MERGES:
        change.apply(model, scene(model).work)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


class Quantised(nn.Module):
    """Looks like a linear layer and holds its weight in another format."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return x @ (self.packed.to(x.dtype) * self.scale).T


def test_quantised_projections_are_refused():
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    attention.k_proj = Quantised(attention.k_proj)
    assert "Quantised" in MERGED_QKV.applies(scene(model)).reason
    with pytest.raises(PatchError, match="Quantised"):
        MERGED_QKV.apply(model, scene(model).work)
    assert type(model.model.layers[1].self_attn.q_proj) is nn.Linear


def test_tied_projections_are_refused():
    model = tiny_llama(num_key_value_heads=4)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.q_proj.weight
    with pytest.raises(PatchError, match="tied"):
        MERGED_QKV.apply(model, scene(model).work)


class TwoReaders(nn.Module):
    """b reads what a read, after it was changed in place: no group."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        first = self.a(x)
        return first + self.b(x.mul_(2))


def test_an_input_changed_in_between_is_no_shared_input():
    module, x = TwoReaders(), torch.randn(3, 8)
    assert shared_inputs(module, lambda: module(x)) == []


def test_casting_keeps_ties_and_takes_floating_inputs():
    model = tiny_llama(tie_word_embeddings=True)
    BF16.apply(model, scene(model).work)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert logits(model).dtype == torch.bfloat16
    plain = nn.Linear(4, 4).eval()
    BF16.apply(plain, workload(plain, torch.randn(2, 4)))
    assert plain(torch.randn(2, 4)).dtype == torch.bfloat16


def test_casts_apply_only_from_their_formats():
    assert BF16.applies(scene(tiny_llama())).ok
    assert not FP32_ON_CPU.applies(scene(tiny_llama())).ok
    assert FP32_ON_CPU.applies(scene(tiny_llama().to(torch.bfloat16))).ok


def test_without_a_compiler_compilation_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    verdict = RegionalCompile().applies(scene(tiny_llama()))
    assert not verdict.ok
    assert "g++" in verdict.reason


def test_repeated_blocks_are_found():
    assert [path for path, _ in blocks(tiny_llama())] == ["model.layers.0", "model.layers.1"]
    assert list(blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []


def test_one_compilation_serves_all_layers_and_decoding():
    """With the eager backend: tracing, guards and recompilation are the same, and no C++ compiler is needed."""
    model = tiny_llama(num_hidden_layers=12)
    tokens = greedy(model, prompts()[0][None], 6)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    original = nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda self: original(self, backend=backend))
        applied = RegionalCompile().apply(model, scene(model).work)
    assert torch.equal(greedy(model, prompts()[0][None], 6), tokens)
    assert 1 <= len(graphs) <= 4  # prefill, first step, and the steps with a growing length; not 12 of each
    applied.undo()
    assert all(module._compiled_call_impl is None for module in model.modules())
    torch._dynamo.reset()


def test_a_layer_view_updates_its_own_layer():
    from transformers import DynamicCache

    cache = DynamicCache()
    state = torch.zeros(1, 2, 3, 4)
    for layer in range(2):
        cache.update(state, state, layer)
    LayerView(cache, cache.layers[1]).update(state, state, 0)
    assert [cache.get_seq_length(layer) for layer in range(2)] == [3, 6]
    assert LayerView(cache, cache.layers[1]).get_seq_length() == 3


def test_static_decoding_starts_anew_when_asked():
    model = tiny_llama()
    tokens = greedy(model, prompts()[0][None], 5)
    applied = StaticDecode().apply(model, scene(model).work)
    assert torch.equal(greedy(model, prompts()[0][None], 5), tokens)
    applied.refresh()
    assert "generate" in model.__dict__
    assert torch.equal(greedy(model, prompts()[0][None], 5), tokens)


def test_the_catalogue_is_complete_and_well_described():
    names = [change.name for change in catalogue()]
    assert len(set(names)) == len(names)
    assert {"static_decode", "bf16", "op_replacement", "merged_qkv", "merged_gate_up"} <= set(names)
    assert names[-3:] == ["gated_gate_up", "compiled_decode", "regional_compile"], "each builds on all before it"
    assert [change.stage for change in catalogue()] == sorted(change.stage for change in catalogue())
    assert all(change.why.endswith(".") and change.source for change in catalogue())
    assert [change.name for change in chosen(["bf16"])] == ["bf16"]
    assert not any(change.name.endswith("_linears") for change in chosen(None)), "fewer bits are for who asks for them"
    assert [change.perplexity_rise for change in chosen(["int4_linears", "fp8_linears"])] == [0.03, 0.005]
    with pytest.raises(InputError, match="merged_qkv"):
        chosen(["nothing"])
