"""Inside `collect` a kernel leaves a job and launches nothing."""

import threading

import pytest

from tilewright.jit.collect import collect, collecting, machine


def test_outside_nothing_collects():
    assert collecting() is None


def test_a_job_is_what_was_asked_for_and_runs_later():
    made = []
    with collect("sm_90") as collector:
        collecting().add("kernel", lambda: made.append(collector.arch))
    assert made == []
    (job,) = collector.jobs
    job.compile()
    assert (job.name, made) == ("kernel", ["sm_90"])


def test_equal_keys_are_one_job_and_jobs_without_a_key_are_kept():
    with collect("sm_90") as collector:
        for key in ("a", "a", "b", None, None):
            collector.add("kernel", lambda: None, key)
    assert [job.key for job in collector.jobs] == ["a", "b", None, None]


def test_a_block_within_a_block_keeps_its_own_jobs():
    with collect("sm_90") as outer:
        with collect("gfx942") as inner:
            collecting().add("inner", lambda: None)
        collecting().add("outer", lambda: None)
    assert ([job.name for job in outer.jobs], [job.name for job in inner.jobs]) == (["outer"], ["inner"])


def test_an_exception_ends_the_collection():
    with pytest.raises(RuntimeError, match="on purpose"), collect("sm_90"):
        raise RuntimeError("on purpose")
    assert collecting() is None


def test_other_threads_go_on_launching():
    seen = []
    with collect("sm_90"):
        thread = threading.Thread(target=lambda: seen.append(collecting()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize(
    ("arch", "name"),
    [("sm_90a", "sm_90"), ("sm_90", "sm_90"), ("sm_100f", "sm_100"), ("gfx942", "gfx942"), ("gfx90a", "gfx90a")],
)
def test_two_names_of_one_machine_are_one(arch, name):
    assert machine(arch) == name
    with collect(arch) as collector:
        assert collector.arch == name
