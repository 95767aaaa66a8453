"""sample: distributions, the tokens that each filter leaves, the same token everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.sampling.places import TORCH, assert_distributed, everywhere_and_in_cuda, keyed

from tilewright import ops
from tilewright.dispatch import implementations
from tilewright.errors import InputError
from tilewright.ops.sampling import numbers
from tilewright.ops.sampling.sample import raw_arguments
from tilewright.ops.sampling.sample_reference import kept_weights

FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def hugging_face(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the processors of Transformers, in their order; sums in float64."""
    scores = logits.double() / temperature
    if top_k:
        kth = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1:
        ascending, order = scores.sort(-1)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[..., -1] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if min_p:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize("case", FILTERS)
def test_draws_have_the_distribution_of_transformers(case):
    logits = torch.randn(60) * 2
    rows = logits.expand(40000, -1).contiguous()
    tokens = ops.sample(rows, *keyed(len(rows), TORCH), **FILTERS[case], backend="torch")
    assert_distributed(tokens, hugging_face(logits, **FILTERS[case]))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("n", [60, 700])
@pytest.mark.parametrize("case", FILTERS)
def test_draws_have_the_distribution_of_transformers_on_a_gpu(case, n, backend):
    logits = torch.randn(n) * 2
    rows = logits.expand(40000, -1).contiguous().cuda()
    seeds, positions = (t.cuda() for t in keyed(len(rows), TORCH))
    tokens = ops.sample(rows, seeds, positions, **FILTERS[case], backend=backend)
    assert_distributed(tokens, hugging_face(logits, **FILTERS[case]))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("case", ["none", "top_k", "top_p", "all"])
def test_draws_from_a_large_vocabulary_on_a_gpu(case, rows):
    """Every way to divide rows among programs, of every backend; 60 tokens have nearly all of the probability."""
    vocabulary, draws = 131072, 12288
    logits = torch.full((vocabulary,), -40.0)
    places = torch.randperm(vocabulary)[:60]
    logits[places] = torch.randn(60) * 2
    number = torch.full((vocabulary,), 60)
    number[places] = torch.arange(60)
    expected = hugging_face(logits, **FILTERS[case])[places]
    full = logits.expand(rows, -1).contiguous().cuda()
    seeds, positions = (t.cuda() for t in keyed(draws, TORCH))
    for backend in implementations("sample", "fwd", "cuda"):
        parts = [
            ops.sample(full, seeds[i : i + rows], positions[i : i + rows], **FILTERS[case], backend=backend)
            for i in range(0, draws, rows)
        ]
        tokens = number[torch.cat(parts).cpu()]
        assert int((tokens == 60).sum()) == 0  # all of them together: below 1e-7
        assert_distributed(tokens, expected / expected.sum())


def test_a_wrong_distribution_is_seen():
    logits = torch.randn(60) * 2
    tokens = ops.sample(logits.expand(40000, -1), *keyed(40000, TORCH), temperature=1.05, backend="torch")
    with pytest.raises(AssertionError):
        assert_distributed(tokens, hugging_face(logits))


def by_definition(x, temperature, top_k, top_p, min_p):
    """Weights of one row after each filter's definition, in Python's integers."""
    clean = numbers.clean(x[None])
    w = numbers.weights(clean, numbers.slopes(torch.tensor([temperature])))[0].tolist()
    values = clean[0].tolist()
    if temperature == 0:
        return [1 << numbers.UNIT if v == max(values) > -torch.inf else 0 for v in values]
    if 0 < top_k < len(w):
        kth = sorted(values, reverse=True)[top_k - 1]
        w = [a if v >= kth else 0 for a, v in zip(w, values, strict=True)]
    goal = int(numbers.share(torch.tensor([sum(w)]), torch.tensor([top_p])))
    above = [sum(b for b, u in zip(w, values, strict=True) if u > v) for v in values]
    w = [a if more < goal else 0 for a, more in zip(w, above, strict=True)]
    return [a if a >= int(numbers.least(torch.tensor([min_p]))) else 0 for a in w]


@given(
    st.integers(1, 40),
    st.sampled_from([0.0, 0.4, 1.0, 3.0]),
    st.sampled_from([0, 1, 3, 40, 1000]),
    st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.booleans(),
    st.integers(0, 2**20),
)
@settings(max_examples=150, deadline=None)
def test_what_the_filters_leave(n, temperature, top_k, top_p, min_p, ties, seed):
    """The reference, which sorts, leaves what the definitions say, ties and hidden tokens included."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3
    x = x.round() if ties else x
    x[torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)) < 0.2] = -torch.inf
    zero = torch.zeros(1, dtype=torch.int64)
    args = raw_arguments(x[None], zero, zero, temperature, top_k, top_p, min_p, 0)
    kept, _ = kept_weights(numbers.clean(x[None]), args)
    assert kept[0].tolist() == by_definition(x, temperature, top_k, top_p, min_p)


def one_value_a_row(m, device):
    """Parameters that differ by row, with each filter off in some."""
    pick = lambda values, dtype: torch.tensor([values[i % len(values)] for i in range(m)], dtype=dtype, device=device)  # noqa: E731
    return {
        "temperature": pick((1.0, 0.5, 2.0, 0.0, 1.0), torch.float32),
        "top_k": pick((0, 5, 1, 12, 100, 9, 3), torch.int32),
        "top_p": pick((0.9, 1.0, 0.3, 1e-8, 0.99, 0.6), torch.float32),
        "min_p": pick((0.0, 0.0, 0.05, 1.0), torch.float32),
    }


def filters_and_rounds():
    """Every filter in searches of three rounds, all of them without a search; the others with --exhaustive."""
    for names in ((), ("top_k",), ("top_p",), ("top_k", "top_p"), ("top_k", "top_p", "min_p")):
        for rounds in (0, 1, 3):
            others = rounds == 1 or (rounds == 0 and len(names) < 3)
            marks = [pytest.mark.exhaustive] if others else []
            yield pytest.param(names, rounds, marks=marks, id=f"{'-'.join(names) or 'none'}-{rounds}")


@pytest.mark.parametrize(("names", "rounds"), [*filters_and_rounds()])
@pytest.mark.interp
def test_the_kernels_leave_the_same_tokens(names, rounds):
    """Programs of two tokens: their sums are the weights that are left, two by two, so equal sums are equal sets."""
    from tilewright.ops.sampling.kernels.triton.sample import Config, Rows

    m, n = 7, 30
    x = torch.randn(m, n) * 3
    x[::3] = x[::3].round()
    x[1, ::2], x[2] = -torch.inf, -torch.inf
    parameters = one_value_a_row(m, "cpu")
    parameters = {name: parameters[name] if name in (*names, "temperature") else None for name in parameters}
    args = raw_arguments(x, *keyed(m, TORCH), *parameters.values(), 0)
    _, masses, _ = Rows(args, Config(2, rounds, 1)).kept()
    wanted, _ = kept_weights(numbers.clean(x), args)
    assert torch.equal(masses, wanted.view(m, n // 2, 2).sum(-1))


@everywhere_and_in_cuda
@pytest.mark.parametrize("n", [1, 7, 32000, pytest.param(50257, marks=pytest.mark.exhaustive), 151936])
def test_vocabularies(n, place):
    """The same tokens and log-probabilities as on the CPU, for vocabularies of models."""
    rows = 6 if n < 1000 else 2 if n < 100_000 else 1
    x = (torch.randn(rows, n) * 3).bfloat16()
    seeds, positions = keyed(rows, TORCH)
    options = {"top_k": 300, "top_p": 0.95, "temperature": 0.9, "logprobs": "sampled"}
    wanted, logs = ops.sample(x, seeds, positions, **options, backend="torch")
    moved = (t.to(place.device) for t in (x, seeds, positions))
    tokens, logprobs = ops.sample(*moved, **options, backend=place.backend)
    assert torch.equal(tokens.cpu(), wanted)
    torch.testing.assert_close(logprobs.cpu(), logs, rtol=1e-6, atol=1e-6)


@everywhere_and_in_cuda
def test_a_token_does_not_depend_on_the_batch(place):
    m, n = 9, 200
    x = torch.randn(m, n, device=place.device) * 3
    seeds, positions = keyed(m, place)
    parameters = one_value_a_row(m, place.device)
    together = ops.sample(x, seeds, positions, **parameters, backend=place.backend)
    for i in range(m):
        one = slice(i, i + 1)
        options = {name: tensor[one] for name, tensor in parameters.items()}
        alone = ops.sample(x[one], seeds[one], positions[one], **options, backend=place.backend)
        assert torch.equal(alone, together[one])


@everywhere_and_in_cuda
def test_temperature_0_is_greedy(place):
    x = (torch.randn(20, 50, device=place.device) * 2).round()
    seeds, positions = keyed(20, place)
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        tokens = ops.sample(x, seeds, positions, temperature=0.0, **options, backend=place.backend)
        assert torch.equal(tokens, ops.greedy(x, backend=place.backend))


@everywhere_and_in_cuda
def test_rows_that_models_should_not_make(place):
    """NaN is never drawn, infinities are; nothing gives -1."""
    x = torch.full((4, 8), -torch.inf, device=place.device)
    x[0, 3], x[1, :], x[2, 5], x[2, 6] = 1.0, torch.nan, torch.inf, 3e38
    seeds, positions = keyed(4, place)
    tokens, logprobs = ops.sample(x, seeds, positions, top_p=0.9, logprobs="sampled", backend=place.backend)
    assert tokens.tolist() == [3, -1, 5, -1]
    assert logprobs.tolist() == [0.0, -torch.inf, 0.0, -torch.inf]


@everywhere_and_in_cuda
@pytest.mark.parametrize("logprobs", ["sampled", "model"])
def test_log_probabilities(logprobs, place):
    x = torch.randn(12, 90, device=place.device) * 2
    options = {"temperature": 0.7, "top_k": 9}
    tokens, logs = ops.sample(x, *keyed(12, place), **options, logprobs=logprobs, backend=place.backend)
    wanted = hugging_face(x, **(options if logprobs == "sampled" else {})).log()
    torch.testing.assert_close(logs.double(), wanted.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-6)


def test_log_probabilities_of_the_likeliest_follow():
    x = torch.randn(5, 90) * 2
    tokens, logs = ops.sample(x, *keyed(5, TORCH), logprobs="model", backend="torch")
    values, indices = ops.top_k(x, 4, backend="torch")
    made = logs[:, None] + values - x.gather(1, tokens[:, None])
    torch.testing.assert_close(made, x.log_softmax(-1).gather(1, indices), rtol=1e-5, atol=1e-5)


def test_seeds_and_positions_give_other_tokens():
    x = torch.zeros(64, 1 << 16)
    seeds, positions = keyed(64, TORCH)
    first = ops.sample(x, seeds, positions, backend="torch")
    assert len(first.unique()) > 60
    assert (ops.sample(x, seeds + 1, positions, backend="torch") != first).sum() > 60
    assert torch.equal(ops.sample(x, seeds, positions, backend="torch"), first)


@pytest.mark.parametrize("name", ["apply_penalties", "greedy", "sample", "top_k", "verify_chain"])
def test_a_gradient_is_refused(name):
    x = torch.randn(2, 8, requires_grad=True)
    counts, drafts = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int64)
    calls = {
        "apply_penalties": lambda: ops.apply_penalties(x, counts),
        "greedy": lambda: ops.greedy(x),
        "sample": lambda: ops.sample(x, *keyed(2, TORCH)),
        "top_k": lambda: ops.top_k(x, 2),
        "verify_chain": lambda: ops.verify_chain(x[:, None], drafts, *keyed(2, TORCH)),
    }
    with pytest.raises(InputError, match=f"{name}: .* requires a gradient, and the op has none"):
        calls[name]()
    with torch.no_grad():
        calls[name]()
