"""Tables that outrank all others while something holds them in force: those of one model, tuned for it alone."""

from pathlib import Path

from tilewright.generation import GENERATION

_held: list[Path] = []


def hold(path: Path) -> None:
    """Put the table at `path` in force, above all others; once more for each `hold`, until as many `release`."""
    _held.append(path)
    GENERATION[0] += 1


def release(path: Path) -> None:
    """Take one `hold` back."""
    _held.remove(path)
    GENERATION[0] += 1


def in_force() -> tuple[Path, ...]:
    """The tables that are held, each once, least important first."""
    return tuple(dict.fromkeys(_held))
