"""Every environment variable the library reads, in one typed object.

`current()` reads the environment once; `reload()` reads it again.  `python -m tilewright doctor` prints the table.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tilewright.errors import InputError
from tilewright.generation import GENERATION

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_LEVELS = ("debug", "info", "warning", "error", "critical")
_COMPILERS = ("nvrtc", "nvcc")
_AUTOTUNE = ("off", "first_call")
_BYTES_PER_COMPILER = 2 << 30  # nvcc and ptxas need less, also for a large kernel


def _flag(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"{text!r} is not a switch; allowed: 1/0, true/false, yes/no, on/off")


def _level(text: str) -> str:
    if text.lower() in _LEVELS:
        return text.lower()
    raise ValueError(f"{text!r} is not a log level; allowed: {', '.join(_LEVELS)}")


def _architecture(text: str) -> str:
    if re.fullmatch(r"sm_\d+[af]?|gfx[0-9a-f]+", text):
        return text
    raise ValueError(f"{text!r} is not a GPU architecture; examples: sm_90, gfx942")


def _compiler(text: str) -> str:
    if text.lower() in _COMPILERS:
        return text.lower()
    raise ValueError(f"{text!r} is not a CUDA C++ compiler; allowed: {', '.join(_COMPILERS)}")


def _autotune(text: str) -> str:
    if text.lower() in _AUTOTUNE:
        return text.lower()
    raise ValueError(f"{text!r} is not a time to tune; allowed: {', '.join(_AUTOTUNE)}")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(f"{text!r} is not a count; allowed: a whole number from 1")


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // _BYTES_PER_COMPILER))


def _path(text: str) -> Path:
    return Path(text).expanduser()  # in a .env file or a Dockerfile no shell expands ~


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewright"


def _variable(doc: str, *names: str, parse: Any = str, default: Any = None, factory: Any = None) -> Any:
    metadata = {"doc": doc, "names": names, "parse": parse}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The library's settings, one field per environment variable."""

    backend: str | None = _variable(
        "preferred backend of every op: cuda, triton, cutile, cpu, torch or auto", "TILEWRIGHT_BACKEND"
    )
    disable_fallback: bool = _variable(
        "make a missed backend preference an error",
        "TILEWRIGHT_DISABLE_FALLBACK",
        "DISABLE_FALLBACK",
        parse=_flag,
        default=False,
    )
    log: str | None = _variable(f"log level: {', '.join(_LEVELS)}", "TILEWRIGHT_LOG", parse=_level)
    cache_dir: Path = _variable(
        "folder for ceilings, tuning tables and compiled kernels",
        "TILEWRIGHT_CACHE_DIR",
        parse=_path,
        factory=_cache_dir,
    )
    tuning_table: Path | None = _variable(
        "a tuning table (JSON) that outranks the shipped and the user's own", "TILEWRIGHT_TUNING_TABLE", parse=_path
    )
    autotune: str = _variable(
        "when ops are measured at sizes that no tuning table has: off, or first_call",
        "TILEWRIGHT_AUTOTUNE",
        parse=_autotune,
        default="off",
    )
    autotune_seconds: int = _variable(
        "budget of TILEWRIGHT_AUTOTUNE=first_call for one size, in seconds",
        "TILEWRIGHT_AUTOTUNE_SECONDS",
        parse=_count,
        default=30,
    )
    check: bool = _variable(
        "check lengths, page tables and positions on a GPU too, in every call, which waits for the GPU",
        "TILEWRIGHT_CHECK",
        parse=_flag,
        default=False,
    )
    arch: str | None = _variable(
        "architecture to plan for where no GPU is present, e.g. sm_90", "TILEWRIGHT_ARCH", parse=_architecture
    )
    commit: str | None = _variable(
        "commit written beside measurements where the checkout has no git history to ask", "TILEWRIGHT_COMMIT"
    )
    print_configs: bool = _variable(
        "log the configuration of every kernel when it is first used",
        "TILEWRIGHT_PRINT_CONFIGS",
        parse=_flag,
        default=False,
    )
    max_jobs: int = _variable(
        "compilations at once; default: one a core, and 2 GiB of memory for each",
        "TILEWRIGHT_MAX_JOBS",
        parse=_count,
        factory=_jobs,
    )
    cache_limit_mb: int = _variable(
        "size in MiB at which the oldest compiled kernels leave the cache",
        "TILEWRIGHT_CACHE_LIMIT_MB",
        parse=_count,
        default=2048,
    )
    jit_compiler: str = _variable(
        "compiler of CUDA C++ kernels: nvrtc (in process, no toolkit needed) or nvcc",
        "TILEWRIGHT_JIT_COMPILER",
        parse=_compiler,
        default="nvrtc",
    )
    jit_debug: bool = _variable(
        "log each compilation: key, flags, seconds, registers, spills",
        "TILEWRIGHT_JIT_DEBUG",
        parse=_flag,
        default=False,
    )
    jit_print_command: bool = _variable(
        "log each compiler command line", "TILEWRIGHT_JIT_PRINT_COMMAND", parse=_flag, default=False
    )
    jit_dump_ptx: bool = _variable(
        "keep kernel.ptx next to each CUDA binary", "TILEWRIGHT_JIT_DUMP_PTX", parse=_flag, default=False
    )
    jit_dump_sass: bool = _variable(
        "keep kernel.sass next to each CUDA binary; needs cuobjdump or nvdisasm",
        "TILEWRIGHT_JIT_DUMP_SASS",
        parse=_flag,
        default=False,
    )
    jit_ptxas_verbose: bool = _variable(
        "log what ptxas reports: registers, stack, spills, shared memory",
        "TILEWRIGHT_JIT_PTXAS_VERBOSE",
        parse=_flag,
        default=False,
    )
    jit_lineinfo: bool = _variable(
        "keep source lines in CUDA binaries, for profilers", "TILEWRIGHT_JIT_LINEINFO", parse=_flag, default=False
    )
    jit_rebuild: bool = _variable(
        "compile again once in each process, whatever the cache holds",
        "TILEWRIGHT_JIT_REBUILD",
        parse=_flag,
        default=False,
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Settings":
        """Read `env`.  Raises InputError naming the variable, the value and what is allowed."""
        values: dict[str, Any] = {}
        for f in fields(cls):
            for name in f.metadata["names"]:
                if env.get(name):
                    try:
                        values[f.name] = f.metadata["parse"](env[name])
                    except ValueError as error:
                        raise InputError(f"{name}: {error}.") from None
                    break
        return cls(**values)


def misspelt(env: Mapping[str, str]) -> dict[str, str | None]:
    """Variables of `env` that begin with TILEWRIGHT_ and do not exist -> the most similar one that does, or None."""
    names = [name for f in fields(Settings) for name in f.metadata["names"]]
    return {
        name: next(iter(get_close_matches(name, names, n=1)), None)
        for name in sorted(env)
        if name.startswith("TILEWRIGHT_") and name not in names
    }


_current: Settings | None = None


def current() -> Settings:
    """The current settings, read from the environment on first use."""
    return _current if _current is not None else _read()


def reload() -> Settings:
    """Read the environment again, and invalidate all plans and captured launches."""
    settings = _read()
    GENERATION[0] += 1
    return settings


def _read() -> Settings:
    global _current
    _current = Settings.from_env(os.environ)
    return _current


def describe() -> list[dict[str, Any]]:
    """One row per variable: `names`, current `value`, `doc`."""
    settings = current()
    return [
        {"names": list(f.metadata["names"]), "value": getattr(settings, f.name), "doc": f.metadata["doc"]}
        for f in fields(settings)
    ]
