"""Dense products of 16-bit operands for Hopper: matmul and bmm, and with groups grouped_matmul, masked_matmul and
k_grouped_matmul.  This module chooses the tile, which decides how full the last wave is; `dense_kernel.py` launches it.

Products of at most 512 rows have few tiles, so K may be split over a cluster (`dense_parts/split_k.cuh`);
`middle_cost.py` ranks them.

Tiles are padded along M, so up to 64 rows of A, contiguous along K, go to `few_rows.py`.

Groups of rows: each block counts the tiles of every group at its start and finds the group of a tile by bisection, so
that the number of groups costs nothing later.  Groups begin at any row: a tile may read rows of the next group, which
are not stored, and the 64 rows in which a group ends are written by ordinary stores instead of TMA.  A group of R rows
costs ceil(R / block_m) rows of tiles; 64 rows of a tile that are all outside are not multiplied.

Groups along K: K of a tile begins where its group does, and groups end at any K: the part of the last stage that
belongs to the next group, which may be NaN, is overwritten with zeros in shared memory, in both operands.  That takes
128 threads some 300 cycles, during the WGMMAs of the previous k block.  If C is D in float32, TMA adds, and empty
groups cost nothing; otherwise they become C, or zeros.  Groups do not split K, so one of long K with few tiles is
slow.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from tilewright import settings
from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.log import log_once
from tilewright.ops.gemm.bmm import FORWARD as BMM
from tilewright.ops.gemm.dense.args import GATED, BmmBucket, MatmulArgs, MatmulBucket, as_batch, plain_args
from tilewright.ops.gemm.grouped.args import UNSCALED, GroupedArgs, GroupedBucket, KGroupedArgs, KGroupedBucket
from tilewright.ops.gemm.grouped_matmul import FORWARD as GROUPED
from tilewright.ops.gemm.k_grouped_matmul import FORWARD as K_GROUPED
from tilewright.ops.gemm.kernels.sm90 import cost_model, grouping, middle_cost
from tilewright.ops.gemm.kernels.sm90.cost_model import Problem, Tile
from tilewright.ops.gemm.kernels.sm90.dense_kernel import Config, gemm, stage_bytes, staging_bytes
from tilewright.ops.gemm.kernels.sm90.operands import why_not_16_bit, why_not_machine
from tilewright.ops.gemm.masked_matmul import FORWARD as MASKED
from tilewright.ops.gemm.matmul import FORWARD as MATMUL
from tilewright.ops.gemm.operands import major_a, major_b

_SHARED = 232448 - 1024  # bytes a block may have, without its barriers
_MAX_STAGES = 10
_MN_MAJOR_B = (1, 2)  # the layouts nn and tn

_BLOCKS = {64: (32, 64, 96, 128, 192, 256), 128: tuple(range(64, 257, 16))}
_CLUSTERS = ((1, 1), (2, 1), (1, 2))
TILES = tuple(Tile(m, n, *cluster) for m, columns in _BLOCKS.items() for n in columns for cluster in _CLUSTERS)
"""All tiles without a split.  256x128, two tiles of accumulators a warpgroup, was never faster than 128x256."""

SPLITS = middle_cost.splits(
    {64: (64, 96, 128, 192, 256), 128: (64, 80, 96, 112, 128, 144, 160, 192, 224, 240, 256)}, _CLUSTERS
)
"""Tiles whose K is split, for products of at most `middle_cost.MAX_ROWS` rows."""


def why_not(args: MatmulArgs) -> str | None:
    """Why this kernel cannot run a dense product; None if it can."""
    return why_not_machine(args.a) or why_not_operands(args)


def why_not_operands(args: MatmulArgs) -> str | None:
    """Why this kernel cannot run these operands and this epilogue; None if it can."""
    if major_a(args.a) is None or major_b(args.b) is None:
        return "needs a and b contiguous along one of their last two dimensions"
    return why_not_16_bit(args.a, args.b, args.bias, args.c, args.activation, args.out_dtype)


def configure(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> Config:
    """Returns the tile of the least predicted time."""
    problem = _problem(bucket)
    return choose_middle(problem) if problem.m <= middle_cost.MAX_ROWS else choose(problem)


def candidates(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the eight tiles of the least predicted time, each with several group_m; of few rows, also the sixteen of
    the least time with or without a split of K.
    """
    problem = _problem(bucket)
    middle = rank_middle(problem)[:16] if problem.m <= middle_cost.MAX_ROWS else ()
    return tuple(dict.fromkeys((*(config_of(tile, problem) for tile in middle), *choices(problem))))


def _problem(bucket: MatmulBucket | BmmBucket) -> Problem:
    return Problem(
        bucket.M,
        bucket.N,
        bucket.K,
        out_bytes=bucket.out_bits // 8,
        gated=bucket.epilogue == GATED,
        mn_major_b=bucket.layout in _MN_MAJOR_B,
        batch=getattr(bucket, "B", 1),  # which `matmul` does not have
        sms=sm_count(),
    )


def sm_count() -> int:
    """Returns the number of multiprocessors to choose for."""
    return device_info("cuda").sm_count or 132


def choose(problem: Problem) -> Config:
    """Returns the config of the least predicted time."""
    config = _choose(problem)
    if settings.current().print_configs:
        prediction = cost_model.predict(problem, tile_of(config))
        log_once(("dense", problem), f"dense GEMM {problem}: {config}, {prediction}", logging.WARNING)
    return config


@cache
def _choose(problem: Problem) -> Config:
    return config_of(cost_model.rank(problem, _legal(problem))[0][0], problem)


def choose_middle(problem: Problem) -> Config:
    """Returns the config of the least predicted time for few rows, K split or not."""
    config = _choose_middle(problem)
    if settings.current().print_configs:
        us = middle_cost.predicted_us(problem, tile_of(config))
        log_once(("dense", problem), f"dense GEMM {problem}: {config}, {us:.1f} us predicted", logging.WARNING)
    return config


@cache
def _choose_middle(problem: Problem) -> Config:
    return config_of(rank_middle(problem)[0], problem)


def rank_middle(problem: Problem) -> list[Tile]:
    """Sorts the tiles that fit, with and without a split of K, the least predicted time first."""
    splits = (tile for tile in SPLITS if _fits(problem, tile))
    return middle_cost.rank(problem, (*_legal(problem), *splits))


def choices(problem: Problem) -> tuple[Config, ...]:
    """Returns the configs of the eight tiles of the least predicted time, each with several group_m."""
    configs = []
    for tile, _ in cost_model.rank(problem, _legal(problem))[:8]:
        config = config_of(tile, problem)
        configs += [config, *(config._replace(group_m=rows) for rows in (4, 8, 16) if rows != config.group_m)]
    return tuple(configs)


def _legal(problem: Problem) -> tuple[Tile, ...]:
    """Returns the tiles without a split that fit."""
    return tuple(tile for tile in TILES if _fits(problem, tile))


def _fits(problem: Problem, tile: Tile) -> bool:
    """Returns whether a tile fits: gated ones write whole strips of 32 bytes, a cluster has two tiles that share."""
    return (not problem.gated or tile.block_n % 32 == 0) and middle_cost.fits(problem, tile)


def config_of(tile: Tile, problem: Problem) -> Config:
    """Returns the config of a tile: as many stages as fit, and the order of tiles."""
    free = _SHARED - staging_bytes(tile.block_m, tile.split)
    stages = min(_MAX_STAGES, free // stage_bytes(tile.block_m, tile.block_n, problem.mn_major_b))
    group_m = cost_model.group_m(tile, problem.sms)
    return Config(tile.block_m, tile.block_n, stages, tile.cluster_m, tile.cluster_n, group_m, tile.split)


def tile_of(config: Config) -> Tile:
    """Returns the tile of a config."""
    return Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n, config.split)


CONFIGS: tuple[Config, ...] = tuple(
    dict.fromkeys(
        config_of(tile, Problem(1, 1, 1, mn_major_b=along_n, sms=132))
        for along_n in (False, True)
        for tile in (*TILES, *SPLITS)
    )
)
"""Every config that `choose` and `choose_middle` can return on a GPU of 132 multiprocessors."""


@register_kernel(
    MATMUL, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch(args), config)


@register_kernel(BMM, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not)
def launch_batch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0], args, config)


# ------------------------------------------------------------------------------------------------------ groups of rows


def why_not_rows(args: GroupedArgs) -> str | None:
    """Why this kernel cannot run groups of rows; None if it can."""
    return grouping.why_not_rows(args) or grouping.why_not_without_scales(args)


def configure_rows(bucket: GroupedBucket, dtype: torch.dtype) -> Config | None:
    """Returns the choice for a batch of products of the expected rows; None for operands with scales."""
    return next(iter(candidates_rows(bucket, dtype)), None)


def candidates_rows(bucket: GroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the choices for a batch of products of the expected rows; clusters along M come last, as they pad each
    group to pairs of row tiles.
    """
    if bucket.scaling != UNSCALED:
        return ()
    problem = Problem(
        bucket.rows,
        bucket.N,
        bucket.K,
        out_bytes=bucket.out_bits // 8,
        gated=bool(bucket.gated),
        mn_major_b=bucket.layout in _MN_MAJOR_B,
        batch=max(1, bucket.G),
        sms=sm_count(),
    )
    return tuple(sorted(choices(problem), key=lambda config: config.cluster_m))


def gemm_rows(d: Tensor, args: GroupedArgs, config: Config, *, halves: bool = False) -> None:
    """Rows of each group of d = act(those of a @ b of the group); other rows of d stay as they are.

    halves: as in `dense_kernel.gemm`
    """
    if d.numel():
        product = plain_args(args.a, args.b, args.out_dtype, args.activation)
        gemm(d, product, config, grouping.groups_of_rows(args), halves=halves)


def launch_rows(outs: tuple[Tensor], args: GroupedArgs, config: Config) -> None:
    grouping.write_rows(outs[0], args, lambda d: gemm_rows(d, args, config))


for _op in (GROUPED, MASKED):
    register_kernel(
        _op,
        configure=configure_rows,
        config_type=Config,
        configs=CONFIGS,
        candidates=candidates_rows,
        why_not=why_not_rows,
    )(launch_rows)

# ------------------------------------------------------------------------------------------------------ groups along K


def why_not_along_k(args: KGroupedArgs) -> str | None:
    """Why this kernel cannot run groups along K; None if it can."""
    return grouping.why_not_along_k(args) or grouping.why_not_without_scales(args)


def configure_along_k(bucket: KGroupedBucket, dtype: torch.dtype) -> Config | None:
    """Returns the choice for a batch of products with equal shares of K; None for operands with scales."""
    return choose(_problem_along_k(bucket)) if bucket.scaling == UNSCALED else None


def candidates_along_k(bucket: KGroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the choices for a batch of products with equal shares of K."""
    return choices(_problem_along_k(bucket)) if bucket.scaling == UNSCALED else ()


def _problem_along_k(bucket: KGroupedBucket) -> Problem:
    groups = max(1, bucket.G)
    return Problem(
        bucket.M,
        bucket.N,
        max(1, bucket.T // groups),
        out_bytes=bucket.out_bits // 8,
        mn_major_b=bucket.layout in _MN_MAJOR_B,
        batch=groups,
        sms=sm_count(),
    )


def gemm_along_k(d: Tensor, args: KGroupedArgs, config: Config) -> None:
    """d[g] = the product of group g + c[g]."""
    if not grouping.is_done_along_k(d, args):
        product = plain_args(args.a[None], args.b[None], args.out_dtype)._replace(c=args.c)
        gemm(d, product, config, grouping.groups_along_k(args))


@register_kernel(
    K_GROUPED,
    configure=configure_along_k,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates_along_k,
    why_not=why_not_along_k,
)
def launch_along_k(outs: tuple[Tensor], args: KGroupedArgs, config: Config) -> None:
    gemm_along_k(outs[0], args, config)
