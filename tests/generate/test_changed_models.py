"""Models whose modules were replaced decode statically as they do by themselves: only the forward contract is used."""

import pytest
import torch
from tests.generate.tiny import build, prompts

import tilewright
from tilewright.generate import StaticDecoder


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_patched(family):
    model = build(family)
    patch = tilewright.patch(model, verify=False)
    ids, mask = prompts(2, 30, pads=4)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    decoder = StaticDecoder(model, max_length=80, batch_size=2)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=40), expected)
    patch.undo()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=40), expected)


def test_packed_projections():
    """Phi-3 keeps Q, K and V in one matrix, and gate and up in another."""
    from tests.generate.tiny import SHAPE
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0)).eval()
    model.generation_config.eos_token_id = None
    ids, mask = prompts(2, 30, pads=4)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    decoder = StaticDecoder(model, max_length=80, batch_size=2)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=40), expected)


def test_a_replaced_module_is_seen():
    model = build("llama")
    decoder = StaticDecoder(model, max_length=64)
    ids, mask = prompts(1, 10)
    before = decoder.generate(ids, max_new_tokens=20)
    model.model.norm = torch.nn.LayerNorm(64)
    after = decoder.generate(ids, max_new_tokens=20)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False))
