"""`model.generate` is taken over where our decoding means the same, and only on that model; undo leaves no trace."""

import copy
import logging
import pickle

import pytest
import torch
from tests.generate.tiny import build, prompts

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
