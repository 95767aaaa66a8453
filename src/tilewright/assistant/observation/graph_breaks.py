"""How often torch.compile would have to leave the graph, and where: `torch._dynamo.explain`, read defensively.

Dynamo is asked to trace code that it has never seen. When it fails on it, that is an observation about the model, not
an error of ours, and is reported in words.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from tilewright.assistant.wording import first_line, without_folders
from tilewright.log import logger


@dataclass
class GraphBreaks:
    """graphs: parts the forward falls into, None when Dynamo failed. reasons: a line each, with its place."""

    graphs: int | None
    breaks: int | None
    reasons: list[str] = field(default_factory=list)


def graph_breaks(model: nn.Module, run: Callable[[nn.Module], object]) -> GraphBreaks:
    """Trace `run(model)` and count. Resets Dynamo's caches: code compiled before is compiled again on its next call."""
    dynamo_log = logging.getLogger("torch._dynamo")
    level = dynamo_log.level
    dynamo_log.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explained = torch._dynamo.explain(lambda: run(model))()
    except Exception as error:  # noqa: BLE001  Dynamo raises whatever the traced code made it raise
        logger.info("torch._dynamo.explain failed: %s", error)
        return GraphBreaks(None, None, [f"Dynamo could not trace the model: {first_line(error)}"])
    finally:
        dynamo_log.setLevel(level)
        torch._dynamo.reset()
    return GraphBreaks(
        explained.graph_count, explained.graph_break_count, [_in_words(reason) for reason in explained.break_reasons]
    )


def _in_words(reason: object) -> str:
    text = without_folders(str(getattr(reason, "reason", reason)).strip().splitlines()[0])
    stack = getattr(reason, "user_stack", None)
    return f"{text} ({stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno})" if stack else text
