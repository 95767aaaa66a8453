"""Greedy decoding is token for token what Transformers produces; the cache forgets; errors say what to do."""

import pytest
import torch
from tests.generate.tiny import WINDOW, build, prompts
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.errors import InputError
from tilewright.generate import StaticDecoder

FAMILIES = ("llama", "qwen3", "gemma2", "mistral")
ATTENTION = ("sdpa", "grouped", "model")


def reference(model, ids, mask, new, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(models, family, attention):
    """Batch 2 with left padding; 100 tokens take a window of 24 (a ring of 64 slots) more than once around."""
    model = models(family)
    if not model._supports_sdpa:  # Gemma 2 from transformers 5.22: its own attention is all there is
        with pytest.raises(InputError, match="eager"):
            StaticDecoder(model, max_length=160, batch_size=2, attention="sdpa")
        attention = "model"
    own = model.config._attn_implementation
    ids, mask = prompts(2, 19, pads=5)
    expected = reference(model, ids, mask, 100)
    assert len(set(expected[0, 19:].tolist())) > 30, "the reference repeats itself and would prove nothing"
    decoder = StaticDecoder(model, max_length=160, batch_size=2, attention=attention)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=100), expected)
    assert model.config._attn_implementation == own


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 63, 64, 65, 100])
def test_prompts_around_window_and_ring(models, length):
    model = models("mistral")
    ids, mask = prompts(1, length)
    decoder = StaticDecoder(model, max_length=200)
    assert torch.equal(decoder.generate(ids, max_new_tokens=30), reference(model, ids, mask, 30))


def test_window_matters(models):
    """Without this the window tests could pass on a model that never looks back."""
    model = models("mistral")
    wide = build("mistral", sliding_window=None)
    wide.load_state_dict(model.state_dict())
    ids, mask = prompts(1, 60)
    assert not torch.equal(reference(model, ids, mask, 30), reference(wide, ids, mask, 30))


def test_padding_does_not_change_a_row(models):
    """A row with padding continues as it does alone."""
    model = models("llama")
    ids, mask = prompts(2, 20, pads=7)
    both = StaticDecoder(model, max_length=64, batch_size=2).generate(ids, mask, max_new_tokens=20)
    alone = StaticDecoder(model, max_length=64).generate(ids[1:, 7:], max_new_tokens=20)
    assert torch.equal(both[1, 7:], alone[0])


def test_one_decoder_many_prompts(models):
    """Longer, shorter, longer: nothing of an earlier call shows."""
    model = models("gemma2")
    decoder = StaticDecoder(model, max_length=160)
    for length in (90, 3, 41, 1):
        ids, mask = prompts(1, length)
        assert torch.equal(decoder.generate(ids, max_new_tokens=40), reference(model, ids, mask, 40))


def test_a_nan_stays_in_its_call():
    """Attention reads the whole cache, as it does in a captured step: masked slots hold what earlier calls left."""
    model = build("llama")
    decoder = StaticDecoder(model, max_length=64)
    decoder._visible = lambda position: 64
    ids, mask = prompts(1, 30)
    expected = reference(model, ids, mask, 20)
    poisoned = ids.clone()
    poisoned[0, 20] = 255
    weight = model.get_input_embeddings().weight
    kept = weight[255].clone()
    with torch.no_grad():
        weight[255] = float("nan")
    decoder.generate(poisoned, max_new_tokens=3)
    with torch.no_grad():
        weight[255] = kept
    short, short_mask = ids[:, :10], mask[:, :10]
    assert torch.equal(decoder.generate(short, max_new_tokens=20), reference(model, short, short_mask, 20))
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), expected)


@pytest.mark.parametrize("rows", [1, 3])
def test_end_of_text(models, rows):
    """Rows stop at different steps; the finished ones continue with padding; the result ends with the last row."""
    model = models("llama")
    ids, mask = prompts(rows, 12)
    free = reference(model, ids, mask, 40)
    eos = [int(free[row, 12 + 5 * (row + 1)]) for row in range(rows)]
    expected = reference(model, ids, mask, 40, eos_token_id=eos, pad_token_id=0)
    assert expected.shape[1] < 52, "no row stopped early"
    decoder = StaticDecoder(model, max_length=64, batch_size=rows)
    assert torch.equal(decoder.generate(ids, max_new_tokens=40, eos_token_id=eos, pad_token_id=0), expected)
    assert torch.equal(decoder.generate(ids, max_new_tokens=40, eos_token_id=()), free)


def test_end_of_text_on_the_first_token(models):
    model = models("llama")
    ids, mask = prompts(1, 12)
    eos = int(reference(model, ids, mask, 1)[0, -1])
    out = StaticDecoder(model, max_length=64).generate(ids, max_new_tokens=40, eos_token_id=eos)
    assert out.shape == (1, 13)
    assert int(out[0, -1]) == eos


def test_defaults_come_from_the_generation_config():
    model = build("llama")
    ids, mask = prompts(1, 12)
    model.generation_config.eos_token_id = int(reference(model, ids, mask, 8)[0, -1])
    out = StaticDecoder(model, max_length=64).generate(ids, max_new_tokens=40)
    assert torch.equal(out, reference(model, ids, mask, 40))
    assert out.shape[1] <= 20


def test_prefill_gives_the_last_logits(models):
    model = models("qwen3")
    ids, mask = prompts(2, 15, pads=4)
    decoder = StaticDecoder(model, max_length=64, batch_size=2)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, -1]
    logits = decoder.prefill(ids, mask)
    assert logits.shape == (2, 256)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    logits.zero_()  # the caller's own, an ordinary tensor


def test_a_full_cache(models):
    """The last token that fits is produced."""
    model = models("llama")
    ids, mask = prompts(1, 20)
    assert torch.equal(
        StaticDecoder(model, max_length=32).generate(ids, max_new_tokens=12), reference(model, ids, mask, 12)
    )


class Recorder:
    """A streamer that remembers."""

    def __init__(self):
        self.got, self.ended = [], False

    def put(self, tokens):
        self.got.append(tokens)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("stop", [False, True])
def test_streamer_sees_what_is_returned(models, stop):
    model = models("llama")
    ids, mask = prompts(1, 12)
    eos = (int(reference(model, ids, mask, 9)[0, -1]),) if stop else ()
    recorder = Recorder()
    out = StaticDecoder(model, max_length=64).generate(ids, max_new_tokens=15, eos_token_id=eos, streamer=recorder)
    assert recorder.ended
    assert torch.equal(recorder.got[0], ids)
    assert [int(t) for t in recorder.got[1:]] == out[0, 12:].tolist()


def test_bf16_runs(models):
    model = build("gemma2").to(torch.bfloat16)
    ids, mask = prompts(2, 19, pads=3)
    out = StaticDecoder(model, max_length=64, batch_size=2).generate(ids, mask, max_new_tokens=8)
    assert out.shape == (2, 27)


def test_the_model_may_be_cast_between_calls():
    model = build("llama")
    ids, _ = prompts(1, 9)
    decoder = StaticDecoder(model, max_length=64)
    before = decoder.generate(ids, max_new_tokens=5)
    half = decoder.cache_bytes // 2
    model.to(torch.bfloat16)
    decoder.generate(ids, max_new_tokens=5)
    assert decoder.cache_bytes == half
    model.to(torch.float32)
    assert decoder.generate(ids, max_new_tokens=5).shape == before.shape


def test_inside_and_outside_inference_mode(models):
    """Buffers made in one mode are written in the other."""
    model = models("llama")
    ids, _ = prompts(1, 9)
    with torch.inference_mode():
        decoder = StaticDecoder(model, max_length=64)
        first = decoder.generate(ids, max_new_tokens=5)
    second = decoder.generate(ids, max_new_tokens=5)
    assert torch.equal(first, second)
    second += 1  # not an inference tensor


class LaunchCount(TorchDispatchMode):
    """Operators that do work; views launch nothing."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        self.count += not any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return func(*args, **(kwargs or {}))


def launches(layers: int, attention: str) -> int:
    model = build("llama", num_hidden_layers=layers)
    decoder = StaticDecoder(model, max_length=64, attention=attention)
    decoder.prefill(prompts(1, 9)[0])
    decoder._cache.cursor.visible = 64
    with torch.inference_mode(), LaunchCount() as counter:
        decoder._step()
    return counter.count


@pytest.mark.parametrize(("attention", "allowed"), [("sdpa", 1), ("grouped", 5)])
def test_a_decode_step_stays_lean(attention, allowed):
    """Per layer, what Llama's own modules do in fp32 (norms 12, projections 7, rope 10, gate 2, sums 2), 2 cache writes
    and the attention; around the layers at most 40, whatever their number."""
    two, four = launches(2, attention), launches(4, attention)
    per_layer = (four - two) // 2
    assert per_layer <= 35 + allowed
    assert two - 2 * per_layer <= 40


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 1, 1, 0]], "left padding"),
        ([[1, 0, 1, 1]], "left padding"),
        ([[0, 0, 0, 0]], "left padding"),
        ([[1, 1, 1]], "shape"),
    ],
    ids=["right", "hole", "empty", "short"],
)
def test_masks_we_cannot_honour_are_refused(models, mask, said):
    decoder = StaticDecoder(models("llama"), max_length=16)
    with pytest.raises(InputError, match=said):
        decoder.generate(torch.ones(1, 4, dtype=torch.long), torch.tensor(mask), max_new_tokens=2)


def test_refusals(models):
    model = models("llama")
    decoder = StaticDecoder(model, max_length=16)
    ids = torch.ones(1, 4, dtype=torch.long)
    for call, said in (
        (lambda: decoder.generate(ids, max_new_tokens=13), "exceed max_length=16"),
        (lambda: decoder.generate(ids, max_new_tokens=0), "max_new_tokens"),
        (lambda: decoder.generate(ids.repeat(2, 1), max_new_tokens=1), r"takes \(1, S\)"),
        (lambda: decoder.generate(ids[0], max_new_tokens=1), r"takes \(1, S\)"),
        (lambda: StaticDecoder(model, max_length=16, attention="flash"), "Allowed: auto"),
        (lambda: StaticDecoder(model, max_length=16, graphs=True), "CUDA"),
        (lambda: StaticDecoder(model.model, max_length=16).generate(ids, max_new_tokens=1), "language model"),
    ):
        with pytest.raises(InputError, match=said):
            call()


def test_training_mode_is_refused():
    model = build("llama").train()
    with pytest.raises(InputError, match=r"model\.eval"):
        StaticDecoder(model, max_length=16).generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=1)


def test_unknown_layers_are_refused():
    from transformers import LlamaConfig

    from tilewright.generate.cache import SlotCache

    config = LlamaConfig(num_hidden_layers=2, attention_chunk_size=8)
    with pytest.raises(InputError, match="chunked_attention"):
        SlotCache(config, max_length=16, batch_size=1, device=torch.device("cpu"))


def test_an_eager_model_keeps_its_own_attention():
    """Gemma-2 attends eagerly with a soft cap; the decode attention has none."""
    ids, mask = prompts(2, 12, pads=3)
    plain = reference(build("gemma2", attn_logit_softcapping=None, attn_implementation="eager"), ids, mask, 30)
    model = build("gemma2", attn_logit_softcapping=2.0, attn_implementation="eager")
    expected = reference(model, ids, mask, 30)
    assert not torch.equal(plain, expected), "the soft cap changes nothing here"
    decoder = StaticDecoder(model, max_length=64, batch_size=2)
    assert decoder.attention == "model"
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=30), expected)
    with pytest.raises(InputError, match="eager"):
        StaticDecoder(model, max_length=64, attention="sdpa")
