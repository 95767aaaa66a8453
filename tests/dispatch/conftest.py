"""A small op of our own, so that these tests say nothing about any real one: double(x) = 2x."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright import settings
from tilewright.dispatch import RawOp, preference, register_impl, replay, unregister_impl
from tilewright.dispatch.tables import table
from tilewright.jit import tape
from tilewright.log import forget_logged


class Args(NamedTuple):
    x: Tensor  # (M, N)


class Bucket(NamedTuple):
    M: int
    N: int


DOUBLE = RawOp(
    "test_double",
    "fwd",
    Args,
    package="tilewright_tests_no_such_package",
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: 2 * args.x,
    bucket=lambda args: Bucket(*args.x.shape),
    bucket_names=Bucket._fields,
    out=True,
)


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts without preferences, environment, cached plans or messages already said."""
    for name in ("TILEWRIGHT_BACKEND", "TILEWRIGHT_DISABLE_FALLBACK", "DISABLE_FALLBACK", "TILEWRIGHT_TUNING_TABLE"):
        monkeypatch.delenv(name, raising=False)
    settings.reload()
    preference.set_backend(None)
    forget_logged()
    table.forget()
    DOUBLE.forget_plans()
    yield
    monkeypatch.undo()
    settings.reload()
    preference.set_backend(None)
    table.forget()
    DOUBLE.forget_plans()


@pytest.fixture
def double() -> RawOp:
    """The raw op; backend "torch" only."""
    return DOUBLE


@pytest.fixture
def fast_backend() -> Iterator[SimpleNamespace]:
    """An implementation "cpu" of `test_double` that refuses N > 100 and is not batch invariant; `.calls` counts
    launches.
    """
    seen = SimpleNamespace(calls=0, configs=[])

    def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> dict[str, int]:
        return {"block": bucket[1]}

    @register_impl(
        "test_double",
        backend="cpu",
        configure=configure,
        config_type=lambda block: {"block": block},
        supports=lambda x: None if x.shape[1] <= 100 else f"needs N <= 100, got N={x.shape[1]}",
        batch_invariant=False,
    )
    def launch(outs: tuple[torch.Tensor], x: torch.Tensor, *, config: dict[str, int]) -> None:
        seen.calls += 1
        seen.configs.append(config)
        torch.mul(x, 2, out=outs[0])

    yield seen
    unregister_impl("test_double", backend="cpu")


@pytest.fixture
def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats CPU tensors as those of a GPU, whose calls are replayed."""
    monkeypatch.setattr(replay, "_current_device", lambda: -1)
    monkeypatch.setattr(replay, "HOST", None)
    monkeypatch.setattr(tape, "_current_stream", lambda device: 0)
