"""One logger: silent below WARNING, switched by TILEWRIGHT_LOG, polite to an application's own handlers."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright import log
from tilewright.errors import InputError

SOURCE = Path(log.__file__).parents[1]


def bare(monkeypatch) -> logging.Logger:
    """Our logger in a process without any handler.  Called in a test's body: pytest adds its own when that starts."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log.logger.handlers = []
    return log.logger


def test_without_the_variable_nothing_is_touched(monkeypatch):
    logger = bare(monkeypatch)
    log.configure()
    assert (logger.level, logger.handlers, logger.propagate) == (logging.NOTSET, [], True)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical", "INFO"])
def test_a_level_is_applied_and_written_to_stderr(monkeypatch, capsys, level):
    logger = bare(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_LOG", level)
    log.configure()
    assert logger.level == getattr(logging, level.upper())
    logger.log(logger.level, "seen")
    logger.log(logger.level - 1, "not seen")
    assert capsys.readouterr().err == f"[tilewright] {level.upper()} seen\n"


def test_configuring_twice_adds_one_handler(monkeypatch):
    logger = bare(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_LOG", "info")
    log.configure()
    log.configure()
    assert len(logger.handlers) == 1


def test_an_application_keeps_its_own_handler(monkeypatch):
    logger = bare(monkeypatch)
    own = logging.NullHandler()
    logging.getLogger().handlers.append(own)
    monkeypatch.setenv("TILEWRIGHT_LOG", "info")
    log.configure()
    assert logger.handlers == []
    assert logger.propagate


def test_a_level_that_does_not_exist_is_refused(monkeypatch):
    bare(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_LOG", "loud")
    with pytest.raises(InputError, match="TILEWRIGHT_LOG: 'loud' is not a log level; allowed: debug"):
        log.configure()


def test_log_once_says_a_thing_once(caplog):
    caplog.set_level(logging.WARNING, "tilewright")
    log.log_once("key", "first")
    log.log_once("key", "again")
    log.log_once("other", "second")
    log.log_once("quiet", "detail", logging.INFO)
    assert [record.message for record in caplog.records] == ["first", "second"]
    log.forget_logged()
    log.log_once("key", "after forgetting")
    assert caplog.records[-1].message == "after forgetting"


def test_a_program_that_only_imports_the_library_hears_it():
    """The variable works without the command line."""
    program = "from tilewright.log import logger; logger.info('which row was chosen')"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TILEWRIGHT_LOG": "info"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "[tilewright] INFO which row was chosen\n"


def test_importing_the_logger_does_not_freeze_the_settings():
    program = (
        "import os, tilewright.log; os.environ['TILEWRIGHT_BACKEND'] = 'torch'\n"
        "from tilewright.settings import current; print(current().backend)"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "torch\n"
