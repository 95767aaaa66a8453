"""The prompts and the step of a static decoder, run once on fake tensors, to find the kernels a bundle needs.

Nothing is computed, so no GPU is needed: `dispatch.record` and `jit.collect` note what would run.
"""

from typing import Any

import torch

from tilewright.generate.hook import rounded_length
from tilewright.generate.static import StaticDecoder


class PlannedDecoder(StaticDecoder):
    """A decoder of a model with fake parameters; greedy, because sampling runs no kernel of ours.

    Construct and run it under the FakeTensorMode of the model's parameters.
    """

    def __init__(self, model: Any, *, max_length: int, batch_size: int) -> None:
        self._allocate_state(model, max_length, batch_size, "auto")
        self._graphs = None

    def run(self, length: int) -> None:
        """Run what `generate` runs on a GPU: the shortest prompt, the step, a prompt of `length` tokens."""
        ids = torch.ones(self.batch_size, length, dtype=torch.int64, device=self.device)
        for prompt in (self._shortest_prompt(), ids):
            self._state.commit(self._prefill(prompt, None).argmax(-1))
            self._cache.cursor.visible = self._visible(length)
            self._step()

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


def run_planned(model: Any, batch: int, length: int, new_tokens: int) -> None:
    """Prefill `length` tokens and decode one of `new_tokens` as an attached `model.generate` would."""
    PlannedDecoder(model, max_length=rounded_length(length + new_tokens), batch_size=batch).run(length)
