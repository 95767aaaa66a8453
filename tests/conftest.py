"""Rules of every test process: what is asked for runs, seeds are printed, one Triton mode per process."""

import gc
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

MODES = {"gpu", "interp", "compile"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every dtype of every case, every form of every kernel, new examples of searches: others sample",
    )
    parser.addoption("--seed", type=int, default=0, help="seed of every test's random numbers (default 0)")


def _asked_for(config: pytest.Config, mode: str) -> bool:
    """Whether -m names `mode` and does not exclude it."""
    words = config.getoption("markexpr").replace("(", " ").replace(")", " ").split()
    return any(word == mode and words[max(i - 1, 0)] != "not" for i, word in enumerate(words))


def _gpu_present() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    asked = [mode for mode in sorted(MODES) if _asked_for(config, mode)]
    if "gpu" in asked and not _gpu_present():
        raise pytest.UsageError("-m gpu was asked for and torch sees no GPU")
    if "interp" in asked:
        _start_interpreter(asked)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("TRITON_INTERPRET=1 is for -m interp alone; unset it")
    _limit_threads()
    if not config.getoption("exhaustive"):
        _repeat_searches()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without its mode a folder of a mode is not collected: thousands of tests, all of that mode."""
    of_mode = collection_path.parent == Path(__file__).parent and collection_path.name in MODES
    return True if of_mode and not _asked_for(config, collection_path.name) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and their modules are no garbage: no collection looks among them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _start_interpreter(asked: list[str]) -> None:
    if len(asked) > 1:
        raise pytest.UsageError(f"{' and '.join(asked)} cannot share a process: run pytest once for each")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("-m interp needs TRITON_INTERPRET=1, set before Triton is imported")
    if "triton" in sys.modules:
        raise pytest.UsageError("Triton was imported before the interpreter's fixes; import it inside tests")
    from tests.harness import interp_fixes, interp_speed

    interp_fixes.install()
    interp_speed.install()


def _limit_threads() -> None:
    """One torch thread in each xdist worker; they would fight for the same cores."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `exhaustive`, unless it is asked for."""
    left_out = set()
    if not config.getoption("exhaustive"):
        left_out = {item for item in items if item.get_closest_marker("exhaustive")}
        config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _repeat_searches() -> None:
    """Hypothesis draws the same examples in every run; with --exhaustive others each time."""
    from hypothesis import settings

    settings.register_profile("repeated", derandomize=True)
    settings.load_profile("repeated")


def pytest_report_header(config: pytest.Config) -> str:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, {device}, --seed={config.getoption('seed')}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _gpu_present():
        pytest.skip("needs a GPU")
    if item.get_closest_marker("interp") and not _asked_for(item.config, "interp"):
        pytest.skip("runs only in a process of its own: TRITON_INTERPRET=1 pytest -m interp")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The number to seed a test's own generators with."""
    return int(request.config.getoption("seed"))


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test does all that it can, and not the sample of every run."""
    return bool(request.config.getoption("exhaustive"))


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Every test starts from the same random state, whatever ran before it."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder for one test, and with it no table of the user's."""
    from tilewright import settings
    from tilewright.dispatch.tables import table

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    table.forget()
    yield
    monkeypatch.undo()
    settings.reload()
    table.forget()
