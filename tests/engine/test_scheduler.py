"""Steps of many requests: every token is computed once it can be, over the right keys, and every request ends.

The device is a list of pages that hold tokens.  A step writes its tokens where the block table says and then reads
every sequence back, so a page that two sequences write, or that is taken for a prefix too early, is seen at once.
A draft model has pages of its own under the same numbers, and reads in them what its target reads.
"""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.engine.drafter import UNKNOWN, DeviceDrafter, PromptLookup
from tilewright.engine.pages import PagePool
from tilewright.engine.params import SamplingParams
from tilewright.engine.scheduler import Scheduler
from tilewright.engine.sequence import Sequence, Status

STOP = 9


class Device:
    """What the GPU does with a plan, and what the host reads one step later."""

    def __init__(self, pool):
        self.size = pool.page_size
        self.pages, self.draft_pages = ([[None] * self.size for _ in range(pool.pages)] for _ in range(2))
        self.newest = {}

    def compute(self, chunks):
        drawn = []
        assert len({chunk.sequence.slot for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            tokens = sequence.tokens[chunk.start : chunk.end]
            if len(tokens) < chunk.count:
                tokens.append(self.newest[sequence.slot])
            assert len(tokens) == chunk.count
            self.write(self.draft_pages, chunk, tokens, chunk.start)
            if UNKNOWN in chunk.drafts:
                chunk.drafts = self.draft(chunk)
            self.write(self.pages, chunk, [*tokens, *chunk.drafts], chunk.start)
        for chunk in chunks:
            read = self.read(self.pages, chunk, length := chunk.end + len(chunk.drafts))
            tokens = [next_token(read[:end]) for end in range(chunk.end, length + 1)] if chunk.draws else []
            if chunk.draws:
                self.newest[chunk.sequence.slot] = tokens[0]
            drawn.append(tokens)
        return chunks, drawn

    def draft(self, chunk):
        """A model that is often right, and stores the keys of every draft."""
        drafts = []
        for position in range(chunk.end, chunk.end + len(chunk.drafts)):
            read = self.read(self.draft_pages, chunk, position)
            assert read == [*chunk.sequence.tokens, *drafts]
            drafts.append(next_token(read) if sum(read) % 4 else 0)
            self.write(self.draft_pages, chunk, drafts[-1:], position)
        return tuple(drafts)

    def write(self, pages, chunk, tokens, start):
        for position, token in enumerate(tokens, start):
            pages[chunk.sequence.pages[position // self.size]][position % self.size] = token

    def read(self, pages, chunk, length):
        return [pages[chunk.sequence.pages[i // self.size]][i % self.size] for i in range(length)]


def next_token(tokens):
    """The "model": depends on all tokens before, and mostly repeats what stood 3 before."""
    checksum = (sum((i + 1) * token for i, token in enumerate(tokens)) * 7 + len(tokens)) % 10
    return tokens[-3] if len(tokens) > 2 and checksum < 5 else checksum


def answer(prompt, count, stops):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def read(scheduler, chunks, drawn):
    """What the engine does with the results of a step."""
    for chunk, tokens in zip(chunks, drawn, strict=True):
        for token in tokens[: scheduler.accept(chunk, tokens)]:
            if chunk.sequence.status is not Status.FINISHED:
                chunk.sequence.read(token, None)
                if chunk.sequence.reason:
                    scheduler.finish(chunk.sequence, chunk.sequence.reason)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 8), st.booleans(), st.integers(0, 6)), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(
    REQUESTS,
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 6),
    st.integers(0, 12),
    st.sampled_from((0, 0, 1, 3)),
    st.sampled_from((PromptLookup, DeviceDrafter)),
)
def test_every_request_gets_its_answer(
    requests, page_size, max_batch, step_tokens, extra_pages, cancelled, drafts, drafter
):
    longest = max(len(prompt) + count for prompt, count, _, _ in requests)
    pool = PagePool(-(-longest // page_size) + extra_pages, page_size)
    step_tokens = max(step_tokens, max_batch * (1 + drafts)) if drafts else step_tokens
    scheduler, device = Scheduler(pool, max_batch, step_tokens, drafts), Device(pool)
    arrivals = deque(sorted(requests, key=lambda request: request[3]))
    every, queued, steps = [], deque(), 0
    while arrivals or queued or scheduler.running or scheduler.waiting:
        while arrivals and arrivals[0][3] <= steps:
            prompt, count, stops, _ = arrivals.popleft()
            its_stops, its_drafter = frozenset((STOP,) if stops else ()), drafter() if drafts and count % 4 else None
            every.append(Sequence(list(prompt), SamplingParams(max_tokens=count), 0, its_stops, its_drafter))
            scheduler.add(every[-1])
        if steps == cancelled and every and every[0].status is not Status.FINISHED:
            scheduler.finish(every[0], "cancelled")
        if queued and drafts:
            read(scheduler, *queued.popleft())
        chunks = scheduler.plan()
        assert sum(chunk.count + len(chunk.drafts) for chunk in chunks) <= step_tokens
        assert len(chunks) <= max_batch
        if chunks:
            queued.append(device.compute(chunks))
        if len(queued) > 1 or (queued and not chunks):  # the host reads one step behind
            read(scheduler, *queued.popleft())
        steps += 1
        assert steps < 2000, "requests do not end"
    for sequence in every:
        expected = answer(sequence.tokens[: sequence.prompt_length], sequence.params.max_tokens, sequence.stops)
        if sequence.reason == "cancelled":
            assert sequence.new_tokens == expected[: len(sequence.new_tokens)]
        else:
            assert sequence.new_tokens == expected
            assert sequence.reason == ("stop" if expected[-1] in sequence.stops else "length")
    assert pool.held == 0
    assert 0 <= scheduler.accepted_tokens <= scheduler.draft_tokens
    assert drafts or not scheduler.draft_tokens


def scheduler_of(pages, page_size=2, max_batch=4, step_tokens=8):
    return Scheduler(PagePool(pages, page_size), max_batch, step_tokens)


def request(prompt, count=4):
    return Sequence(list(prompt), SamplingParams(max_tokens=count), 0, frozenset())


def test_those_that_decode_come_before_prompts_and_a_long_prompt_is_cut():
    scheduler = scheduler_of(32)
    first, long = request(range(3)), request(range(20))
    scheduler.add(first)
    assert [(c.count, c.draws) for c in scheduler.plan()] == [(3, True)]
    scheduler.add(long)
    plan = scheduler.plan()
    assert [(c.sequence is first, c.count, c.draws) for c in plan] == [(True, 1, True), (False, 7, False)]


def test_a_prefix_is_shared_only_after_the_gpu_wrote_it():
    scheduler = scheduler_of(32, step_tokens=16)
    scheduler.add(request([1, 2, 3, 4, 5]))
    (chunk,) = scheduler.plan()
    early, late = request([1, 2, 3, 4, 6]), request([1, 2, 3, 4, 7])
    scheduler.add(early)
    scheduler.plan()
    assert early.reused == 0
    scheduler.accept(chunk, [])
    scheduler.add(late)
    scheduler.plan()
    assert late.reused == 4
    assert late.pages[:2] == chunk.sequence.pages[:2]


def test_the_youngest_gives_its_pages_back_and_goes_on_later():
    scheduler = scheduler_of(4, step_tokens=8)
    old, young = request([1, 2, 3, 4]), request([5, 6, 7])
    scheduler.add(old)
    scheduler.add(young)
    assert len(scheduler.plan()) == 2
    assert [c.sequence for c in scheduler.plan()] == [old]
    assert young.status is Status.WAITING and scheduler.preemptions == 1
    assert scheduler.waiting[0] is young and young.pages == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"seed": 2**63},
        {"min_tokens": 129},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"stop": ("a", "")},
        {"stop": ""},
        {"logit_bias": {3: float("nan")}},
    ],
)
def test_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        SamplingParams(**wrong)


def test_tokens_are_speculated_where_they_stood_before():
    lookup = PromptLookup()
    assert lookup.drafts([1, 2, 3, 4, 1], 3) == ()
    assert lookup.drafts([1, 2, 3, 4, 1, 2], 3) == (3, 4, 1)
    assert lookup.drafts([1, 2, 3, 4, 1, 2, 9, 3, 4], 2) == (1, 2)
    assert lookup.drafts([1, 2, 3, 4, 1, 2, 9, 3, 4, 5, 2, 3, 4], 2) == (1, 2), "three that agree go before two"
    assert PromptLookup().drafts([7, 7, 7], 4) == (7, 7, 7, 7)
    assert PromptLookup().drafts([7], 4) == ()


def test_drafts_keep_to_the_room_the_length_and_the_pages():
    scheduler = Scheduler(PagePool(6, 2), 1, 16, drafts=8)
    sequence = Sequence([1, 2] * 4, SamplingParams(max_tokens=5), 0, frozenset(), PromptLookup())
    scheduler.add(sequence)
    (chunk,) = scheduler.plan()
    assert (chunk.count, chunk.drafts) == (8, ()), "a prompt speculates nothing"
    assert scheduler.accept(chunk, [1]) == 1
    sequence.read(1, None)
    (chunk,) = scheduler.plan()
    assert chunk.drafts == (2, 1, 2), "of 4 that may come, the last is drawn behind the drafts"
    assert scheduler.accept(chunk, [2, 1, 0, 0]) == 3
    assert (sequence.cached, chunk.end) == (11, 11)
    assert (scheduler.draft_tokens, scheduler.accepted_tokens) == (3, 2)
