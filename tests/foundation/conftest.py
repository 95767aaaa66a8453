"""Settings and log as a fresh process has them."""

import logging
import os
from collections.abc import Iterator

import pytest

from tilewright import log, settings
from tilewright.hardware import device


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable is set and nothing was said; afterwards all is as before."""
    for name in [*os.environ]:
        if name.startswith("TILEWRIGHT_") or name == "DISABLE_FALLBACK":
            monkeypatch.delenv(name)
    logger = log.logger
    kept = logger.level, list(logger.handlers), logger.propagate
    settings.reload()
    log.forget_logged()
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(kept[0])
    logger.handlers, logger.propagate = kept[1:]
    monkeypatch.undo()
    settings.reload()
    log.forget_logged()
    device._info.cache_clear()
