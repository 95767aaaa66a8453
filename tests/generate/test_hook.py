"""`model.generate` is taken over where our decoding means the same, and only on that model; undo leaves no trace."""

import copy
import logging
import pickle

import pytest
import torch
from tests.generate.tiny import build, prompts

from tilewright.errors import BackendError
from tilewright.generate import StaticDecoder, attach_generate
from tilewright.log import forget_logged


class Factory:
    """Builds decoders and remembers for what."""

    def __init__(self):
        self.made = []

    def __call__(self, model, batch_size, max_length):
        self.made.append((batch_size, max_length))
        return StaticDecoder(model, batch_size=batch_size, max_length=max_length)


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def factory():
    return Factory()


@pytest.fixture
def attached(model, factory):
    attachment = attach_generate(model, factory)
    yield attachment
    attachment.undo()


IDS, MASK = torch.randint(1, 256, (2, 12)), torch.ones(2, 12, dtype=torch.long)
MASK[1, :4] = 0

TAKEN_OVER = {
    "plain": {"max_new_tokens": 10},
    "max_length": {"max_length": 20},
    "mask": {"attention_mask": MASK, "max_new_tokens": 10},
    "eos": {"max_new_tokens": 10, "eos_token_id": [3, 4], "pad_token_id": 0},
    "default_length": {},
    "eos_off": {"max_new_tokens": 10, "eos_token_id": None},
    "said_defaults": {"max_new_tokens": 10, "num_beams": 1, "use_cache": True, "repetition_penalty": 1.0},
}
SAMPLED = {
    "from_the_config": {},
    "no_temperature": {"temperature": None},
    "no_top_k": {"top_k": None},
    "other_top_k": {"top_k": 3},
    "greedy_after_all": {"do_sample": None},
}
LEFT_ALONE = {
    "beams": {"max_new_tokens": 10, "num_beams": 2},
    "penalty": {"max_new_tokens": 10, "repetition_penalty": 1.3},
    "scores": {"max_new_tokens": 10, "return_dict_in_generate": True, "output_scores": True},
    "right_padding": {"attention_mask": MASK.flip(1), "max_new_tokens": 10},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # Transformers, about its default of 20 tokens
@pytest.mark.parametrize("options", TAKEN_OVER.values(), ids=TAKEN_OVER)
def test_taken_over(model, factory, options):
    expected = model.generate(IDS, **options)
    attachment = attach_generate(model, factory)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert factory.made == [(2, 512)]
    attachment.undo()


@pytest.mark.parametrize("options", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_left_to_the_original_with_one_line(model, factory, options, caplog):
    expected = model.generate(IDS, **options)
    attachment = attach_generate(model, factory)
    forget_logged()
    with caplog.at_level(logging.INFO, "tilewright"):
        for _ in range(2):
            got = model.generate(IDS, **options)
    same = got.sequences if hasattr(got, "sequences") else got
    assert torch.equal(same, getattr(expected, "sequences", expected))
    ours = [record for record in caplog.records if record.name == "tilewright"]
    assert len(ours) == 1
    assert "runs as the model defines it" in ours[0].message
    attachment.undo()


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_settings_mean_what_they_mean_to_transformers(model, options):
    """The decoder is given the same generator, so equal settings draw equal tokens."""
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=40, max_new_tokens=9)
    torch.manual_seed(3)
    expected = model.generate(IDS, **options)

    class Same(StaticDecoder):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs, generator=torch.Generator().manual_seed(3))

    attachment = attach_generate(model, lambda model, batch, length: Same(model, batch_size=batch, max_length=length))
    assert torch.equal(model.generate(IDS, **options), expected)
    attachment.undo()


def test_a_cache_of_the_caller_goes_to_the_original(model, factory, attached):
    from transformers import DynamicCache

    assert model.generate(IDS, max_new_tokens=3, past_key_values=DynamicCache(config=model.config)).shape == (2, 15)
    assert factory.made == []


def test_a_generation_config_counts(model, factory, attached):
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=7, pad_token_id=0)
    assert model.generate(IDS, config).shape == (2, 19)
    assert model.generate(IDS, generation_config=config, max_new_tokens=3).shape == (2, 15)
    config.num_beams = 2
    before = len(factory.made)
    assert model.generate(IDS, config).shape == (2, 19)
    assert len(factory.made) == before


def test_padding_is_inferred_as_transformers_does(model, factory):
    ids = IDS.clone()
    ids[1, :5] = 0  # the pad token of the generation config
    expected = model.generate(ids, max_new_tokens=10)
    attachment = attach_generate(model, factory)
    assert torch.equal(model.generate(ids, max_new_tokens=10), expected)
    assert factory.made
    attachment.undo()


def test_decoders_are_kept_and_grow(model, factory, attached):
    ids, _ = prompts(1, 20)
    for new in (5, 10, 600, 20):
        model.generate(ids, max_new_tokens=new)
    assert factory.made == [(1, 512), (1, 1024)]
    model.generate(IDS, max_new_tokens=5)
    assert factory.made[-1] == (2, 512)


def test_only_so_many_decoders_are_kept(model, factory, attached):
    for rows in (1, 2, 3, 4, 1, 5, 1, 2):  # 5 makes 2 go, which was unused for longest
        model.generate(IDS[:1].repeat(rows, 1), max_new_tokens=2)
    assert [batch for batch, _ in factory.made] == [1, 2, 3, 4, 5, 2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copied_model_decodes_with_its_own_weights(model, duplicate):
    attachment = attach_generate(model)
    before = model.generate(IDS, max_new_tokens=5)
    twin = duplicate(model)
    assert twin.generate.__self__._decoders == {}  # caches and graphs stay behind
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(twin.generate(IDS, max_new_tokens=5), before)
    assert torch.equal(model.generate(IDS, max_new_tokens=5), before)
    attachment.undo()
    assert "generate" in vars(twin)


def test_sampling_arguments_arrive(model, attached):
    """At a tiny top_p sampling is greedy."""
    greedy = model.generate(IDS, max_new_tokens=10)
    assert torch.equal(model.generate(IDS, max_new_tokens=10, do_sample=True, top_p=1e-6), greedy)


def test_undo_and_other_models(model, factory):
    other = build("llama")
    attachment = attach_generate(model, factory)
    assert "generate" in vars(model)
    assert "generate" not in vars(other)
    other.generate(IDS, max_new_tokens=2)
    assert factory.made == []
    attachment.undo()
    attachment.undo()
    assert "generate" not in vars(model)
    model.generate(IDS, max_new_tokens=2)
    assert factory.made == []


def test_training_mode_goes_to_the_original(model, factory, attached):
    model.train()
    assert model.generate(IDS, max_new_tokens=2).shape == (2, 14)
    assert factory.made == []


class Failing:
    """Builds decoders that fail at one point, as often as they are asked, or whose cache fits up to a size."""

    def __init__(self, point, error, fits=0):
        self.point, self.error, self.fits, self.asked = point, error, fits, 0

    def __call__(self, model, batch_size, max_length):
        factory = self

        class Decoder(StaticDecoder):
            def __init__(self, *args, **kwargs):
                factory.fail("construction", batch_size * max_length)
                super().__init__(*args, **kwargs)

            def _prepare(self, *args):
                factory.fail("capture", batch_size * max_length)
                super()._prepare(*args)

            def _step(self):
                factory.fail("step", batch_size * max_length)
                super()._step()

        return Decoder(model, batch_size=batch_size, max_length=max_length)

    def fail(self, point, slots):
        if point == self.point and slots > self.fits:
            self.asked += 1
            raise self.error


FAILURES = {
    "capture": ("capture", BackendError("the decode step cannot be captured as a CUDA graph: it waits")),
    "memory": ("construction", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")),
    "step": ("step", RuntimeError("index_copy_(): self and source expected to have the same dtype")),
    "model": ("construction", AttributeError("'Config' object has no attribute 'num_hidden_layers'")),
}


@pytest.mark.parametrize(("point", "error"), FAILURES.values(), ids=FAILURES)
def test_what_a_decoder_cannot_do_the_model_does_itself(model, point, error, caplog):
    """It is said once, and not tried again."""
    expected = model.generate(IDS, max_new_tokens=10)
    factory = Failing(point, error)
    attachment = attach_generate(model, factory)
    for _ in range(3):
        assert torch.equal(model.generate(IDS, max_new_tokens=10), expected)
    assert factory.asked == 1
    assert not attachment._decoders
    [record] = [record for record in caplog.records if record.name == "tilewright"]
    assert record.levelno == logging.WARNING
    assert str(error) in record.message
    attachment.undo()


def test_a_smaller_cache_is_tried_after_one_that_did_not_fit(model, caplog):
    factory = Failing("construction", torch.OutOfMemoryError("CUDA out of memory"), fits=512)
    attachment = attach_generate(model, factory)
    for _ in range(2):
        model.generate(IDS, max_new_tokens=10)  # 2 rows of 512
        model.generate(IDS[:1], max_new_tokens=10)
        model.generate(IDS[:1], max_new_tokens=600)
    assert factory.asked == 1
    assert list(attachment._decoders) == [1]
    attachment.undo()


def test_another_model_is_tried_again(model):
    """A patch, or undoing one, may have removed what a graph could not record."""
    factory = Failing("capture", BackendError("no"))
    attachment = attach_generate(model, factory)
    model.generate(IDS, max_new_tokens=3)
    factory.point = ""
    model.generate(IDS, max_new_tokens=3)
    assert not attachment._decoders
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
    model.generate(IDS, max_new_tokens=3)
    assert list(attachment._decoders) == [2]
    attachment.undo()


class Heard:
    """A streamer that keeps what it was given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values += value.flatten().tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_hears_nothing_twice(model):
    expected, heard = model.generate(IDS[:1], max_new_tokens=5), Heard()
    attachment = attach_generate(model, Failing("capture", BackendError("no")))
    model.generate(IDS[:1], max_new_tokens=5, streamer=heard)
    assert (heard.values, heard.ended) == (expected[0].tolist(), 1)
    attachment.undo()
    attachment = attach_generate(model, Failing("step", RuntimeError("too late")))
    with pytest.raises(RuntimeError, match="too late"):
        model.generate(IDS[:1], max_new_tokens=5, streamer=Heard())
    attachment.undo()


def test_a_model_that_fails_itself_raises_its_own_error(model, attached):
    with pytest.raises(IndexError):
        model.generate(IDS + 1000, max_new_tokens=3)


def test_an_encoder_and_decoder_goes_to_the_original():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(1, 64, (2, 7))
    expected = model.generate(ids, max_new_tokens=4)
    attachment = attach_generate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4), expected)
    attachment.undo()


def test_an_assistant_goes_to_the_original(model, factory, attached):
    helper = build("llama", num_hidden_layers=1)
    model.generate(IDS[:1], max_new_tokens=5, assistant_model=helper)
    assert factory.made == []
