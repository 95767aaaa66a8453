"""One logger for the whole library, silent below WARNING unless `TILEWRIGHT_LOG` says otherwise.

`TILEWRIGHT_LOG=info` shows fallbacks and which tuning-table row was chosen; `debug` adds every plan that is made.
"""

import logging
import os

from tilewright.settings import Settings, misspelt

logger = logging.getLogger("tilewright")

_said: set[object] = set()
_SAID = "_TILEWRIGHT_SAID"  # keys, for child processes


def configure() -> None:
    """Apply `TILEWRIGHT_LOG`; importing this module does it once.

    An application that installed its own handlers keeps them; we add one only if none exists.
    """
    for name, near in misspelt(os.environ).items():
        meant = f"did you mean {near}?" if near else "`tilewright doctor` lists them."
        log_once_a_tree(name, f"{name} is no variable of tilewright and is ignored; {meant}")
    level = Settings.from_env(os.environ).log  # not `current()`: an import must not freeze the other settings
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[tilewright] %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def log_once(key: object, message: str, level: int = logging.WARNING) -> None:
    """Log `message` the first time `key` is seen in this process."""
    if key not in _said:
        _said.add(key)
        logger.log(level, message)


def log_once_a_tree(key: str, message: str, level: int = logging.WARNING) -> None:
    """`log_once`, for this process and those it starts later: they find the key in their environment."""
    said = os.environ.get(_SAID, "").split("|")
    if key not in said:
        os.environ[_SAID] = "|".join([*filter(None, said), key])
        log_once(key, message, level)


def forget_logged() -> None:
    """Let every `log_once` message be said again (tests)."""
    _said.clear()
    os.environ.pop(_SAID, None)


configure()
