"""Requests that come, are computed, cancelled and read in any order: no page is leaked, written by two or freed twice.

The device of `test_scheduler` computes the steps, so a page with two writers is also seen in what is read.
"""

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.engine.test_scheduler import PROMPTS, STOP, Device, answer, read

from tilewright.engine.drafter import DeviceDrafter, PromptLookup
from tilewright.engine.pages import PagePool
from tilewright.engine.params import SamplingParams
from tilewright.engine.scheduler import Scheduler
from tilewright.engine.sequence import Sequence, Status

LONGEST = 20  # tokens of the longest request


class Requests(RuleBasedStateMachine):
    """The scheduler and its pool as the engine drives them, one step ahead of what is read where nothing drafts."""

    @initialize(
        page_size=st.integers(1, 3),
        extra_pages=st.integers(0, 6),
        max_batch=st.integers(1, 4),
        room=st.integers(1, 9),
        drafts=st.sampled_from((0, 0, 3)),
    )
    def make(self, page_size, extra_pages, max_batch, room, drafts):
        self.pool = PagePool(-(-LONGEST // page_size) + extra_pages, page_size)
        self.scheduler = Scheduler(self.pool, max_batch, max(room, max_batch * (1 + drafts)), drafts)
        self.device, self.queued, self.every = Device(self.pool), deque(), []

    @rule(prompt=PROMPTS, count=st.integers(1, LONGEST - 12), stops=st.booleans(), adapter=st.integers(0, 1))
    def add(self, prompt, count, stops, adapter):
        drafter = (None, PromptLookup(), DeviceDrafter())[count % 3] if self.scheduler.drafts else None
        params, its_stops = SamplingParams(max_tokens=count), frozenset((STOP,) if stops else ())
        self.every.append(Sequence(list(prompt), params, 0, its_stops, drafter, adapter=adapter))
        self.scheduler.add(self.every[-1])

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            if self.scheduler.drafts:
                self.read_all(0)
            if chunks := self.scheduler.plan():
                self.queued.append(self.device.compute(chunks))
            self.read_all(1 if chunks else 0)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def cancel(self, data):
        self.scheduler.finish(data.draw(st.sampled_from(self.unfinished())), "cancelled")

    @invariant()
    def every_page_has_those_holders_that_use_it(self):
        if not hasattr(self, "pool"):
            return
        pool, running = self.pool, self.scheduler.running
        holders = Counter(page for sequence in running for page in sequence.pages)
        assert {page: count for page, count in enumerate(pool._holders) if count} == holders
        assert all(not sequence.pages for sequence in self.every if sequence.status is not Status.RUNNING)
        free, idle = Counter(pool._free), set(pool._idle)
        assert not free or max(free.values()) == 1, "freed twice"
        assert sorted([*free, *idle, *holders]) == list(range(pool.pages)), "each page is free, idle or held"
        for sequence in running:
            for page in sequence.pages[sequence.cached // pool.page_size :]:
                assert holders[page] == 1, "a page that is still written has one holder"
        assert len({sequence.slot for sequence in running}) == len(running) <= self.scheduler.max_batch

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _ in range(2000):
            if not (self.queued or self.scheduler.running or self.scheduler.waiting):
                break
            self.step(1)
            self.every_page_has_those_holders_that_use_it()
        for sequence in self.every:
            wanted = answer(sequence.tokens[: sequence.prompt_length], sequence.params.max_tokens, sequence.stops)
            if sequence.reason == "cancelled":
                wanted = wanted[: len(sequence.new_tokens)]
            assert sequence.new_tokens == wanted
        assert self.pool.held == 0

    def unfinished(self):
        return [sequence for sequence in self.every if sequence.status is not Status.FINISHED]

    def read_all(self, but):
        while len(self.queued) > but:
            read(self.scheduler, *self.queued.popleft())


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.exhaustive
def test_many_steps():
    """10^5 rules, each of up to 4 steps."""
    run_state_machine_as_test(Requests, settings=settings(max_examples=2000, stateful_step_count=50, deadline=None))
