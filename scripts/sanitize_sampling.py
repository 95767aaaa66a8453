"""Sampling's cases of `sanitize_cases.py`: rows that begin anywhere, between numbers that would be chosen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sanitize_values import DEVICE
from torch import Tensor

from tilewright.ops.sampling import checks, sample_reference
from tilewright.ops.sampling import greedy as greedy_op
from tilewright.ops.sampling import top_k as top_k_op
from tilewright.ops.sampling.kernels.sm90 import greedy, sample, top_k, top_k_short
from tilewright.ops.sampling.kernels.sm90.resident import Config
from tilewright.ops.sampling.sample import raw_arguments

# tokens, dtype, config
GREEDY = ((2501, torch.float32, Config(2, 256)), (1003, torch.bfloat16, Config(1, 128)))
# tokens, dtype, top-k, top-p, min-p, config: lists, both searches, draws
SAMPLE = (
    (2501, torch.float32, 40, 0.9, 0.0, Config(4, 256)),
    (2501, torch.bfloat16, 600, 0.8, 0.05, Config(2, 512)),
    (333, torch.float32, 0, 0.9, 0.0, Config(1, 256)),
    (1801, torch.float32, 0, 1.0, 0.0, Config(2, 256)),
)
# elements, dtype, k, config
TOP_K = (
    (2501, torch.float32, 20, Config(4, 512)),
    (2501, torch.float16, 700, Config(2, 512)),
    (300, torch.bfloat16, 8, top_k_short.Config(4)),
)


def likeliest(n: int, dtype: torch.dtype, config: Config) -> bool:
    """Rows with ties, NaN, infinities and nothing."""
    x = _rows(n, dtype)
    tokens = torch.full((len(x),), -7, device=DEVICE)
    greedy.launch((tokens,), greedy_op.GreedyArgs(x), config)
    return torch.equal(tokens, greedy_op.reference(x))


def drawn_tokens(n: int, dtype: torch.dtype, k: int, p: float, least: float, config: Config) -> bool:
    """Tokens and their log-probabilities."""
    x = _rows(n, dtype)
    positions = torch.arange(len(x), device=DEVICE)
    args = raw_arguments(x, positions + 5, positions, 0.8, k, p, least, 1)
    tokens, logs = torch.full_like(positions, -7), torch.full((len(x),), torch.nan, device=DEVICE)
    sample.launch((tokens, logs), args, config)
    wanted, wanted_logs = sample_reference.draw_tokens(args)
    return torch.equal(tokens, wanted) and torch.allclose(logs, wanted_logs)


def largest(n: int, dtype: torch.dtype, k: int, config: Any) -> bool:
    """The indices, in order."""
    x = _rows(n, dtype)
    outs = torch.zeros((len(x), k), dtype=dtype, device=DEVICE), torch.full((len(x), k), -7, device=DEVICE)
    module = top_k_short if isinstance(config, top_k_short.Config) else top_k
    module.launch(outs, top_k_op.TopKArgs(x, k), config)
    return torch.equal(outs[1], top_k_op.reference(x, k)[1])


def _rows(n: int, dtype: torch.dtype) -> Tensor:
    x = torch.full((7, n + 3), torch.inf, dtype=dtype, device=DEVICE)[:, 1 : n + 1]
    x.copy_(checks.logits(7, n, dtype, DEVICE, 3))
    checks.spoil(x)
    return x


SAMPLING_RUNS: tuple[tuple[str, Callable[..., bool], Sequence[tuple[Any, ...]]], ...] = (
    ("greedy", likeliest, GREEDY),
    ("sample", drawn_tokens, SAMPLE),
    ("top-k", largest, TOP_K),
)
"""Name, function and arguments of each case."""
