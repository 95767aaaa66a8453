"""A compiled step chooses the tokens of the model's own generate, for every prompt length, after one compilation."""

import copy

import pytest
import torch
from tests.generate.tiny import build

from tilewright.assistant.changes.regional_compile import cxx
from tilewright.generate import attach_generate, compiled
from tilewright.generate.compiled import CompiledDecoder, attach_compiled

SETTINGS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def counted(monkeypatch):
    """Compilations of a step by Dynamo alone: its guards and code objects are tested here, not Inductor's code."""
    compilations = []
    real = torch.compile

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    def compile_(function, *, fullgraph, dynamic, options):
        guards = {"guard_filter_fn": options["guard_filter_fn"]}
        return real(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend, options=guards)

    monkeypatch.setattr(compiled.torch, "compile", compile_)
    torch._dynamo.reset()
    yield compilations
    torch._dynamo.reset()


def same_tokens(model, other, *lengths):
    for length in lengths:
        ids = torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(length))
        assert torch.equal(model.generate(ids, **SETTINGS), other.generate(ids, **SETTINGS)), length


def test_one_compilation_serves_every_prompt(counted):
    model = build("llama")
    other = copy.deepcopy(model)
    attachment = attach_compiled(other)
    same_tokens(model, other, 5, 40, 12)
    assert len(counted) == 1
    attachment.undo()
    same_tokens(model, other, 5)
    assert len(counted) == 1


def test_two_decoders_run_their_own_code(counted):
    """Without guards one code object would serve both: the second model would run the first one's layers."""
    model, wide = build("llama"), build("llama").double()
    attach_compiled(copied := copy.deepcopy(model))
    attach_compiled(other := copy.deepcopy(wide))
    same_tokens(model, copied, 6)
    same_tokens(wide, other, 6)
    same_tokens(model, copied, 9)
    assert len(counted) == 2


def test_on_top_of_a_static_decoder_the_compiled_one_serves_until_it_is_undone(counted):
    """As in `optimize`: the lower attachment is told to forget what it recorded, and stays below."""
    model = build("llama")
    other = copy.deepcopy(model)
    below = attach_generate(other)
    above = attach_compiled(other)
    below.forget()
    same_tokens(model, other, 6)
    assert len(counted) == 1
    assert not below._decoders
    above.undo()
    same_tokens(model, other, 6)
    assert below._decoders
    below.undo()
    assert "generate" not in vars(other)


def test_new_weights_are_seen_and_new_dtypes_compile_again(counted):
    model = build("llama")
    attach_compiled(other := copy.deepcopy(model))
    same_tokens(model, other, 6)
    for one in (model, other):
        with torch.no_grad():
            one.lm_head.weight.copy_(one.lm_head.weight.flip(0))
    same_tokens(model, other, 6)
    assert len(counted) == 1
    model.double()
    other.double()
    same_tokens(model, other, 6)
    assert len(counted) == 2


def test_a_decoder_is_as_long_as_the_model_allows():
    model = build("llama")
    attachment = attach_compiled(model)
    decoder = attachment.decoder(1, 20)
    assert isinstance(decoder, CompiledDecoder)
    assert decoder.max_length == max(512, min(model.config.max_position_embeddings, 2048))


@pytest.mark.exhaustive
@pytest.mark.skipif(cxx() is None, reason="Inductor needs a C++ compiler")
def test_inductor_compiles_the_step():
    model = build("llama")
    attach_compiled(other := copy.deepcopy(model))
    same_tokens(model, other, 7)
    assert other.generate.__self__._failure is None
