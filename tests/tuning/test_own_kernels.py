"""`tilewright.tune` on launch functions of a user: what is measured, checked, remembered, and when nothing is."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.harness.simulated_time import BENCH, simulate_time
from tests.tuning.own_kernel import SLEEPS, SPACE, Double, raises
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright
from tilewright.bench import timing
from tilewright.dispatch.tables import measured, table
from tilewright.errors import BackendError, InputError
from tilewright.hardware import graph_capture
from tilewright.tuning.own_kernels import launch as module


@pytest.fixture(autouse=True)
def _own_cache(cache_folder, monkeypatch):
    simulate_time(monkeypatch, BENCH)


def test_the_first_call_measures_and_the_others_do_not():
    kernel, x = Double(), torch.randn(8, 16)
    assert kernel.launch.choice(x, x.clone()).why == "the default: not measured yet"
    block, launches = kernel.run(x)
    assert block == 128
    assert launches > 3 * 5
    assert kernel.run(x) == (128, 1)
    assert kernel.run(torch.randn(8, 16)) == (128, 1)
    choice = kernel.launch.choice(x, x.clone())
    assert choice.config == {"BLOCK": 128}
    assert choice.why.startswith("measured fastest")
    for other in (torch.randn(8, 17), torch.randn(8, 16, dtype=torch.float64)):
        assert kernel.run(other)[1] > 3 * 5, "another key is measured for itself"


def test_the_winner_is_a_row_of_the_users_table(cache_folder):
    kernel = Double()
    kernel.run(torch.randn(8, 16))
    (file,) = (cache_folder / "tables").glob("*/user.double.json")
    _, (row,) = table.read(file)
    assert row.key == ("user.double", "fwd", "M=8,N=16", "out=float32,x=float32", "default")
    assert (row.backend, dict(row.config)) == ("user", {"BLOCK": 128})
    assert row.us == pytest.approx(1e3 + 1e3, rel=0.6)  # its sleep, and readings of the clock


def test_another_process_reads_the_row_and_measures_nothing(cache_folder):
    Double().run(torch.randn(8, 16))
    program = (
        "import torch; from tests.tuning.own_kernel import Double\n"
        "print(*Double().run(torch.randn(8, 16)), *Double(space={'BLOCK': (64, 256)}).launch.choice("
        "torch.randn(8, 16), torch.zeros(8, 16)).config.values())"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["128", "1", "64"], done.stderr


def test_a_row_outside_the_space_is_refused_and_measured_again(caplog):
    x = torch.randn(8, 16)
    Double().run(x)
    kernel = Double(space={"BLOCK": (64, 256)})
    block, launches = kernel.run(x)
    assert block == 256
    assert launches > 2 * 5
    assert "is not in the space" in caplog.text
    assert Double(space={"BLOCK": (64, 256)}).run(x) == (256, 1)


def test_the_arguments_are_left_as_one_plain_call_leaves_them():
    calls = []

    @tilewright.tune(space=SPACE, key=lambda x, total: {"N": x.shape[0]}, restore=("total",), name="accumulate")
    def accumulate(x, total, *, BLOCK):
        calls.append(BLOCK)
        timing.time.sleep(SLEEPS[BLOCK])
        total += x

    x, total = torch.randn(32), torch.ones(40)[4:36]
    x_before = x.clone()
    accumulate(x, total)
    assert len(calls) > 15
    assert torch.equal(total, 1 + x)
    assert torch.equal(x, x_before)
    assert torch.equal(total._base[:4], torch.ones(4))
    assert torch.equal(total._base[36:], torch.ones(4))


def test_every_configuration_sees_the_tensors_as_they_were():
    """Each trial accumulates into the same start: without it the second differs from the first."""

    @tilewright.tune(space=SPACE, key=lambda total: {"N": total.shape[0]}, restore=("total",), name="twice")
    def twice(total, *, BLOCK):
        timing.time.sleep(SLEEPS[BLOCK])
        total *= 3
        return BLOCK

    total = torch.ones(32)
    assert twice(total) == 128
    assert torch.equal(total, torch.full((32,), 3.0))


def test_a_wrong_configuration_is_dropped_and_said(caplog):
    caplog.set_level(logging.INFO, "tilewright")
    kernel = Double({128: lambda x, out: torch.mul(x, 2.5, out=out), 256: raises})
    assert kernel.run(torch.randn(8, 16))[0] == 64
    (record,) = [record for record in caplog.records if "dropped" in record.message]
    assert record.levelname == "WARNING"
    assert "BLOCK=128: wrong: result 0 is off by" in record.message
    assert "BLOCK=256: ValueError: no such tile" in record.message


def test_the_tolerance_is_relative_to_the_row_and_may_be_stated():
    x = torch.randn(8, 512)

    def off(x, out):
        torch.mul(x, 2, out=out)
        out[3] += 1e-3

    x[3] *= 1e-3  # a quiet row: the others hide nothing
    assert Double({128: off}).run(x)[0] == 256
    assert Double({128: off}, tolerance=2.0, name="loose").run(x)[0] == 128
    assert Double({128: lambda x, out: torch.mul(x, 2 + 1e-6, out=out)}, name="near").run(x)[0] == 128
    close = Double({128: lambda x, out: torch.mul(x, 2 + 1e-6, out=out)}, tolerance=0.0, name="bits")
    assert close.run(x)[0] == 256


def test_returned_tensors_are_compared_too():
    @tilewright.tune(space=SPACE, key=lambda x: {"N": x.shape[0]}, name="returned")
    def doubled(x, *, BLOCK):
        timing.time.sleep(SLEEPS[BLOCK])
        return {"y": x * (3 if BLOCK == 128 else 2), "block": BLOCK}

    assert doubled(torch.randn(8))["block"] == 256


def test_all_that_fail_are_named_with_their_reasons():
    kernel = Double({64: raises, 128: raises, 256: lambda x, out: 1 / 0})
    with pytest.raises(BackendError) as failure:
        kernel.run(torch.randn(8, 16))
    text = str(failure.value)
    assert "double M=8,N=16" in text
    assert "BLOCK=64: ValueError: no such tile" in text
    assert "BLOCK=256: ZeroDivisionError" in text
    kernel.faults.clear()
    assert kernel.run(torch.randn(8, 16))[0] == 128, "a failure is not remembered"


def test_a_written_tensor_that_restore_does_not_name_is_found():
    out = torch.zeros(8, 16)
    with pytest.raises(BackendError, match="BLOCK=64: writes to out, which restore= does not name"):
        Double(restore=()).run(torch.randn(8, 16), out)
    assert not out.any(), "all of it happened on copies"
    with pytest.raises(InputError, match="nothing to compare"):
        tilewright.tune(space=SPACE, key=lambda x: {"N": 1}, name="none")(lambda x, BLOCK: None)(torch.ones(3))


def test_a_constraint_leaves_configurations_out():
    fits = {"constraint": lambda key, config: config["BLOCK"] <= key["N"]}
    kernel = Double(**fits)
    assert kernel.run(torch.randn(8, 100)) == (64, 1), "the only one that fits: nothing to measure"
    assert kernel.run(torch.randn(8, 200))[0] == 128
    with pytest.raises(InputError, match=r"constraint= refuses all 3 configurations for M=8,N=10"):
        kernel.run(torch.randn(8, 10))


def test_the_default_runs_unless_another_is_faster_beyond_the_noise(monkeypatch):
    monkeypatch.setitem(SLEEPS, 64, 1e-3)
    assert Double().run(torch.randn(8, 16))[0] == 64
    assert Double(default={"BLOCK": 128}, name="other").run(torch.randn(8, 16))[0] == 128


def test_threads_with_one_key_measure_once(monkeypatch):
    kernel, x, races = Double(), torch.randn(8, 16), []
    both = threading.Barrier(2)
    stored = kernel.launch._stored

    def counted(*args):
        races.append(threading.get_ident())
        return race(*args)

    def together(problem):
        choice = stored(problem)
        if threading.get_ident() not in passed and threading.current_thread() is not threading.main_thread():
            passed.add(threading.get_ident())
            both.wait(60)  # both have found no row before one of them measures
        return choice

    race, passed = module.race, set()
    monkeypatch.setattr(module, "race", counted)
    monkeypatch.setattr(kernel.launch, "_stored", together)
    blocks = []
    threads = [threading.Thread(target=lambda: blocks.append(kernel.launch(x, x.clone()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert blocks == [128, 128]
    assert len(races) == 1


def test_a_capture_takes_the_default_or_what_is_stored(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tilewright")
    kernel, x = Double(), torch.randn(8, 16)
    monkeypatch.setattr(module, "why_not_measured", lambda values, device: "a CUDA graph is being captured")
    assert kernel.run(x) == (64, 1)
    assert kernel.run(x) == (64, 1)
    assert caplog.text.count("not measured, because a CUDA graph is being captured: BLOCK=64 runs") == 1
    monkeypatch.undo()
    assert kernel.run(x) != (64, 1), "the first call outside measures"


def test_a_capture_is_recognised(monkeypatch):
    tensors, device = (torch.ones(2), None), torch.device("cuda", 0)
    monkeypatch.setattr(measured, "current_capture", lambda device: graph_capture.Capture(1, 2))
    assert measured.why_not_measured(tensors, device) == "a CUDA graph is being captured"
    monkeypatch.setattr(measured, "current_capture", lambda device: None)
    assert measured.why_not_measured(tensors, device) is None


def test_fake_tensors_transforms_and_recordings_measure_nothing():
    kernel, x = Double(), torch.randn(8, 16)
    with FakeTensorMode():
        assert kernel.run(torch.empty(8, 16)) == (64, 1)
    with tilewright.record():
        assert kernel.run(x) == (64, 1)
    assert kernel.run(torch.empty(8, 16, device="meta")) == (64, 1)

    @tilewright.tune(space=SPACE, key=lambda x: {"N": x.shape[-1]}, name="mapped")
    def doubled(x, *, BLOCK):
        assert BLOCK == 64
        return 2 * x

    assert torch.equal(torch.func.vmap(doubled)(x), 2 * x)


def test_other_numerics_take_the_default_for_all_sizes():
    kernel, x = Double(), torch.randn(8, 16)
    with tilewright.numerics("batch_invariant"):
        assert kernel.run(x) == (64, 1)
        assert 'numerics is "batch_invariant"' in kernel.launch.choice(x, x).why
    assert kernel.run(x)[0] == 128
    with tilewright.numerics("batch_invariant"):
        assert kernel.run(x) == (64, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_program_holds_what_is_stored(dynamic):
    kernel, x = Double(key=lambda x: {"M": x.shape[0]}, restore=(), name="compiled"), torch.randn(8, 16)

    @tilewright.tune(space=SPACE, key=lambda x: {"M": x.shape[0]}, name="compiled")
    def scaled(x, *, BLOCK):
        timing.time.sleep(SLEEPS[BLOCK])
        return x * 2, BLOCK

    @tilewright.tune(space=SPACE, key=lambda x: {"M": x.shape[0]}, name="compiled")
    def traced(x, *, BLOCK):
        return x * BLOCK

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: traced(x), backend="eager", fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(x), x * 64), "the default, while no table has a row"
    assert scaled(x)[1] == 128
    torch._dynamo.reset()
    assert torch.equal(compiled(x), x * 128)
    assert torch.equal(compiled(torch.ones(9, 16)), torch.full((9, 16), 64.0)), "another key, another row"
    assert kernel.blocks == []


def test_a_folder_that_cannot_be_written_costs_the_memory_alone(cache_folder, caplog):
    cache_folder.parent.mkdir(exist_ok=True)
    cache_folder.write_text("a file")
    kernel, x = Double(), torch.randn(8, 16)
    assert kernel.run(x)[0] == 128
    assert kernel.run(x) == (128, 1)
    assert "the next process measures again" in caplog.text
    table.forget()
    assert kernel.run(x) == (128, 1), "this process still knows"


def test_a_method_and_keywords():
    class Layer:
        factor = 2

        @tilewright.tune(space=SPACE, key=lambda self, x, out: {"N": x.shape[0]}, restore=("out",), name="method")
        def scale(self, x, out, BLOCK=None):
            """Scale."""
            timing.time.sleep(SLEEPS[BLOCK])
            torch.mul(x, self.factor, out=out)
            return BLOCK

    x, out = torch.randn(8), torch.zeros(8)
    assert Layer().scale(x, out=out) == 128
    assert torch.equal(out, 2 * x)
    assert Layer.scale.__doc__ == "Scale."
    assert Layer.scale.__wrapped__(Layer(), x, out, 256) == 256


def test_no_second_launch_sees_an_old_generation(cache_folder):
    kernel, x = Double(), torch.randn(8, 16)
    kernel.run(x)
    (file,) = (cache_folder / "tables").glob("*/user.double.json")
    file.write_text(file.read_text().replace("128", "256"))
    assert kernel.run(x) == (128, 1)
    table.forget()
    assert kernel.run(x) == (256, 1), "a table that is read again is followed"
