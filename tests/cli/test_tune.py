"""`tune`: what the command line adds to the tuner: times and shares as text, progress, the report, JSON."""

import json
import re

import pytest

from tilewright.cli.options import seconds
from tilewright.cli.tune import _share
from tilewright.dispatch import register_impl, unregister_impl
from tilewright.dispatch.contract import _contracts
from tilewright.dispatch.tables import table
from tilewright.errors import UsageError
from tilewright.tuning import run


@pytest.fixture
def fake_op(place, monkeypatch):
    from tests.tuning import fake_op

    _contracts.pop(fake_op.NAME, None)  # as importing it registers it
    monkeypatch.setitem(_contracts, fake_op.NAME, fake_op.CONTRACT)
    monkeypatch.setenv("TILEWRIGHT_MAX_JOBS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(fake_op.SIMULATED, "1")
    return fake_op


def test_an_op_is_tuned_into_the_table_that_is_named(tilewright, place, fake_op):
    words = ("--direction", "bwd", "--device", "cpu", "--budget", "1h", "--min-gain", "5%", "--search", "random")
    done = tilewright("tune", fake_op.NAME, *words, "--table", "tables/mine.json", "--json", "tune.json")
    assert done.exit_code == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert re.fullmatch(rf"\[1/1\] {fake_op.NAME} only float32 bwd \(\d+ s\)", line)
    header, line, *_ = done.stdout.splitlines()
    assert header.split() == ["op", "bucket", "dtype", "direction", "before", "us", "after", "us", "gain", "choice"]
    assert line.endswith("cpu kind=right passes=1")
    _, (row,) = table.read(place / "tables/mine.json")
    found = json.loads((place / "tune.json").read_text())
    assert found["kind"] == "tune"
    assert found["tuned"][0]["after"]["config"] == row.config == {"kind": "right", "passes": 1}


@pytest.fixture
def quick_op(fake_op):
    """The fake op with right candidates alone."""
    register_impl(fake_op.NAME, **fake_op.options(fake_op.FAST))(fake_op.launch)
    yield fake_op
    unregister_impl(fake_op.NAME, backend="cpu")


def test_a_model_is_tuned_at_its_own_sizes_and_not_again(tilewright, place, quick_op):
    (place / "own.py").write_text(
        "import torch\nfrom tests.tuning.fake_op import double\n"
        "class Own(torch.nn.Module):\n    def forward(self, x):\n        return double(x)\n"
        "def make():\n    print('making it')\n    return Own(), torch.randn(16, 32)\n"
    )
    words = ("tune", "own.py:make", "--device", "cpu", "--backend", "cpu", "--table", "mine.json", "--json", "-")
    done = tilewright(*words)
    assert done.exit_code == 0, done.stderr
    (tuned,) = json.loads(done.stdout)["tuned"]
    assert (tuned["op"], tuned["bucket"], tuned["after"]["config"]) == (
        quick_op.NAME, "M=16,N=32", {"kind": "right", "passes": 1},
    )  # fmt: skip
    assert re.search(rf"\[1/1\] {quick_op.NAME} M=16,N=32 float32 fwd \(\d+ s\)", done.stderr)
    assert "making it" in done.stderr
    again = json.loads(tilewright(*words).stdout)
    assert (again["tuned"], again["fresh"]) == ([], 1)


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(tilewright, place, quick_op, monkeypatch):
    (place / "own.py").write_text(
        "import torch\nfrom tests.tuning.fake_op import double\n"
        "class Own(torch.nn.Module):\n    def forward(self, x):\n        return double(x).sum() + double(x[:8]).sum()\n"
        "def make():\n    return Own(), torch.randn(16, 32)\n"
    )
    words = ("tune", "own.py:make", "--device", "cpu", "--backend", "cpu", "--table", "mine.json", "--json", "-")
    tune, pressed = run.Run.tune, []

    def press_at_the_second(self, *case):
        if len(pressed) == 1:
            raise KeyboardInterrupt
        pressed.append(case)
        return tune(self, *case)

    monkeypatch.setattr(run.Run, "tune", press_at_the_second)
    done = tilewright(*words)
    assert (done.exit_code, done.stdout) == (130, "")
    said = "interrupted: the table keeps what was measured; the same command goes on with the rest."
    assert done.stderr.splitlines()[-1].endswith(said)
    (row,) = table.read(place / "mine.json")[1]
    monkeypatch.setattr(run.Run, "tune", tune)
    again = json.loads(tilewright(*words).stdout)
    (tuned,) = again["tuned"]
    assert (again["fresh"], {tuned["bucket"], row.bucket}) == (1, {"M=16,N=32", "M=8,N=32"})


def test_a_language_model_is_taken_as_optimize_takes_it(tilewright, factory, monkeypatch):
    prompts = []

    def run_requests(model, ids, new_tokens, **options):
        prompts.append(([tuple(each.shape) for each in ids], new_tokens))
        return iter(())

    monkeypatch.setattr("tilewright.tuning.model.run_requests", run_requests)
    for options in ("", "--tokens 16,10 --batch 2 --new-tokens 4"):
        done = tilewright("tune", factory, "--device", "cpu", *options.split())
        assert done.exit_code == 0, done.stderr
        assert done.stdout.startswith("nothing to tune: at these sizes no op is called that has kernels of ours for ")
    assert prompts == [([(1, 8)], 128), ([(2, 16), (2, 10)], 4)], "the inputs of the factory, unless lengths are given"


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2 h", 7200)])
def test_a_budget_is_a_time(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.03", 0.03), ("0", 0.0)])
def test_a_gain_is_a_share(text, share):
    assert _share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["soon", "5 weeks", "-1m", "0s", ""])
def test_other_budgets_are_refused(text):
    with pytest.raises(UsageError, match="write it as 90s, 5m or 1h"):
        seconds(text)


@pytest.mark.parametrize("text", ["much", "100%", "3", "-1%"])
def test_other_gains_are_refused(text):
    with pytest.raises(UsageError, match="write it as 3% or 0.03"):
        _share(text)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("tune", "Missing argument 'SUITE|OP|MODEL'"),
        ("tune nope", "'nope' is no op (`tilewright ops` lists them), no suite (activation, attention,"),
        ("tune rms_norm --budget soon", "--budget soon: write it as 90s, 5m or 1h"),
        ("tune rms_norm --min-gain 200%", "--min-gain 200%: write it as 3% or 0.03"),
        ("tune rms_norm --search clever", "'clever' is not one of 'exhaustive', 'random'"),
        ("tune rms_norm --direction up", "'up' is not one of 'fwd', 'bwd'"),
        ("tune rms_norm --case Q=8", "rms_norm has no 'Q'"),
        ("tune rms_norm --backend nope", "no backend named 'nope'"),
        ("tune rms_norm --backend triton --device cpu", "backend triton runs on cuda tensors, got cpu"),
        ("tune rms_norm --table notes.json --device cpu", "notes.json: not JSON"),
        ("tune rms_norm --json .", ". is a folder"),
        ("tune rms_norm --tokens 64", "--tokens is for a model, and rms_norm is no path to one"),
        ("tune rms_norm --fp8", "--fp8 is for a model, and rms_norm is no path to one"),
        ("tune ./absent", "MODEL './absent' does not exist"),
        ("tune ./absent --case M=8", "--case is for a suite or an op, and ./absent is a model"),
        ("tune ./absent --tokens many", "--tokens many: write lengths as 1024,1000"),
        ("tune here", "MODEL 'here' is no Hugging Face model folder: it has no config.json"),
        ("tune no_model.py:make", "there is no file 'no_model.py'"),
    ],
)
def test_wrong_input_is_one_line(tilewright, place, command, said):
    (place / "notes.json").write_text("my notes")
    (place / "here").mkdir()
    done = tilewright(*command.split())
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert said in line
    assert (place / "notes.json").read_text() == "my notes"
