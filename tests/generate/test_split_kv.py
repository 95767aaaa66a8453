"""Decode steps through `ops.fmha_decode`: tokens of Transformers, with padding, windows, rings, soft caps."""

import pytest
import torch
from tests.generate.tiny import build, prompts

from tilewright.generate import StaticDecoder
from tilewright.generate.attention.split_kv import split_kv
from tilewright.generate.cache import Cursor, SlotLayer
from tilewright.models.attention.interface import register_attention

FAMILIES = ("llama", "qwen3", "mistral")
PADS = (0, 6)


def continued(model, ids, mask, new, **options):
    decoder = StaticDecoder(model, max_length=ids.shape[1] + new, batch_size=ids.shape[0], **options)
    return decoder.generate(ids, mask, max_new_tokens=new)


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_and_of_dense_attention(family, pads):
    """Mistral's window of 64 tokens becomes a ring that wraps."""
    model = build(family, num_hidden_layers=2)
    ids, mask = prompts(2, 50, pads=pads)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert torch.equal(continued(model, ids, mask, 40, attention="split_kv"), expected)
    assert torch.equal(continued(model, ids, mask, 40, attention="sdpa"), expected)


def test_a_prompt_longer_than_a_window():
    model = build("mistral", num_hidden_layers=2)
    ids, mask = prompts(2, 150, pads=100)  # a row whose tokens fit the window, and one whose tokens do not
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(continued(model, ids, mask, 30, attention="split_kv"), expected)


def test_soft_caps_of_a_model_that_runs_fmha():
    """Gemma 2 has soft caps and a window in every second layer."""
    model = build("gemma2")
    ids, mask = prompts(2, 50, pads=6)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    model.set_attn_implementation(register_attention())
    decoder = StaticDecoder(model, max_length=80, batch_size=2, attention="split_kv")
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=30), expected)
    assert StaticDecoder(model, max_length=80, batch_size=2).attention == "model"  # on a CPU


def test_sinks_of_a_model_that_runs_fmha():
    """gpt-oss has sinks, and a window in every second layer."""
    from tests.models.zoo import build as build_named

    model = build_named("gpt_oss", attn_implementation="eager")
    ids, mask = prompts(2, 14, pads=5)
    ids = ids % model.config.vocab_size
    expected = continued(model, ids, mask, 12, attention="model")
    model.set_attn_implementation(register_attention())
    assert torch.equal(continued(model, ids, mask, 12, attention="split_kv"), expected)


@pytest.mark.interp
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_interpreted(family):
    model = build(family, num_hidden_layers=2)
    ids, mask = prompts(2, 60, pads=6)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(continued(model, ids, mask, 12, attention="split_kv"), expected)


def test_what_an_earlier_call_left_is_not_read():
    """Which is why the decoder does not clear its cache for it."""
    model = build("llama", num_hidden_layers=2)
    ids, _ = prompts(1, 30)
    decoder = StaticDecoder(model, max_length=64, attention="split_kv")
    expected = decoder.generate(ids[:, :10], max_new_tokens=8)
    decoder.generate(ids, max_new_tokens=8)
    with torch.inference_mode():
        for layer in decoder._cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert torch.equal(decoder.generate(ids[:, :10], max_new_tokens=8), expected)


@pytest.mark.parametrize("prompt", [3, 8, 20])
def test_a_ring_holds_the_newest_tokens_of_each_row(prompt):
    """Slot by slot: position p of a row, counted from its first token, in slot p % window."""
    window, first, steps = 8, torch.tensor([0, 2]), 11
    cursor = Cursor(2, window, torch.device("cpu"), by_row=True)
    layer = SlotLayer(cursor, window, window)
    tokens = torch.arange(prompt + steps).float()
    states = tokens[None, None, :, None].expand(2, 3, -1, 4) + torch.tensor([0.0, 100.0])[:, None, None, None]
    cursor.first.copy_(first)
    cursor.padded = True
    layer.update(states[:, :, :prompt], states[:, :, :prompt])
    cursor.prefilling = False
    for position in range(prompt, prompt + steps):
        cursor.position.fill_(position)
        cursor.locate()
        keys, values = layer.update(states[:, :, position, None], states[:, :, position, None])
        for row in range(2):
            length = position + 1 - int(first[row])
            seen = range(max(length - window, 0), length)
            expected = torch.tensor([float(p + int(first[row]) + 100 * row) for p in seen])
            assert int(cursor.ring_lengths[row]) == len(seen)
            for cache in (keys, values):
                assert torch.equal(cache[row, 0, : len(seen), 0].sort().values, expected)
                assert all(float(cache[row, 2, p % window, 1]) == p + int(first[row]) + 100 * row for p in seen)


def test_autocast_keeps_one_dtype():
    """Rotary embeddings leave keys in float32 under autocast."""
    model = build("llama", num_hidden_layers=2)
    ids, _ = prompts(1, 12)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = continued(model, ids, None, 6, attention="split_kv")
    assert tokens.shape == (1, 18)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 2048, 8192])
def test_llama_shape_on_the_gpu(dtype, length):
    query = torch.randn(2, 32, 1, 128, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, 2, 8, 8448, 128, device="cuda", dtype=dtype)
    lengths = torch.tensor([length, (length + 1) // 2], device="cuda", dtype=torch.int32)
    for row, n in enumerate(lengths.tolist()):
        keys[row, :, n:] = values[row, :, n:] = torch.nan
    out, weights = split_kv(None, query, keys, values, lengths[:, None, None, None], scaling=0.1)
    assert weights is None
    unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for row, n in enumerate(lengths.tolist()):
        k, v = (x[row, :, :n].double().repeat_interleave(4, 0) for x in (keys, values))
        expected = ((query[row].double() @ k.mT * 0.1).softmax(-1) @ v)[:, 0]
        assert (out[row, 0].double() - expected).abs().max() <= 2 * unit * expected.abs().max().clamp(min=1)
