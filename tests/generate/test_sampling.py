"""Scores equal those of Transformers' processors, draws its draws from the same generator; bad settings are refused."""

import pytest
import torch
from tests.generate.tiny import build, prompts

from tilewright.errors import InputError
from tilewright.generate import Sampling, StaticDecoder
from tilewright.generate.sampling import TokenSelector

SETTINGS = [
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 5, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 9999, "top_p": 1e-9},  # 1 - top_p is 1 in fp32
]


def expected_scores(logits, *, temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    return TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_scores_are_those_of_transformers(setting):
    logits = torch.randn(3, 101) * 3
    logits[1, 7] = logits[1].max()  # a tie at the top
    logits[2] = logits[2].round()  # ties at every threshold
    selector = TokenSelector(torch.device("cpu"))
    selector.load(Sampling(**setting))
    assert torch.equal(selector.process(logits), expected_scores(logits, **setting))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_are_those_of_transformers(models, setting):
    """The generator's state goes in and comes back, so two calls in a row stay in step too."""
    model = models("llama")
    ids, mask = prompts(2, 12, pads=4)
    torch.manual_seed(11)
    expected = [
        model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=True, **setting) for _ in range(2)
    ]
    decoder = StaticDecoder(model, max_length=64, batch_size=2)
    generator = torch.Generator().manual_seed(11)
    for want in expected:
        got = decoder.generate(ids, mask, max_new_tokens=20, do_sample=True, generator=generator, **setting)
        assert torch.equal(got, want)


def test_frequencies_follow_the_probabilities():
    """20000 draws of 4 tokens: each within four standard errors."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    selector = TokenSelector(torch.device("cpu"))
    selector.load(Sampling(top_k=0))
    selector.generator.manual_seed(0)
    drawn = selector(probabilities.log().repeat(20000, 1)).bincount(minlength=4) / 20000
    error = (probabilities * (1 - probabilities) / 20000).sqrt()
    assert ((drawn - probabilities).abs() < 4 * error).all()


def test_a_seed_repeats_and_another_does_not(models):
    decoder = StaticDecoder(models("llama"), max_length=64)
    ids, _ = prompts(1, 8)
    run = [decoder.generate(ids, max_new_tokens=30, do_sample=True, temperature=3.0, seed=s) for s in (1, 1, 2)]
    assert torch.equal(run[0], run[1])
    assert not torch.equal(run[0], run[2])


def test_the_global_seed_counts_without_another(models):
    decoder = StaticDecoder(models("llama"), max_length=64)
    ids, _ = prompts(1, 8)
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(decoder.generate(ids, max_new_tokens=30, do_sample=True, temperature=3.0))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_greedy_and_sampling_share_a_decoder(models):
    model = models("llama")
    ids, _ = prompts(1, 8)
    decoder = StaticDecoder(model, max_length=64)
    greedy = decoder.generate(ids, max_new_tokens=20)
    decoder.generate(ids, max_new_tokens=20, do_sample=True, temperature=3.0, seed=0)
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), greedy)


@pytest.mark.parametrize(
    "setting", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}], ids=str
)
def test_settings_out_of_range(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        Sampling(**setting)


def test_seed_and_generator_exclude_each_other():
    decoder = StaticDecoder(build("llama"), max_length=16)
    with pytest.raises(InputError, match="not both"):
        decoder.generate(prompts(1, 4)[0], max_new_tokens=1, do_sample=True, seed=1, generator=torch.Generator())
