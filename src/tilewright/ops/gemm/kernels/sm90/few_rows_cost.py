"""Predicts the time of sm90.few_rows for 16-bit operands, a sum of seven terms fitted to 1960 times on an H200.

Blocks are persistent: those that run at once take `rounds` tiles each, one after another.
`benchmarks/product_costs.py` measures the times, and `benchmarks/fit_few_rows.py` prints the factors of the terms.  On
layer shapes held out of the fit the prediction is 7 % off on average, and the config of the least prediction 2.2 %
slower than the best (10 % with `few_rows_model.predicted_us`, which knows bandwidths alone).
"""

from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.few_rows_model import BLOCK_N, STAGE_BYTES, Config, Work, resident

_MULTIPROCESSORS = 132


class Terms(NamedTuple):
    """What a config does for a product, or the microseconds for each of it."""

    start: float  # 1: a launch behind another
    megabytes: float  # of weights; K is padded to whole stages for each block of a cluster
    idle: float  # megabytes times (multiprocessors / busy ones - 1)
    rounds: float  # tiles that a block takes one after another
    shared_rounds: float  # rounds times the blocks of a multiprocessor
    tokens: float  # stages that a block reads one after another, times tokens / 8, times blocks of a multiprocessor
    pairs: float  # stages that a block reads one after another, if a multiprocessor has two blocks


US = Terms(start=1.94, megabytes=0.2105, idle=0.0149, rounds=0.429, shared_rounds=0.248, tokens=0.0117, pairs=0.0364)
"""Microseconds for each unit of a term, on an H200."""


def terms(config: Config, work: Work) -> Terms:
    """Returns the terms of a product with a config."""
    tiles = work.groups * -(-work.columns // BLOCK_N) * -(-work.rows // config.tokens)
    running = resident(config.split, config.ctas, _MULTIPROCESSORS)
    rounds = -(-tiles // running)
    steps = -(-work.steps // config.split)
    megabytes = tiles * steps * config.split * BLOCK_N * STAGE_BYTES / 1e6
    busy = min(1.0, min(tiles, running) * config.split / _MULTIPROCESSORS)
    return Terms(
        start=1.0,
        megabytes=megabytes,
        idle=megabytes * (1 / busy - 1),
        rounds=rounds,
        shared_rounds=rounds * config.ctas,
        tokens=rounds * steps * config.tokens / 8 * config.ctas,
        pairs=rounds * steps * (config.ctas == 2),
    )


def predicted_us(config: Config, work: Work) -> float:
    """Returns microseconds of a launch behind another."""
    return sum(us * amount for us, amount in zip(US, terms(config, work), strict=True))
