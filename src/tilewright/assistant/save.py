"""Reuse the changes that `optimize` kept: put them on another copy of the model, or write a folder that does so."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.assistant.changes import TunedOps, chosen
from tilewright.assistant.inputs import make
from tilewright.assistant.loop import Optimization
from tilewright.assistant.stack import Stack
from tilewright.assistant.workload import workload
from tilewright.errors import InputError
from tilewright.version import __version__

TABLE = "tuned_ops.json"

_FILE = '''"""{gain}

Made by `tilewright optimize`, tilewright {version}. The weights next to this file are those of the unchanged model.

    from optimized import load

    model = load()
"""

from pathlib import Path
{imports}
from tilewright.assistant import apply_changes
from tilewright.assistant.load import load as open_model

KEPT = {kept!r}


def load(device=None):
    """The model in evaluation mode with the changes that were kept; device: the GPU if there is one."""
    here = Path(__file__).resolve().parent
    opened = open_model({source}, device=device)
{weights}    apply_changes(opened.model, KEPT, opened.inputs{table})
    return opened.model
'''


def apply_changes(
    model: nn.Module,
    names: Sequence[str],
    inputs: Any = None,
    *,
    prompts: Sequence[str | Tensor] | None = None,
    tokenizer: Any = None,
    table: str | Path | None = None,
) -> Stack:
    """Put the changes in `names` on `model`, in this order and without measuring: those that `optimize` kept before.

    inputs, prompts, tokenizer: as in `optimize`; without inputs and prompts they are made, for a transformers model.
    table: that of `tuned_ops`, tuned_ops.json in the folder that `save` wrote.  Returns the stack of changes; `.at(0)`
    takes them off. Raises InputError for an unknown name, and whatever a change that does not apply raises; then the
    model is as before.
    """
    by_name = {change.name: change for change in chosen(names)}
    if TunedOps.name in by_name:
        if table is None:
            raise InputError(f"{TunedOps.name} needs table=, the {TABLE} that save() wrote; `optimize` tunes anew.")
        by_name[TunedOps.name] = TunedOps(table=Path(table))
    if inputs is None and prompts is None:
        example = make(model, tokenizer)
        inputs, prompts = example.inputs, example.prompts
    stack = Stack(model, workload(model, inputs, prompts=prompts, tokenizer=tokenizer))
    try:
        for name in names:
            stack.push(by_name[name])
    except BaseException:
        stack.at(0)
        raise
    return stack


def save(optimization: Optimization, folder: str | Path, *, source: str = "", tokenizer: Any = None) -> list[str]:
    """Write the weights and `optimized.py`, whose `load()` applies the kept changes; and the table of `tuned_ops` if
    that was kept. Returns the names of the files.

    While the weights are written, the changes are off the model. source: "FILE.py:FACTORY" of a model that transformers
    cannot save; its weights go into weights.pt.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    names = [record.name for record in optimization.accepted]
    saves_itself = callable(getattr(optimization.model, "save_pretrained", None)) and not source
    with optimization.taken_off():
        if saves_itself:
            saver: Any = optimization.model
            saver.save_pretrained(target)
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
        else:
            torch.save(optimization.model.state_dict(), target / "weights.pt")
    measured = optimization.table
    if measured is not None:
        shutil.copyfile(measured, target / TABLE)
    path, _, factory = source.rpartition(":")
    text = _FILE.format(
        gain=optimization.report.headline.replace('"""', ""),
        version=__version__,
        kept=names,
        table="" if measured is None else f', table=here / "{TABLE}"',
        imports="" if saves_itself else "\nimport torch\n",
        source="str(here)" if saves_itself else repr(f"{Path(path).resolve()}:{factory}"),
        weights=""
        if saves_itself
        else '    opened.model.load_state_dict(torch.load(here / "weights.pt", weights_only=True))\n',
    )
    (target / "optimized.py").write_text(text, encoding="utf-8")
    return sorted(file.name for file in target.iterdir())
