"""A kernel cache of the test's own, with kernels that no compiler has to make."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright import settings
from tilewright.jit import cache
from tilewright.log import forget_logged


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the cache's entries, not yet there; nothing in memory, nothing logged yet."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    cache.forget()
    forget_logged()
    yield tmp_path / "cache" / "kernels"
    monkeypatch.undo()
    settings.reload()
    cache.forget()
    forget_logged()
