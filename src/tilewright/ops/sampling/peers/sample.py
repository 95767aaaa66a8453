"""FlashInfer's sampling: a softmax under the temperature, then a draw by rejection.

It draws other tokens from the same distribution, so that a result is right if the filters keep its tokens.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.peer import Call
from tilewright.ops.sampling import numbers
from tilewright.ops.sampling.sample import raw_arguments
from tilewright.ops.sampling.sample_reference import kept_weights

_ROUNDING = 1e-3
"""Added to top_p: sums in float32 end a token sooner or later than exact ones."""


@dataclass(frozen=True)
class FlashInfer:
    """`flashinfer.sampling`, on float32 logits, with top-k, top-p, both or none of them."""

    name: str = "flashinfer"
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """Only where it is installed."""
        return find_spec("flashinfer") is not None

    def make(self, sample: Sample) -> Call | None:
        """Seeds and positions are one of each row, as ours; rows that are greedy it does not have."""
        (logits, seeds, positions), options = sample.args, sample.kwargs
        temperature = options.get("temperature")
        cold = temperature is not None and bool((torch.as_tensor(temperature) <= 0).any())
        if logits.dtype != torch.float32 or options.get("min_p") is not None or options.get("logprobs") or cold:
            return None
        from flashinfer import sampling

        top_k, top_p = _top_k(options.get("top_k"), logits.shape[1]), options.get("top_p")
        draw: dict[str, Any] = {"seed": seeds, "offset": positions}

        def call() -> Tensor:
            if temperature is None and top_k is None and top_p is None:
                return sampling.sampling_from_logits(logits, **draw)
            probs = sampling.softmax(logits, temperature=temperature)
            if top_k is not None and top_p is not None:
                return sampling.top_k_top_p_sampling_from_probs(probs, top_k, top_p, **draw)
            if top_k is not None:
                return sampling.top_k_sampling_from_probs(probs, top_k, **draw)
            if top_p is not None:
                return sampling.top_p_sampling_from_probs(probs, top_p, **draw)
            return sampling.sampling_from_probs(probs, **draw)

        return call

    def judge(self, sample: Sample, outputs: Any) -> bool:
        """Are these tokens that the filters keep?"""
        (logits, seeds, positions), options = sample.args, sample.kwargs
        top_p = options.get("top_p")
        if top_p is not None:
            top_p = torch.as_tensor(top_p, device=logits.device, dtype=torch.float32).expand(logits.shape[0])
            top_p = (top_p + _ROUNDING).clamp(max=1.0)
        args = raw_arguments(
            logits, seeds, positions, options.get("temperature"), options.get("top_k"), top_p, options.get("min_p"), 0
        )
        weights, _ = kept_weights(numbers.clean(args.logits), args)
        tokens = outputs.long()
        inside = (tokens >= 0) & (tokens < weights.shape[1])
        mass = weights.gather(1, tokens.clamp(0, weights.shape[1] - 1)[:, None])[:, 0]
        return tokens.shape == weights.shape[:1] and bool((inside & (mass > 0)).all())


def _top_k(value: Tensor | int | None, vocabulary: int) -> Tensor | int | None:
    """0 keeps all tokens."""
    if isinstance(value, Tensor):
        return torch.where(value > 0, value, vocabulary)
    return value or None


PEERS = (FlashInfer(),)
