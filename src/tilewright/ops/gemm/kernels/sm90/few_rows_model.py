"""Configs of the few-rows kernel: what fits shared memory, how many clusters run at once, which is fastest.

A stage holds 256 bytes of K of 64 rows of weights and of the tokens, for every dtype: 8-bit operands take half as many
stages, which also hold their scales.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tilewright.ops.gemm.scaled.scaling import Scaling

MAX_ROWS = 64
A_ALONG_K = (0, 1)  # the layouts nt and nn
BLOCK_N, STAGE_BYTES, THREADS = 64, 256, 160  # as in layout.cuh: weight rows of a tile, bytes of K, threads of a block
SPAN, CHUNKS, SCALE_ALIGN = 128, 2, 4  # bytes of a box row; boxes of a stage; row alignment of scale copies
_PITCH, _PARCEL = 68, 2048  # floats of a row of the result, bytes of 64 x 8 accumulators
UNSCALED = -1  # in addition to the values of Scaling: 16-bit operands


class Config(NamedTuple):
    """tokens: rows of A in a tile.  stages: of the ring.  split: blocks of a cluster that share K.  ctas: blocks that
    fit a multiprocessor.
    """

    tokens: int
    stages: int
    split: int
    ctas: int


class Work(NamedTuple):
    """`groups` products (rows, depth) @ (depth, columns), each with its own weights."""

    rows: int
    columns: int
    depth: int
    scaling: int = UNSCALED
    groups: int = 1

    @property
    def steps(self) -> int:
        """Number of k blocks."""
        return steps(self.depth, 2 if self.scaling == UNSCALED else 1)


def steps(depth: int, itemsize: int) -> int:
    """Returns the number of k blocks, the stages of K."""
    return -(-depth * itemsize // STAGE_BYTES)


# ------------------------------------------------------------------------------------------ shared memory, clusters

SHARED = {1: 232448, 2: 115712, 3: 76800}
"""Bytes a block may have so that 1, 2, 3 fit into the 228 KB of a multiprocessor, less 1 KB each for the system."""

_H200 = 132
_CLUSTERS = {  # ctas: {split: clusters}
    1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 16: 7},
    2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30, 16: 14},
}
"""Clusters that run at once on the 132 multiprocessors of an H200: cuOccupancyMaxActiveClusters, 2026-11.  Each cluster
is in one GPC, so some multiprocessors stay idle: more than GPCs of 18 and 16 explain.  Three ctas: 1.5 x two."""

_USABLE = 0.85
"""Share of the multiprocessors of other GPUs that clusters of more than two can use: in the table 112 of 132 at the
median, 102 at the least.  A grid that does not fit at once is still correct, but slower."""


def shared_bytes(config: Config, scaling: int = UNSCALED, grouped: bool = False) -> int:
    """Returns the dynamic shared memory of a block: ring with scales and barriers, parcels, the staged result."""
    return config.stages * _stage_bytes(config.tokens, scaling, grouped) + fixed_bytes(config.tokens, config.split)


def _stage_bytes(tokens: int, scaling: int, grouped: bool = False) -> int:
    """Bytes of operands, two barriers, and scales that change along K."""
    scales = 0
    if scaling in (Scaling.TOKEN_BLOCK, Scaling.TOKEN_TOKEN):
        scales = -(-CHUNKS * scale_rows(tokens, grouped) * 4 // 128) * 128
    if scaling == Scaling.TOKEN_TOKEN:
        scales += CHUNKS * BLOCK_N * 4
    return (BLOCK_N + tokens) * STAGE_BYTES + scales + 16


def scale_rows(tokens: int, grouped: bool) -> int:
    """Returns the rows of token scales in a box.  Groups begin at any row, boxes up to three rows earlier."""
    return tokens + (SCALE_ALIGN if grouped else 0)


def fixed_bytes(tokens: int, split: int) -> int:
    """Returns bytes besides the ring: parcels received from the cluster, the staged result, two barriers."""
    block_parcels = -(-tokens // 8 // split)  # parcels of eight tokens that a block of a cluster owns
    parcel_bytes = split * block_parcels * _PARCEL if split > 1 else 0
    return parcel_bytes + block_parcels * 8 * _PITCH * 4 + 16


def resident(split: int, ctas: int, processors: int) -> int:
    """Returns the clusters that run at once."""
    if split == 1:
        return processors * ctas
    if processors != _H200 or split not in _CLUSTERS[1]:
        return max(1, int(processors * ctas * (1 if split == 2 else _USABLE)) // split)
    return _CLUSTERS[ctas][split] if ctas in _CLUSTERS else _CLUSTERS[2][split] * ctas // 2


# ---------------------------------------------------------------------------------------------------- predicted time

READ = 4.3e6  # bytes a microsecond: the memory
_AHEAD = 0.3  # share of the ring that holds the next tile when a round ends


class _Costs(NamedTuple):
    """l2, processor: bytes a microsecond out of the L2, into one multiprocessor.  idle: if some multiprocessors are
    idle, the memory's rate goes with this power of the busy share.  Microseconds: step, of the math warpgroup for a
    stage that has landed; epilogue, for each token of a tile; meeting, of the split-K exchange for each token and block
    of a cluster, and meet, for each tile, which the ring does not hide.
    """

    l2: float
    processor: float
    idle: float
    step: float
    epilogue: float
    meeting: float
    meet: float


# For groups.  Fitted to 52 pairs of shape and M of single products, timed on an H200 before grids followed `_CLUSTERS`
# (M = 1 and 16 also before the L2 prefetch, and corrected by its gain).
_WIDE = _Costs(l2=8e6, processor=100e3, idle=0.1, step=0.1, epilogue=1 / 64, meeting=0.02 / 64, meet=0)

# e4m3: near the fit to two to four configs of each of 28 pairs, timed on an H200 in 2026-11, before promotion
# overlapped the WGMMAs.  A tile is read in half the time, so fixed costs show: the exchange inside a cluster takes 0.4
# us and more, which half as many stages do not hide.
_NARROW = _Costs(l2=8.7e6, processor=80e3, idle=0.28, step=0.15, epilogue=0.025, meeting=0.0016, meet=0.37)


def predicted_us(config: Config, work: Work) -> float:
    """Returns microseconds from the first load to the last store, without what all configs have in common.

    A full round of the clusters that run at once takes as long as its bytes or its arithmetic.  The last round has
    fewer clusters: they share the memory and the L2, each block limited by its multiprocessor, and part of their bytes
    were loaded as the previous round ended.  Groups add tiles; token tiles of one group share its weights.
    """
    costs = _WIDE if work.scaling == UNSCALED else _NARROW
    weights, both = BLOCK_N * STAGE_BYTES, (BLOCK_N + min(work.rows, config.tokens)) * STAGE_BYTES
    token_tiles = -(-work.rows // config.tokens)
    steps = -(-work.steps // config.split)

    def step(clusters: int) -> float:
        """Time of one stage for each block of so many clusters."""
        share = clusters * config.split / _H200  # blocks a multiprocessor
        memory = share * _H200 * weights / token_tiles / READ / min(1, share) ** costs.idle
        return max(memory, share * _H200 * both / costs.l2, max(1, share) * both / costs.processor)

    running = resident(config.split, config.ctas, _H200)
    rounds, rest = divmod(work.groups * token_tiles * -(-work.columns // BLOCK_N), running)
    epilogue = costs.epilogue * config.tokens
    meeting = costs.meeting * config.tokens * config.split + costs.meet if config.split > 1 else 0
    full = rounds * (max(steps * step(running), steps * costs.step + epilogue) + meeting)
    landed = _AHEAD * min(steps, config.stages) if rounds else 0
    return full + ((steps - landed) * step(rest) + meeting if rest else 0) + epilogue


# ---------------------------------------------------------------------------------------------------- what to choose

TOKENS = (8, 16, 32, 64)
GROUP_TOKENS = (8, 16, 32, 48, 64)
_IN_FLIGHT = 64 << 10  # minimum bytes of weights in flight for a multiprocessor

# split, ctas: those that measured best for some shape, and some between.  The models are 7 % off on average, so they
# would choose worse among more; the tuner tries all.
_DEFAULTS = (
    *((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)),
    *((4, 1), (4, 2), (4, 3), (6, 1), (6, 2), (8, 1), (8, 2)),
)
_DEFAULTS_NARROW = (  # fewer stages: rounds and meetings count for more
    *((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1)),
    *((4, 1), (4, 2), (4, 3), (6, 1), (6, 3), (7, 3), (8, 1)),
)
_GROUP_DEFAULTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (8, 1))  # more tiles, hence fewer splits


def deepest(tokens: int, split: int, ctas: int, scaling: int = UNSCALED, grouped: bool = False) -> Config | None:
    """Returns the config with the deepest ring; None if too few bytes of weights would be in flight."""
    stages = (SHARED[ctas] - fixed_bytes(tokens, split)) // _stage_bytes(tokens, scaling, grouped)
    in_flight = ctas * stages * BLOCK_N * STAGE_BYTES
    return Config(tokens, stages, split, ctas) if stages >= 2 and in_flight >= _IN_FLIGHT else None


def defaults(scaling: int) -> tuple[Config, ...]:
    """Returns the configs to choose from for one product."""
    return _all(TOKENS, _DEFAULTS if scaling == UNSCALED else _DEFAULTS_NARROW, scaling)


def group_defaults(scaling: int) -> tuple[Config, ...]:
    """Returns the configs to choose from for groups."""
    return _all(GROUP_TOKENS, _GROUP_DEFAULTS, scaling, grouped=True)


def space(tokens: Iterable[int], scaling: int, grouped: bool = False) -> tuple[Config, ...]:
    """Returns every config whose tiles have so many tokens."""
    return _all(tokens, [(split, ctas) for ctas in SHARED for split in (1, *_CLUSTERS[1])], scaling, grouped)


def _all(
    tokens: Iterable[int], shapes: Iterable[tuple[int, int]], scaling: int, grouped: bool = False
) -> tuple[Config, ...]:
    configs = (deepest(t, split, ctas, scaling, grouped) for t in tokens for split, ctas in shapes)
    return tuple(config for config in configs if config is not None)


def ranked(
    configs: Iterable[Config], work: Work, predict: Callable[[Config, Work], float] = predicted_us
) -> list[Config]:
    """Sorts configs by predicted time, without those whose split exceeds the k blocks."""
    return sorted((c for c in configs if c.split <= work.steps), key=lambda c: predict(c, work))


def fitting(sizes: tuple[int, ...], rows: int) -> int:
    """Returns the least of `sizes` that holds `rows`, or the largest."""
    return next((t for t in sizes if t >= rows), sizes[-1])
