"""An op that writes into its arguments is tuned like others: what it wrote is judged."""

from typing import NamedTuple

import pytest
import torch
from tests.harness.registry import own_registry

from tilewright.dispatch import contract, register_impl
from tilewright.tuning.problem import Problem
from tilewright.tuning.subject import Subject

OP = "kv_append_"


class Config(NamedTuple):
    kind: str


@pytest.fixture
def subject():
    """A problem of the op, with a backend whose configurations are right and wrong."""
    subject_contract = contract(OP)

    with own_registry():

        @register_impl(OP, backend="cpu", configure=lambda bucket, dtype: Config("right"), config_type=Config)
        def launch(outs, *args, config):
            assert outs == ()
            if config.kind != "nothing":
                subject_contract.forward.plain(*args)
            if config.kind == "beside":  # a slot that belongs to no new token
                args[2].select(0, -1).select(0, -1).add_(1)

        (workload, *_) = subject_contract.cpu_workloads
        yield Subject(Problem(OP, "fwd", workload.params, torch.float32, "cpu", 0, ("tilewright.ops",)))


def test_the_right_one_passes_and_is_timed(subject):
    assert subject.check("cpu", Config("right")) is None
    ours, torchs = subject.time([("cpu", Config("right")), ("torch", None)], rounds=2)
    assert all(us > 0 for us in (*ours, *torchs))


@pytest.mark.parametrize("kind", ["nothing", "beside"])
def test_a_wrong_one_is_told(subject, kind):
    assert subject.check("cpu", Config(kind)).startswith("wrong")


def test_the_tensors_of_the_problem_stay_as_they_were(subject):
    before = [t.clone() for t in subject.args if isinstance(t, torch.Tensor)]
    subject.check("cpu", Config("beside"))
    after = [t for t in subject.args if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
