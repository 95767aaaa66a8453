"""`TILEWRIGHT_AUTOTUNE=first_call`: an op is measured at the first call of a size that no table has, and only there."""

import logging
import threading

import pytest
import torch
from tests.tuning.conftest import CompilersHere, Here
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright
from tilewright import settings
from tilewright.dispatch import contract, replay
from tilewright.dispatch.contract import _functions
from tilewright.dispatch.tables import measured, table
from tilewright.errors import TableError
from tilewright.hardware import device_info
from tilewright.tuning import first_call, run
from tilewright.tuning.problem import Problem, fake_call, modules_of
from tilewright.tuning.sizes import workload_of
from tilewright.tuning.watched import Watched


@pytest.fixture
def op(fake_op, monkeypatch):
    """The fake op with two candidates, both right, tuned in this process."""
    monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "first_call")
    settings.reload()
    monkeypatch.setattr(run, "Watched", Here)
    monkeypatch.setattr(run, "Compilers", CompilersHere)
    options = fake_op.options(fake_op.FAST)
    tilewright.dispatch.register_impl(fake_op.NAME, **options)(fake_op.launch)
    yield fake_op
    tilewright.dispatch.unregister_impl(fake_op.NAME, backend="cpu")


@pytest.fixture
def tuned(monkeypatch):
    """The sizes that were tuned."""
    sizes = []
    tune = run.Run.tune

    def counted(self, case, problem, deadline, say):
        sizes.append((case.direction, dict(case.workload.params)))
        return tune(self, case, problem, deadline, say)

    monkeypatch.setattr(run.Run, "tune", counted)
    return sizes


def plan_of(op, x):
    return op.FORWARD.plan((x,), "auto", "default")


def test_the_first_call_of_a_size_measures_and_remembers(op, tuned, cache_folder, caplog):
    caplog.set_level(logging.INFO, "tilewright")
    x = torch.randn(33, 70)
    before = x.clone()
    for _ in range(3):
        assert torch.equal(op.double(x), 2 * x)
    assert tuned == [("fwd", {"M": 33, "N": 70})]
    assert torch.equal(x, before)
    assert plan_of(op, x).row is not None
    (file,) = (cache_folder / "tables").glob(f"*/{op.NAME}.json")
    assert [row.bucket for row in table.read(file)[1]] == ["M=33,N=70"]
    said = [r for r in caplog.records if "no table has this size, so its first call measures it" in r.message]
    assert [r.levelname for r in said] == ["INFO"]
    assert f"{op.NAME} M=33,N=70 float32" in said[0].message

    op.double(torch.randn(34, 70))
    assert tuned[1:] == [("fwd", {"M": 34, "N": 70})]


def test_the_backward_is_a_size_of_its_own(op, tuned):
    x = torch.randn(33, 70, requires_grad=True)
    with tilewright.use_backend("cpu"):
        op.double(x).sum().backward()
    assert [direction for direction, _ in tuned] == ["fwd", "bwd"]
    assert op.BACKWARD.plan((x.detach(),), "auto", "default").config == op.FAST


def test_later_calls_are_replayed_and_ask_nothing(op, tuned, monkeypatch):
    x = torch.randn(33, 70)
    op.double(x)
    op.double(x)

    def fails(*args):
        raise AssertionError("a planned call asked")

    monkeypatch.setattr(measured, "is_due", fails)
    signature = replay.lookup(op.FORWARD, (x,), "auto", "default")
    assert signature[0] is not None
    assert torch.equal(op.double(x), 2 * x)


def test_a_size_in_a_table_is_not_measured(op, tuned, cache_folder, monkeypatch):
    x = torch.randn(33, 70)
    op.double(x)
    table.forget()
    monkeypatch.setattr(first_call, "_tried", set())  # as in another process
    op.double(x)
    assert len(tuned) == 1


def test_a_row_whose_choice_is_refused_is_no_reason_to_measure(op, tuned, cache_folder):
    x = torch.randn(33, 70)
    op.double(x)
    (file,) = (cache_folder / "tables").glob(f"*/{op.NAME}.json")
    file.write_text(file.read_text().replace('"torch"', '"gone"').replace('"cpu"', '"gone"'))
    table.forget()
    op.double(x)
    assert plan_of(op, x).config == op.DEFAULT
    assert len(tuned) == 1


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_torch_asks_for_nothing_and_a_backend_for_its_configuration(op, tuned, backend):
    op.double(torch.randn(33, 70), backend=backend)
    assert len(tuned) == (backend == "cpu")


def test_off_measures_nothing(op, tuned, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "off")
    settings.reload()
    x = torch.randn(33, 70)
    op.double(x)
    assert tuned == []
    assert plan_of(op, x).config == op.DEFAULT


def test_other_numerics_measure_nothing(op, tuned):
    with tilewright.numerics("deterministic"):
        op.double(torch.randn(33, 70))
    assert tuned == []


def test_tracing_and_recording_measure_nothing_and_the_call_after_them_does(op, tuned):
    x = torch.randn(33, 70)
    with FakeTensorMode():
        op.double(torch.empty(33, 70))
    with tilewright.record():
        op.double(x)
    tilewright.explain(op.NAME, x)
    op.double(torch.empty(33, 70, device="meta"), backend="torch")
    assert tuned == []
    op.double(x)
    assert len(tuned) == 1


def test_a_capture_runs_the_default_and_the_call_after_it_measures(op, tuned, monkeypatch):
    x = torch.randn(33, 70)
    monkeypatch.setattr(measured, "why_not_measured", lambda tensors, device: "a CUDA graph is being captured")
    for _ in range(2):
        assert torch.equal(op.double(x), 2 * x)
        assert plan_of(op, x).config == op.DEFAULT
    assert tuned == []
    monkeypatch.undo()
    settings.reload()


def test_a_captured_call_leaves_no_entry_to_replay(op, monkeypatch):
    x = torch.randn(33, 70)
    with monkeypatch.context() as capture:
        capture.setattr(measured, "why_not_measured", lambda tensors, device: "a CUDA graph is being captured")
        op.double(x)
        assert replay.lookup(op.FORWARD, (x,), "auto", "default")[0] is None
    op.double(x)
    assert plan_of(op, x).row is not None


def test_the_state_of_the_call_does_not_reach_the_tuner(op, tuned, monkeypatch):
    states = []
    tune = first_call._tune

    def noted(*args):
        states.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.empty(1).device.type))
        tune(*args)

    monkeypatch.setattr(first_call, "_tune", noted)
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"), tilewright.use_backend("cpu"):
        op.double(torch.randn(33, 70, device="cpu"))
    assert states == [(True, False, "cpu")]
    assert op.FORWARD.plan((torch.randn(33, 70),), "cpu", "default").config == op.FAST


def test_calls_of_other_threads_are_not_taken_for_the_tuners(op, monkeypatch):
    """A recording hears of the whole process; the tuner learns from its own call."""

    def beside_another(*args, **options):
        other = threading.Thread(target=op.double, args=(torch.randn(5, 5),), kwargs={"backend": "torch"})
        other.start(), other.join()
        return op.double(*args, **options)

    monkeypatch.setitem(_functions, op.NAME, beside_another)
    problem = Problem(op.NAME, "fwd", {"M": 33, "N": 70}, torch.float32, "cpu", 0, modules_of(op.CONTRACT, "cpu"))
    with fake_call(problem) as call:
        assert call.args[0].shape == (33, 70)


def test_threads_with_one_size_measure_once(op, tuned):
    x = torch.randn(33, 70)
    threads = [threading.Thread(target=lambda: op.double(x)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(tuned) == 1
    assert plan_of(op, x).row is not None


def test_what_cannot_be_measured_is_said_once_and_not_tried_again(op, tuned, monkeypatch, caplog):
    monkeypatch.setattr(first_call, "workload_of", lambda *args: None)
    x = torch.randn(33, 70)
    for _ in range(2):
        op.double(x)
        table.forget()
    assert caplog.text.count("was not measured: no workload of the op was found that has it. The default runs") == 1
    assert tuned == []


def test_an_unwritable_table_does_not_end_the_call(op, monkeypatch, caplog):
    def fails(*args):
        raise TableError("read-only")

    monkeypatch.setattr(run, "update", fails)
    x = torch.randn(33, 70)
    assert torch.equal(op.double(x), 2 * x)
    assert "was not measured: read-only" in caplog.text


def test_a_worker_that_tunes_measures_no_first_calls(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "first_call")
    started = {}

    class Started(Exception):
        pass

    def popen(*args, env, **options):
        started.update(env)
        raise Started

    monkeypatch.setattr("subprocess.Popen", popen)
    worker = Watched()
    with pytest.raises(Started):
        worker.ask("check", timeout=1)
    worker.connection.close()
    worker._errors.close()
    assert started["TILEWRIGHT_AUTOTUNE"] == "off"


def test_the_budget_bounds_each_step(op, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_AUTOTUNE_SECONDS", "7")
    settings.reload()
    efforts = []
    track = run.Track

    def bounded(problem, compilers, bench, effort):
        efforts.append(effort)
        return track(problem, compilers, bench, effort)

    monkeypatch.setattr(run, "Track", bounded)
    op.double(torch.randn(33, 70))
    assert [(effort.seconds, effort.prepare) for effort in efforts] == [(7.0, 7.0)]


def test_real_workers_measure_a_real_op(cache_folder, monkeypatch):
    """rms_norm on a CPU, by its C++ kernel where there is a compiler, else by torch alone: nothing to measure."""
    from tilewright import ops
    from tilewright.ops.norm.rms_norm import FORWARD

    if not FORWARD.has_kernels("cpu"):
        pytest.skip("rms_norm has no kernel for a CPU here")
    monkeypatch.setenv("TILEWRIGHT_AUTOTUNE", "first_call")
    settings.reload()
    x, w = torch.randn(6, 320), torch.ones(320)
    assert torch.allclose(ops.rms_norm(x, w), torch.nn.functional.rms_norm(x, (320,), w, 1e-6), atol=1e-5)
    assert table.lookup("rms_norm", "fwd", "M=8,N=320,plain=1", "float32", "default", device_info("cpu")) is not None


@pytest.mark.parametrize(
    ("name", "params", "dtype"),
    [
        ("rms_norm", {"M": 777, "N": 1234}, torch.bfloat16),
        ("fmha", {"B": 3, "H": 12, "H_kv": 4, "S": 300, "D": 64, "causal": True}, torch.float16),
        ("matmul", {"M": 100, "N": 264, "K": 72, "layout": "nt"}, torch.bfloat16),
        ("merge_states", {"B": 1, "S": 100, "H": 5, "D": 96, "N": 3, "form": "stacked"}, torch.float32),
    ],
)
def test_a_workload_is_found_for_sizes_that_none_declares(name, params, dtype):
    device, subject = torch.device("cpu"), contract(name)
    template = next(w for w in subject.workloads if set(params) & set(w.params))
    names = {field: value for field, value in params.items() if field in template.params}
    modules = modules_of(subject, "cpu")
    with fake_call(Problem(name, "fwd", {**template.params, **names}, dtype, "cpu", 0, modules)) as call:
        bucket = call.raw.bucket_of(call.args, "default")
    workload, each = workload_of(call.raw, bucket, dtype, device, 60.0)
    problem = Problem(name, "fwd", workload.params, each, "cpu", 0, modules)
    with fake_call(problem) as found:
        assert found.raw.bucket_of(found.args, "default") == bucket
        assert found.raw.dtype_of(found.args) == dtype
