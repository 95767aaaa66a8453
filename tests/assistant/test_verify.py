"""The accuracy gate: each rule opens and closes where its definition says."""

import math

import pytest
import torch
from tests.assistant.planted import prompts, tiny_llama

from tilewright.assistant.reference import Evaluation, draw, evaluate, perplexity
from tilewright.assistant.verify import ERROR_FLOOR, judge
from tilewright.assistant.workload import workload
from tilewright.models.agreement import Agreement

N, V = 400, 50


@pytest.fixture
def reference():
    return Evaluation(torch.randn(N, V, dtype=torch.float64), None)


def shifted(reference, relative, **other):
    """Logits whose relative error is exactly `relative`."""
    noise = torch.randn_like(reference.logits)
    scale = relative * reference.logits.norm() / noise.norm()
    return Evaluation(reference.logits + scale * noise, **{"nll": None, **other})


@pytest.mark.parametrize(("own", "changed", "passes"), [(1e-3, 1.09e-3, True), (1e-3, 1.11e-3, False)])
def test_the_error_may_be_a_tenth_larger(reference, own, changed, passes):
    found = judge(shifted(reference, changed), shifted(reference, own), reference)
    assert (not any("logit error" in failure for failure in found.failures)) is passes


def test_a_float32_model_is_held_against_the_floor(reference):
    own = shifted(reference, 1e-8)
    assert judge(shifted(reference, 0.9 * ERROR_FLOOR), own, reference).passed
    assert not judge(shifted(reference, 1.1 * ERROR_FLOOR), own, reference).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_logit_never_passes(reference, bad):
    logits = reference.logits.clone()
    logits[3, 4] = bad
    assert not judge(Evaluation(logits, None), shifted(reference, 0.5), reference).passed


def test_top1_is_held_against_the_wilson_interval(reference):
    def wrong_at(count):
        logits = reference.logits.clone()
        logits[:count] = -logits[:count]
        return Evaluation(logits, None)

    own = wrong_at(20)
    allowed = math.floor(N * (1 - Agreement(N - 20, N).interval[0]))
    assert not any("top-1" in failure for failure in judge(wrong_at(allowed), own, reference).failures)
    assert any("top-1" in failure for failure in judge(wrong_at(allowed + 1), own, reference).failures)


def test_decoding_is_held_against_the_forward_pass(reference):
    own = shifted(reference, 1e-3, generated=100, agreed=100)
    assert judge(shifted(reference, 1e-3, generated=100, agreed=97), own, reference).passed
    assert not judge(shifted(reference, 1e-3, generated=100, agreed=90), own, reference).passed


def test_two_samples_of_tokens_may_differ_by_chance(reference):
    """172 and 177 of 200, 30 and 26 of 32: what two equally good decoders show on near-ties."""
    for (own, ours), n in (((177, 172), 200), ((30, 26), 32)):
        before = shifted(reference, 1e-3, generated=n, agreed=own)
        assert judge(shifted(reference, 1e-3, generated=n, agreed=ours), before, reference).passed
    before = shifted(reference, 1e-3, generated=200, agreed=177)
    assert not judge(shifted(reference, 1e-3, generated=200, agreed=150), before, reference).passed


def test_perplexity_may_not_rise_beyond_its_interval(reference):
    nll = torch.rand(1000, dtype=torch.float64)
    own = shifted(reference, 1e-3, nll=nll)
    noisy = shifted(reference, 1e-3, nll=nll + 0.1 * torch.randn(1000, dtype=torch.float64))
    worse = shifted(reference, 1e-3, nll=nll + 0.01)
    assert judge(noisy, own, reference).passed
    failed = judge(worse, own, reference)
    assert "perplexity rose by 1.01%" in failed.failures[0]
    assert failed.perplexity == pytest.approx(perplexity(nll) * math.exp(0.01))


def test_every_model_is_evaluated_at_the_same_positions():
    model = tiny_llama()
    work = workload(model, prompts=prompts(), new_tokens=4)
    sample = draw(work, 211, seed=3)
    first, second = (evaluate(model, work, sample, decode=True) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert first.logits.shape == (sum(ids.shape[1] for ids in work.prompts), 211)
    assert first.nll.shape == (sum(ids.shape[1] - 1 for ids in work.prompts),)
    assert (first.generated, first.agreed) == (8, 8)
