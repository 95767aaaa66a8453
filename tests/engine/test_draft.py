"""Speculation by a draft model: tokens and their distribution are the model's, whatever the draft says."""

import copy
from itertools import product

import pytest
import torch
from tests.engine.eager_graphs import EagerGraphs
from tests.engine.letters import letters
from tests.engine.test_engine import SIZES, prompt, silent
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.runner import Runner
from tilewright.errors import InputError

EACH = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=20, temperature=0.4, seed=1),
    SamplingParams(max_tokens=20, temperature=1.5, top_k=4, top_p=0.9, min_p=0.02, seed=2, logprobs=True),
    SamplingParams(max_tokens=16, temperature=0.7, seed=3, repetition_penalty=1.3, logit_bias={5: 1.0}, min_tokens=9),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=9, prompt_logprobs=True, top_logprobs=2),
]
PROMPTS = [prompt(length, length) for length in (9, 30, 5, 12, 7, 9, 17)]


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture(scope="module")
def plain(model):
    with Engine(model, **SIZES) as engine:
        return engine.generate(PROMPTS, EACH)


def near(model, noise):
    """`model` with noise beside its weights: a draft that is right at times."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (weight for weight in draft.parameters() if weight.dim() == 2):
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft


def same(outputs, plain):
    for output, wanted in zip(outputs, plain, strict=True):
        assert (output.tokens, output.reason) == (wanted.tokens, wanted.reason)
        for name in ("logprobs", "prompt_logprobs"):
            its, its_wanted = getattr(output, name), getattr(wanted, name)
            assert its == (None if its_wanted is None else pytest.approx(its_wanted, abs=1e-4))


@pytest.mark.parametrize("sizes", [{"num_draft_tokens": 1}, {"num_draft_tokens": 5, "cache_tokens": 80}])
def test_tokens_are_those_without_a_draft(model, plain, sizes):
    with Engine(model, draft_model=near(model, 0.3), **SIZES, **sizes) as engine:
        for _ in range(2):  # the second time with known prefixes
            same(engine.generate(PROMPTS, EACH), plain)
        statistics = engine.statistics
    assert statistics["pages_held"] == statistics["running"] == statistics["waiting"] == 0
    assert (statistics["preemptions"] > 0) == ("cache_tokens" in sizes)
    assert 5 < statistics["accepted_tokens"] < statistics["draft_tokens"] - 5, "some drafts are right, and some wrong"


def test_the_model_itself_as_its_draft_is_always_right(model, plain):
    with Engine(model, draft_model=model, **SIZES) as engine:
        same(engine.generate(PROMPTS, EACH), plain)
        statistics = engine.statistics
        assert statistics["accepted_tokens"] == statistics["draft_tokens"] > 40
        again = engine.generate(PROMPTS[0], EACH[0])[0]
        assert again.reused == 8
    assert engine.statistics["accepted_tokens"] == engine.statistics["draft_tokens"], "a shared prefix has its keys too"


def test_a_draft_of_another_shape_and_one_of_nan_change_nothing(model, plain):
    other, broken = silent(zoo.build("gemma2", num_hidden_layers=1)), copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    for draft in (other, broken):
        with Engine(model, draft_model=draft, **SIZES) as engine:
            same(engine.generate(PROMPTS, EACH), plain)


def test_padded_steps_change_nothing(model, plain, monkeypatch):
    monkeypatch.setattr(Runner, "_wait", lambda runner: None)
    with Engine(model, draft_model=near(model, 0.3), **SIZES) as engine:
        graphs = engine._runner._graphs = EagerGraphs()
        engine.warmup()
        assert sum(step.tokens == step.rows for step in graphs) == 3 * 2
        same(engine.generate(PROMPTS, EACH), plain)
        assert engine.statistics["accepted_tokens"] > 5


def test_a_cancelled_request_leaves_no_page_and_others_go_on(model, plain):
    with Engine(model, draft_model=near(model, 0.3), **SIZES) as engine:
        long = [engine.submit(prompt(5, n), SamplingParams(max_tokens=90)) for n in range(2)]
        next(iter(long[0]))
        others = [engine.submit(*each) for each in zip(PROMPTS, EACH, strict=True)]
        for generation in long:
            generation.cancel()
        same([generation.result(timeout=60) for generation in others], plain)
        assert all(generation.result(timeout=60).reason in ("cancelled", "length") for generation in long)
        assert engine.statistics["pages_held"] == 0


VOCABULARY, DRAWS = 6, 2000


def test_three_drawn_tokens_are_distributed_as_those_of_the_model():
    """Chi-square of DRAWS requests over all triples, whose probabilities are the model's own."""
    tiny = {"vocab_size": VOCABULARY, "num_hidden_layers": 1}
    model = silent(zoo.build("llama", **tiny))
    with torch.no_grad():
        model.lm_head.weight *= 15
    draft = near(model, 1.0)
    triples = torch.tensor(list(product(range(VOCABULARY), repeat=3)))
    ids = torch.cat([torch.tensor([[3, 1, 4]]).expand(len(triples), 3), triples], 1)
    with torch.no_grad():
        p, q = (x(ids).logits[:, 2:5].softmax(-1).gather(2, triples[..., None])[..., 0].prod(1) for x in (model, draft))
    each = [SamplingParams(temperature=1, seed=n, max_tokens=4) for n in range(DRAWS)]
    with Engine(model, draft_model=draft, max_batch=256, page_size=8, max_context=16, num_draft_tokens=2) as engine:
        outputs = engine.generate([[3, 1, 4]] * DRAWS, each)
        assert 0.2 < engine.statistics["accepted_tokens"] / engine.statistics["draft_tokens"] < 0.95
    drawn = torch.tensor([output.tokens[:3] for output in outputs])
    counts = torch.bincount((drawn * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(1), minlength=len(triples))
    assert _surprise(counts, p) < 3
    assert _surprise(counts, q) > 20, "the draft's distribution is another"


def _surprise(counts, p):
    """Chi-square in standard deviations above its mean, rare triples as one."""
    expected = p.double() * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    freedom = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab_size": 64}, "draft_model has a vocabulary of 64; the model has a vocabulary of 128"),
        ({"max_position_embeddings": 64}, "max_context is 96; this model and its draft_model take 2 to 64"),
    ],
)
def test_a_draft_has_to_fit_its_model(model, options, match):
    with pytest.raises(InputError, match=match):
        Engine(model, draft_model=zoo.build("llama", **options), **SIZES)


def test_a_draft_from_a_folder_has_to_have_the_same_tokenizer(model, plain, tmp_path):
    near(model, 0.3).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    with Engine(model, letters(), draft_model=str(tmp_path), **SIZES) as engine:
        same(engine.generate(PROMPTS[:2], EACH[:2]), plain[:2])
    (other := letters()).add_tokens(["another"])
    with pytest.raises(InputError, match="draft_model has a tokenizer with another vocabulary"):
        Engine(model, other, draft_model=str(tmp_path), **SIZES)


def test_what_a_draft_cannot_be_is_refused(model):
    with pytest.raises(InputError, match="draft_model: the model is in training mode"):
        Engine(model, draft_model=zoo.build("llama").train(), **SIZES)
    with pytest.raises(InputError, match="speculation='prompt_lookup' and draft_model exclude each other"):
        Engine(model, draft_model=model, speculation="prompt_lookup", **SIZES)
    with pytest.raises(InputError, match="num_draft_tokens is 0"):
        Engine(model, draft_model=model, num_draft_tokens=0, **SIZES)
