"""An op of our own, an empty cache folder, and nothing left behind."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.harness.simulated_time import BENCH, simulate_time

from tilewright import settings
from tilewright.dispatch.contract import _contracts
from tilewright.dispatch.tables import table
from tilewright.log import forget_logged
from tilewright.tuning import run
from tilewright.tuning.compiling import compile_candidate
from tilewright.tuning.worker import Worker


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TILEWRIGHT_CACHE_DIR, for this process and its workers."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWRIGHT_MAX_JOBS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TILEWRIGHT_TUNING_TABLE", raising=False)
    settings.reload()
    table.forget()
    forget_logged()
    yield tmp_path / "cache"
    monkeypatch.undo()
    settings.reload()
    table.forget()


@pytest.fixture
def fake_op(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tests/tuning/fake_op.py; its contract is known during the test only, because other tests go through all.

    Its candidates take as long as they sleep, here and in workers: the bench's clock is simulated.
    """
    from tests.tuning import fake_op

    monkeypatch.setenv(fake_op.SIMULATED, "1")
    simulate_time(monkeypatch, BENCH)

    _contracts[fake_op.NAME] = fake_op.CONTRACT
    yield fake_op
    del _contracts[fake_op.NAME]


class Here:
    """A worker in this process: the bench, whose candidates are right."""

    alive, generation = True, 1

    def __init__(self):
        self._worker = Worker()

    def ask(self, request, *arguments, timeout):
        return getattr(self._worker, request)(*arguments)

    def close(self):
        """There is no process to end."""


class CompilersHere(Here):
    """Those that compile."""

    jobs = 1

    def __init__(self, jobs, architecture, seconds):
        super().__init__()

    def compile(self, problem, trials, done):
        for trial in trials:
            trial.reason = compile_candidate(problem, *trial.choice, trial.default)
            done()


@pytest.fixture
def at_home(monkeypatch):
    """No processes, which take seconds to start: for what is decided from a worker's answers."""
    monkeypatch.setattr(run, "Watched", Here)
    monkeypatch.setattr(run, "Compilers", CompilersHere)
