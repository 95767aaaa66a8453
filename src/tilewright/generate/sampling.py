"""Selection of the next token from the last token's logits, on the device, so that a CUDA graph can replay it.

The steps and their order are those of Transformers (temperature, top-k, top-p, softmax, one draw), bit for bit in
fp32. The draw is the exponential race that `torch.multinomial` runs for one sample, argmax(p / e) with e ~ Exp(1),
without multinomial's check of the probabilities, which waits for the GPU.

Cost inside the graph at a vocabulary of 128k: top-k is one radix selection; top-p sorts the whole row, by far the most
expensive step. Temperature and top-p are read from device buffers, so changing them costs no capture; another top-k
value does.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from tilewright.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """temperature > 0. top_k: keep the k likeliest, 0 keeps all. top_p in (0, 1]: smallest set of that probability."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise InputError(
                f"temperature must be > 0, got {self.temperature}; do_sample=False takes the likeliest token"
            )
        if self.top_k < 0:
            raise InputError(f"top_k must be >= 0, got {self.top_k}. 0 keeps every token.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p}. 1.0 keeps every token.")


class TokenSelector:
    """Chooses tokens. `load` sets the sampling of the next calls in buffers that captured graphs read."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device)
        self._temperature = torch.ones(1, device=device)
        self._excluded = torch.zeros(1, device=device)  # 1 - top_p
        self._sampling: Sampling | None = None

    @property
    def key(self) -> Hashable:
        """Key of the captured graph for the loaded sampling."""
        s = self._sampling
        return None if s is None else (s.top_k, s.top_p < 1)

    def load(self, sampling: Sampling | None) -> None:
        """Sample as `sampling` says; None takes the likeliest token."""
        self._sampling = sampling
        if sampling is not None:
            self._temperature.fill_(sampling.temperature)
            self._excluded.fill_(1 - sampling.top_p)

    def seed(self, seed: int | None, generator: torch.Generator | None) -> None:
        """Set the generator's state from `seed`, else from `generator`, else from torch's global generator."""
        if generator is None:
            self.generator.manual_seed(seed if seed is not None else int(torch.randint(2**63 - 1, ())))
            return
        if seed is not None:
            raise InputError("give seed or generator, not both")
        if generator.device.type != self.generator.device.type:
            raise InputError(f"generator is on {generator.device}, the model on {self.generator.device}")
        self.generator.set_state(generator.get_state())

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: (B, V) -> tokens (B,) int64."""
        if self._sampling is None:
            return logits.argmax(-1)
        probabilities = self.process(logits).softmax(-1)
        race = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return (probabilities / race).argmax(-1)

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores in fp32 with excluded tokens at -inf: (B, V) -> (B, V)."""
        if self._sampling is None:
            return logits.float()
        scores = logits.float() / self._temperature
        if self._sampling.top_k:
            k = min(self._sampling.top_k, scores.shape[-1])
            scores = scores.masked_fill(scores < scores.topk(k).values[:, -1:], float("-inf"))
        if self._sampling.top_p < 1:
            ascending, order = scores.sort(-1)
            dropped = ascending.softmax(-1).cumsum(-1) <= self._excluded
            dropped[:, -1] = False  # the likeliest token always stays
            scores = scores.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
        return scores
