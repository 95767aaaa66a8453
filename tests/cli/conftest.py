"""A command line in an empty folder with an empty cache, and what it may leave behind."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.assistant.planted import ceilings as planted_ceilings
from tests.harness.registry import own_registry
from typer.testing import CliRunner

from tilewright import settings
from tilewright.assistant.timing.threads import restored_threads
from tilewright.cli import app
from tilewright.dispatch import register_impl
from tilewright.dispatch.tables import table
from tilewright.hardware import ceilings, device_info


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of the test: empty, with no TILEWRIGHT_* variable but a cache folder beside it."""
    for name in [*os.environ]:
        if name.startswith("TILEWRIGHT_") or name == "DISABLE_FALLBACK":
            monkeypatch.delenv(name)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings.reload()
    table.forget()
    logger = logging.getLogger("tilewright")
    kept = logger.level, list(logger.handlers), logger.propagate
    yield folder
    logger.setLevel(kept[0])
    logger.handlers, logger.propagate = kept[1:]
    monkeypatch.undo()
    settings.reload()
    table.forget()


@pytest.fixture
def tilewright(place: Path) -> Any:
    """`tilewright("ops", "--json", "-")`, in this process; the environment is read anew."""

    def run(*words: str) -> Any:
        settings._current = None
        return CliRunner().invoke(app, list(words))

    return run


@pytest.fixture
def calibrated(place: Path) -> None:
    """Ceilings that were never measured, so that the assistant need not measure them."""
    of_this_machine = {"device": device_info("cpu").name, "driver": ceilings.driver_version("cpu")}
    with restored_threads():
        for threads in {1, torch.get_num_threads()}:  # the assistant may choose one
            torch.set_num_threads(threads)
            ceilings.save(replace(planted_ceilings(), **of_this_machine), "cpu")


@pytest.fixture
def broken_kernel() -> Iterator[str]:
    """A backend of rms_norm whose result is all zeros."""

    with own_registry():

        @register_impl("rms_norm", backend="cpu")
        def launch(outs: tuple[torch.Tensor, ...], *args: Any, config: Any) -> None:
            for out in outs:
                out.zero_()

        yield "cpu"


@pytest.fixture
def factory(place: Path) -> str:
    """A model as a user hands it over: a file with a function, which also prints."""
    (place / "tiny_model.py").write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "def make():\n"
        "    print('loading my model')\n"
        "    torch.manual_seed(0)\n"
        "    sizes = dict(hidden_size=32, intermediate_size=48, vocab_size=64, max_position_embeddings=64)\n"
        "    heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)\n"
        "    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)), torch.arange(8)[None]\n"
    )
    return "tiny_model.py:make"
