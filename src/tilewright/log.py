"""The logger of the library, silent below WARNING unless `TILEWRIGHT_LOG` is set.

`TILEWRIGHT_LOG=info` shows fallbacks and the chosen rows of tuning tables; `debug` adds every plan.
"""

import logging
import os

from tilewright.settings import Settings, misspelt

logger = logging.getLogger("tilewright")

_logged: set[object] = set()
_LOGGED = "_TILEWRIGHT_SAID"  # environment variable with the logged keys, for child processes


def configure() -> None:
    """Apply `TILEWRIGHT_LOG`; called once when this module is imported.

    Adds a handler only if the application has installed none.
    """
    for name, suggestion in misspelt(os.environ).items():
        advice = f"did you mean {suggestion}?" if suggestion else "`tilewright doctor` lists them."
        log_once_a_tree(name, f"{name} is no variable of tilewright and is ignored; {advice}")
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
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message)


def log_once_a_tree(key: str, message: str) -> None:
    """Log once in this process and all processes that it starts later: they inherit the key in their environment."""
    keys = os.environ.get(_LOGGED, "").split("|")
    if key not in keys:
        os.environ[_LOGGED] = "|".join([*filter(None, keys), key])
        log_once(key, message)


def forget_logged() -> None:
    """Forget all keys, so that every `log_once` logs again (tests)."""
    _logged.clear()
    os.environ.pop(_LOGGED, None)


configure()
