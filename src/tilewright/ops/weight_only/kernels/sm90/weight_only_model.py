"""Configs of the Hopper kernel: what fits shared memory, and which is predicted to be the fastest."""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from tilewright.ops.gemm.kernels.sm90.few_rows_model import READ, SHARED, resident

SPAN, GROUP, TOKEN_K = 128, 128, 64  # constants of weight_only_product.cuh
TOKENS = (8, 16, 32, 64)


class Config(NamedTuple):
    """tokens: rows of x in a tile.  tiles: of 16 weight rows, for each of `warps` math warps.  stages: of the ring.

    split: blocks of a cluster that share K.  ctas: blocks that fit a multiprocessor.
    """

    tokens: int
    tiles: int
    warps: int
    stages: int
    split: int
    ctas: int

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 16 * self.tiles * self.warps

    @property
    def threads(self) -> int:
        """Threads of a block: the math warps and the producer warp."""
        return 32 * (self.warps + 1)


class Work(NamedTuple):
    """x (m, k) times weights (n, k) of `bits` bits."""

    m: int
    n: int
    k: int
    bits: int


def stage_k(bits: int) -> int:
    """Returns K of a stage: 128 bytes of a weight row."""
    return SPAN * 8 // bits


def k_blocks(k: int, bits: int) -> int:
    """Returns the number of k blocks, the stages of K."""
    return -(-k // stage_k(bits))


# ---------------------------------------------------------------------------------------------------- shared memory


def stage_bytes(config: Config, bits: int, scale_bytes: int = 4) -> int:
    """Returns bytes of weights, tokens (boxes of 64 along K, padded by 256 bytes) and scales; whole kilobytes."""
    tokens = stage_k(bits) // TOKEN_K * (config.tokens * SPAN + 256)
    scales = stage_k(bits) // GROUP * config.rows * scale_bytes
    return -(-(config.rows * SPAN + tokens + scales) // 1024) * 1024


def fixed_bytes(config: Config) -> int:
    """Returns bytes besides the ring: parcels received from the cluster, the staged result, two barriers."""
    share = -(-config.tokens // 8 // config.split)  # parcels of eight tokens that a block of a cluster owns
    received = config.split * share * config.rows * 32 if config.split > 1 else 0
    return received + share * 8 * (config.rows + 4) * 4 + 16


def shared_bytes(config: Config, bits: int, scale_bytes: int = 4) -> int:
    """Returns the dynamic shared memory of a block; without `scale_bytes`, room for any scales."""
    return config.stages * (stage_bytes(config, bits, scale_bytes) + 16) + fixed_bytes(config)


# ---------------------------------------------------------------------------------------------------- predicted time

_SMS = 132  # of the GPU of the constants below: an H200
_L2 = 8e6  # bytes a microsecond
_PROCESSOR = 100e3  # into one multiprocessor
_IDLE = 0.1  # idle multiprocessors leave the memory a little less busy: its rate goes with this power of their share
_CLOCK = 1750  # cycles a microsecond
_ALONE, _BUSY = 0.6, 0.85  # share of issue slots that one warp, or several, of an SM sub-partition use
_EPILOGUE = 1.0 / 64  # microseconds for each token of a tile
_MEETING = 0.02 / 64  # split-K exchange, for each token and block of a cluster; the ring does not hide it
_AHEAD = 0.3  # share of the ring that holds the next tile when a round ends


def cycles(config: Config, bits: int) -> float:
    """Returns the minimum cycles of a warp for a stage.

    Masks, shifts and permutations share a pipe that takes an instruction every other cycle: 0.9 of them for a 4-bit
    integer, 1.3 for an 8-bit one.  Permuting adds four for each eight tokens and 32 of K with up to 16 tokens, else
    0.25 an integer.  An MMA takes two cycles, everything else 60.
    """
    k, few = stage_k(bits), config.tokens <= 16
    converting = config.tiles * k / 2 * ((1.8 if bits == 4 else 2.6) + (0 if few else 0.5))
    products = k / 32 * (8 if few else 1) + config.tiles * k / 16 * 2
    return converting + config.tokens / 8 * products + 60


def predicted_us(config: Config, work: Work) -> float:
    """Returns microseconds from the first load to the last store, without what all configs have in common.

    Bytes are counted as in `few_rows_model.py`, with its constants; the arithmetic, which matters here, by cycles.
    """
    k = stage_k(work.bits)
    weights = config.rows * (SPAN + k // GROUP * 2)
    both = weights + min(work.m, config.tokens) * k * 2
    token_tiles = -(-work.m // config.tokens)
    count = -(-k_blocks(work.k, work.bits) // config.split)
    busy = cycles(config, work.bits) / _CLOCK
    # TMA writes all bytes once; weights are read once, tokens by every warp
    shared = (2 * both + (config.warps - 1) * config.tokens * k * 2) / SPAN / _CLOCK

    def step(clusters: int) -> float:
        """Time of one stage for each block of so many clusters."""
        share = clusters * config.split / _SMS  # blocks a multiprocessor
        memory = share * _SMS * weights / token_tiles / READ / min(1, share) ** _IDLE
        arithmetic = busy * max(1 / _ALONE, share * config.warps / 4 / _BUSY)
        inside = max(1, share) * max(both / _PROCESSOR, shared)
        return max(memory, share * _SMS * both / _L2, inside, arithmetic)

    running = resident(config.split, config.ctas, _SMS)
    rounds, rest = divmod(token_tiles * -(-work.n // config.rows), running)
    epilogue = _EPILOGUE * config.tokens
    meeting = _MEETING * config.tokens * config.split if config.split > 1 else 0
    full = rounds * (count * step(running) + epilogue + meeting)
    landed = _AHEAD * min(count, config.stages) if rounds else 0
    return full + ((count - landed) * step(rest) + meeting if rest else 0) + epilogue


# ---------------------------------------------------------------------------------------------------- what to choose

_IN_FLIGHT = 32 << 10  # minimum bytes of weights in flight for a multiprocessor
_DEFAULTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2))  # split, ctas
_ROWS = ((1, 4), (2, 4), (1, 8), (2, 8))  # tiles, warps
_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)


def deepest(bits: int, tokens: int, tiles: int, warps: int, split: int, ctas: int) -> Config | None:
    """Returns the config with the deepest ring; None if too few bytes of weights would be in flight, or accumulators
    leave too few registers.
    """
    config = Config(tokens, tiles, warps, 0, split, ctas)
    if _registers(config) > _available(config):
        return None
    stages = (SHARED[ctas] - fixed_bytes(config)) // (stage_bytes(config, bits) + 16)
    enough = stages >= 2 and ctas * stages * config.rows * SPAN >= _IN_FLIGHT
    return config._replace(stages=stages) if enough else None


def _registers(config: Config) -> int:
    """Returns the minimum registers of a thread without spills: acc, acc_tmp of a group, and the rest."""
    return 72 + config.tokens * config.tiles


def _available(config: Config) -> int:
    """Returns the registers of a thread: an SM sub-partition has 512 for each lane, shared by its warps."""
    warps = -(-config.ctas * (config.warps + 1) // 4)
    return min(255, 512 // warps // 8 * 8)


def defaults(bits: int) -> tuple[Config, ...]:
    """Returns the configs to choose from."""
    many = _all(bits, (_MANY,), ((split, 1) for split in _MANY_SPLITS))
    return tuple(dict.fromkeys((*_all(bits, TOKENS, _DEFAULTS), *many)))


def space(bits: int, tokens: int) -> tuple[Config, ...]:
    """Returns every config whose tiles have so many tokens."""
    return _all(bits, (tokens,), product(_SPLITS, SHARED))


SMALL = 4 << 20  # bytes of a weight
_MANY = 64  # tokens of a tile from which on a second block of a multiprocessor costs
_SECOND_US = 1.0
"""What it costs beside the prediction: 0.9 to 1.2 us in six products of 38 to 64 rows; 48x2560x2560 takes 6.67 us in
the config that it leaves first, 7.14 in the one before (16-bit cuBLAS 7.04; H200, 2026-11)."""
_MANY_SPLITS = (1, 2, 3, 4, 5, 6, 8)


def chosen(work: Work) -> Config:
    """Returns the config of the least predicted time; for small weights one of three for each number of tokens, so that
    odd sizes share compiled kernels.

    Those have a block a multiprocessor, and the largest split whose clusters all run at once: 4.54, 5.09, 3.15, 3.00
    and 2.52 us at 44x5120x640, 38x2240x1536 (int4), 54x896x896 (int4), 3x5120x640 and 30x896x896 (int4), where a split
    of 4 with two blocks takes 6.71, 5.61, 4.06, 3.89 and 2.99 (H200, 2026-11).
    """
    tokens = next((t for t in TOKENS if t >= work.m), None)
    if tokens is None or work.n * work.k * work.bits > 8 * SMALL:
        return min(ranked(defaults(work.bits), work), key=lambda c: _with_second(c, work))
    tiles, blocks = -(-work.n // 64), k_blocks(work.k, work.bits)
    split = next((s for s in (4, 2) if s <= blocks and tiles <= resident(s, 1, _SMS)), 1)
    config = deepest(work.bits, tokens, 1, 4, split, 1)
    assert config is not None, "fits for every number of tokens"
    return config


def _with_second(config: Config, work: Work) -> float:
    """Predicted microseconds, with what a second block of a multiprocessor costs a product of many tokens that is done
    in one round; in several it hides epilogues (46x37984x1024, int4: 20.2 us, 22.2 with one block).
    """
    clusters = -(-work.m // config.tokens) * -(-work.n // config.rows)
    costs = config.tokens == _MANY and config.ctas > 1 and clusters <= resident(config.split, config.ctas, _SMS)
    return predicted_us(config, work) + (_SECOND_US if costs else 0.0)


def _all(bits: int, tokens: Iterable[int], shapes: Iterable[tuple[int, int]]) -> tuple[Config, ...]:
    configs = (deepest(bits, t, *rows, *shape) for t, rows, shape in product(tokens, _ROWS, shapes))
    return tuple(config for config in configs if config is not None)


def ranked(configs: Iterable[Config], work: Work) -> list[Config]:
    """Sorts configs by predicted time: those whose tokens hold the rows, and whose split is at most the k blocks."""
    tokens = next((t for t in TOKENS if t >= work.m), TOKENS[-1])
    legal = [c for c in configs if c.tokens == tokens and c.split <= k_blocks(work.k, work.bits)]
    return sorted(legal, key=lambda c: predicted_us(c, work))
