"""Tables that say what a test wants, and a backend of the name "planted" that computes products and counts them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright import settings
from tilewright.dispatch import contract, register_impl, unregister_impl
from tilewright.dispatch.tables import table
from tilewright.hardware import device_info


class Planted:
    """Launches as (M, N, activation); `factor` makes every result wrong by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.launches: list[tuple[int, int, str]] = []
        self.factor = 1.0
        self._monkeypatch = monkeypatch
        self._path = folder / "table.json"

    def measure(self, *rows: dict[str, Any]) -> None:
        """Make these the only measurements, for the CPU of this machine."""
        cpu = device_info("cpu")
        header = {"gpu": cpu.name, "arch": cpu.arch, "sm_count": cpu.sm_count, "versions": {}, "date": "2026-11-20"}
        self._path.write_text(json.dumps({"schema": 1, **header, "rows": list(rows)}))
        self._monkeypatch.setenv("TILEWRIGHT_TUNING_TABLE", str(self._path))
        settings.reload()
        table.forget()


def product(
    m: int, n: int, k: int, us: float, *, torch_us: float = 9.0, backend: str = "planted", dtype: str = "float32",
    gated: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A row of `matmul`: x (M, K) @ weight (N, K).T."""
    bits = 8 * getattr(torch, dtype).itemsize
    bucket = f"M={m},N={n},K={k},layout=0,aligned=1,out_bits={bits},epilogue={int(gated)}"
    return _row("matmul", bucket, backend, us, torch_us, dtype)


def gate(m: int, n: int, us: float, dtype: str = "float32") -> dict[str, Any]:
    """A row of `swiglu`."""
    return _row("swiglu", f"M={m},N={n},plain=1", "torch", us, us, dtype)


def _row(op: str, bucket: str, backend: str, us: float, torch_us: float, dtype: str) -> dict[str, Any]:
    return {
        "op": op, "direction": "fwd", "bucket": bucket, "dtype": dtype, "numerics": "default", "backend": backend,
        "config": None, "us": us, "noise": 0.01, "torch_us": torch_us,
    }  # fmt: skip


@contextmanager
def planted_backend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Planted]:
    """The backend, registered for `matmul`, and no tables but those that `measure` writes."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(folder / "cache"))
    planted = Planted(monkeypatch, folder)
    planted.measure()
    reference = contract("matmul").forward.reference

    @register_impl("matmul", backend="planted")
    def launch(outs: Any, a: Any, b: Any, *rest: Any, config: None) -> None:
        planted.launches.append((a.shape[0], b.shape[1], rest[-2]))
        outs[0].copy_(planted.factor * reference(a, b, *rest))

    yield planted
    unregister_impl("matmul", backend="planted")
    monkeypatch.undo()
    settings.reload()
    table.forget()
