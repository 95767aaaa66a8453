"""What counts as a failure, and what as a skip: a kernel that is not compiled, loaded or launched has failed."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.validate.broken.planted import BACKEND, MEMORY, OP, Fault, correct, correct_backward, planted
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from tilewright import settings
from tilewright.dispatch import Sample, Workload, contract
from tilewright.errors import BackendError, KernelMissingError, RefusedError
from tilewright.jit.compilers import get_compiler
from tilewright.jit.compilers.kernel_args import Pointer
from tilewright.jit.host_launch import HostKernel
from tilewright.validate import MODES, check
from tilewright.validate.case import Case, NotApplicable
from tilewright.validate.checking import _run
from tilewright.validate.modes import Mode, streams

SMALL = Workload("small", {"M": 6, "N": 40})
NOT_CPP = "namespace tilewright { template <class Config> void entry(float* y, int threads) { this is no C++; } }"
UNLINKED = """namespace tilewright {
void no_library_has_it();
template <class Config> void entry(float* y, int threads) { no_library_has_it(); }
}"""


class Params(NamedTuple):
    """Of the templates above."""

    T: torch.dtype


class Args(NamedTuple):
    y: Pointer


def report(launch, direction="fwd", modes="quick", sample=SMALL, dtype=None):
    with planted(Fault(launch.__name__, launch, direction, "eager", quiet=False, fools_allclose=False)):
        return check(OP, sample, modes=modes, backend=BACKEND, device="cpu", dtype=dtype)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes a kernel of a C++ text, in an empty cache."""
    if get_compiler("host").version() is None:
        pytest.skip(get_compiler("host").install())
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()

    def make(text):
        file = Path(tmp_path / "entry.cpp")
        file.write_text(text)
        return HostKernel(file, "entry", Args)

    yield make
    monkeypatch.undo()
    settings.reload()


@pytest.mark.parametrize(
    ("text", "words"), [(NOT_CPP, "CompileError"), (UNLINKED, "cannot be loaded")], ids=["compile", "load"]
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_kernel_that_is_not_compiled_or_loaded_has_failed(kernel, text, words, direction):
    broken = kernel(text)

    def launch(outs, *args, config):
        broken(Args(outs[0]), Params(torch.float32))

    made = report(launch, direction)
    assert not made.passed
    assert {"eager", "poison"} <= set(made.failed_modes) if direction == "fwd" else "backward" in made.failed_modes
    assert words in str(made)
    assert not any(words in str(r) for r in made.results if r.status == "skipped")


def test_a_kernel_that_is_not_launched_has_failed():
    def launch(outs, *args, config):
        raise BackendError("launching rms_norm on cuda:0: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    made = report(launch, modes=["eager"])
    assert made.failed_modes == ("eager",)
    assert "raised BackendError: launching rms_norm" in str(made)


def test_a_kernel_that_fails_for_one_layout_alone_has_failed():
    """The results before it were right, and the report says what happened to this one."""

    def launch(outs, x, *args, config):
        if not x.is_contiguous():
            raise BackendError("CUDA_ERROR_INVALID_VALUE")
        correct(outs, x, *args, config=config)

    assert report(launch).failed_modes == ("non_contiguous",)


def test_what_is_missing_is_skipped_and_nothing_ran():
    def launch(outs, *args, config):
        raise KernelMissingError("no kernel in the cache, and no compiler")

    made = report(launch, modes=["eager"])
    assert [r.status for r in made.results] == ["skipped"]
    assert not made.passed


@pytest.fixture
def case():
    """rms_norm on the torch backend."""
    subject = contract(OP)
    cpu = torch.device("cpu")
    return Case(
        subject, "case", lambda seed: subject.inputs(SMALL.params, torch.float32, cpu, seed), backend="torch", seed=0
    )


@pytest.mark.parametrize("error", [NotApplicable, RefusedError, KernelMissingError, BackendError, ValueError])
def test_a_fault_that_was_found_outlives_what_comes_after(case, error):
    def run(case, found):
        found.require(False, "the first fault")
        raise error("the rest cannot be run")

    made = _run(Mode("name", "doc", run, False, False), case)
    assert made.status == "failed"
    assert made.details[0] == "the first fault"


@pytest.mark.parametrize(("error", "status"), [(RefusedError, "passed"), (BackendError, "failed")])
def test_one_of_several_ways_may_be_refused(case, error, status):
    def run(case, found):
        with found.part("transposed") as where:
            raise error("needs unit stride")
        with found.part("padded") as where:
            found.outputs(case.call(case.sample()), where)

    made = _run(Mode("name", "doc", run, False, False), case)
    assert made.status == status
    assert "needs unit stride" in made.details[0]


def test_ways_that_are_all_refused_are_a_skip(case):
    def run(case, found):
        for name in ("transposed", "padded"):
            with found.part(name):
                raise RefusedError("needs unit stride")

    made = _run(Mode("name", "doc", run, False, False), case)
    assert made.status == "skipped"
    assert made.details == ("transposed: needs unit stride; padded: needs unit stride",)


def test_a_mode_that_judges_nothing_is_skipped(case):
    made = _run(Mode("name", "doc", lambda case, found: None, False, False), case)
    assert (made.status, made.details) == ("skipped", ("nothing was judged",))


def test_every_mode_counts_what_it_judges():
    """On a case that all modes but those of a GPU and of promises can run, none says that it judged nothing."""
    with planted(None):
        made = check(OP, SMALL, modes="quick", backend=BACKEND, device="cpu").require()
    reasons = {r.mode: r.details for r in made.results if r.status == "skipped"}
    assert set(reasons) == {"reference_bits", "single_elements", "cuda_graph", "side_stream"}, reasons


def test_refusals_alone_are_no_proof():
    """Bad inputs are refused before a backend is chosen: they say nothing of one that cannot run here."""
    made = check(OP, SMALL, modes="quick", backend="triton", device="cpu")
    assert {r.mode for r in made.results if r.status == "passed"} == {"bad_inputs"}
    assert not made.ran
    assert not made.passed
    assert "NOT CHECKED, nothing ran" in str(made)
    assert made.to_dict()["ran"] is False


def test_the_command_says_so_too():
    from tilewright.cli import app

    words = ["check", "layer_norm", "--case", "M=6,N=40", "--modes", "quick", "--device", "cpu", "--backend"]
    done = CliRunner().invoke(app, [*words, "cpu"])
    assert done.exit_code == 1
    assert "NOT CHECKED, nothing ran" in done.stdout
    assert CliRunner().invoke(app, [*words, "torch"]).exit_code == 0


def test_the_backend_of_a_backward_is_named():
    with planted(None):
        made = check(OP, SMALL, modes=["backward"], backend=BACKEND, device="cpu")
    assert "has none for this call" not in str(made.require())
    made = check(OP, SMALL, modes=["backward", "eager"], backend="cpu", device="cpu").require()
    assert "the backward is torch's: cpu has none for this call" in str(made)
    assert "auto takes cpu" in str(check(OP, SMALL, modes=["eager"], device="cpu"))


@pytest.fixture
def graphs(monkeypatch):
    """Graphs on a CPU: a replay runs the call again and writes into the memory of the first results."""

    def captured(run, case):
        run()
        made = run()

        def replay():
            for old, new in zip(tree_leaves(made), tree_leaves(run()), strict=True):
                old.copy_(new)

        return made, replay

    monkeypatch.setattr(streams, "_needs_gpu", lambda case: None)
    monkeypatch.setattr(streams, "_captured", captured)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_graph_is_replayed_three_times_on_new_data(graphs, direction):
    """A launch that is right until its seventh time, as one with a counter that is not set back."""
    right = correct if direction == "fwd" else correct_backward

    def wears_out(outs, *args, config):
        right(outs, *args, config=config)
        seen = MEMORY.setdefault(0, torch.zeros(()))
        seen += 1
        if seen >= 7:
            outs[0].add_(1)

    assert report(wears_out, direction, modes=["eager", "backward"][: 1 + (direction == "bwd")]).passed
    made = report(wears_out, direction, modes=["cuda_graph"])
    assert made.failed_modes == ("cuda_graph",), str(made)
    assert "replay 3: " in str(made)
    assert "replay 2: " not in str(made)
    assert report(correct, modes=["cuda_graph"]).passed


def test_results_kept_by_the_weights_address_need_new_weights(graphs):
    """A sample that is given: its weight changes, too."""

    def kept(outs, x, weight, *args, config):
        held = MEMORY.setdefault(weight.data_ptr(), weight.clone())
        correct(outs, x, held, *args, config=config)

    sample = Sample((torch.randn(6, 40), torch.randn(40)))
    made = report(kept, modes=["eager", "changed_inputs", "cuda_graph"], sample=sample)
    assert made.failed_modes == ("changed_inputs", "cuda_graph"), str(made)


def test_a_row_that_is_small_is_missed_too():
    """A millionth of the others, and zeros in its place."""

    def launch(outs, *args, config):
        correct(outs, *args, config=config)
        if outs[0].shape[0] > 7:
            outs[0][7] = 0

    x = torch.randn(48, 256)
    x[7] *= 1e-9
    made = report(launch, modes=["eager"], sample=Sample((x.bfloat16(), torch.randn(256).bfloat16())))
    assert made.failed_modes == ("eager",)
    assert "1 of 48 rows wrong: row 7" in str(made)


def test_a_sample_without_other_values_is_skipped():
    made = check(OP, (torch.ones(4, 8), torch.ones(8)), modes=["changed_inputs"], backend="torch", device="cpu")
    assert made.results[0].details == ("there are no other values of this kind",)


def test_every_mode_but_that_of_refusals_runs_the_op():
    assert [name for name, mode in MODES.items() if not mode.computes] == ["bad_inputs"]
