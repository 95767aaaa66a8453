"""Losses under tensor parallelism: each rank of a process group holds a slice of the vocabulary."""

from tilewright.distributed.vocab_parallel import (
    VocabParallelLinearCrossEntropyLoss,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)

__all__ = [
    "VocabParallelLinearCrossEntropyLoss",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
