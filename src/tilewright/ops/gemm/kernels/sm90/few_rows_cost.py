"""Predicts the time of sm90.few_rows for 16-bit operands, a sum of eight terms fitted to 1960 times on an H200.

Blocks are persistent: those that run at once take `rounds` tiles each, one after another.
`benchmarks/product_costs.py` measures the times, and `benchmarks/fit_few_rows.py` prints the factors of the terms.  On
layer shapes held out of the fit the prediction is 7 % off on average, and the config of the least prediction 2.3 %
slower than the best (10 % with `few_rows_model.predicted_us`, which knows bandwidths alone).
"""

from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.few_rows_model import BLOCK_N, STAGE_BYTES, Config, Work, resident

_MULTIPROCESSORS = 132


class Terms(NamedTuple):
    """What a config does for a product, or the microseconds for each of it."""

    start: float  # 1: a launch behind another
    split_start: float  # 1 if only a part of the next grid fits beside this one, and can load its first stages
    megabytes: float  # of weights; K is padded to whole stages for each block of a cluster
    idle: float  # megabytes times (multiprocessors / busy ones - 1)
    rounds: float  # tiles that a block takes one after another
    shared_rounds: float  # rounds times the blocks of a multiprocessor
    tokens: float  # stages that a block reads one after another, times tokens / 8, times blocks of a multiprocessor
    pairs: float  # stages that a block reads one after another, if a multiprocessor has two blocks


US = Terms(
    start=1.82,
    split_start=0.261,
    megabytes=0.21,
    idle=0.0163,
    rounds=0.435,
    shared_rounds=0.26,
    tokens=0.0118,
    pairs=0.0368,
)
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
        split_start=float(tiles < running < 2 * tiles),
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
