"""Products of e4m3 operands with scales for Hopper: scaled_matmul and scaled_matmul_fp8, and with groups
grouped_matmul, masked_matmul and k_grouped_matmul.  This module chooses the tile by `fp8_cost_model.py`, of
at most 512 rows by `middle_cost.py`; `fp8_kernel.py` launches it.

Few rows go to `few_rows_scaled.py`.  An e4m3 result: 128 results of a row and their scale are computed from the
accumulators, so the float32 result is never stored: 1 + 1/32 bytes an element are written instead of 4, and no second
launch reads them.  Groups are those of `dense.py`; along K they end at multiples of 128.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from tilewright import settings
from tilewright.dispatch import register_kernel
from tilewright.log import log_once
from tilewright.ops.gemm.dense.args import GATED, SEPARATE
from tilewright.ops.gemm.grouped.args import UNSCALED, GroupedArgs, GroupedBucket, KGroupedArgs, KGroupedBucket
from tilewright.ops.gemm.grouped_matmul import FORWARD as GROUPED
from tilewright.ops.gemm.k_grouped_matmul import FORWARD as K_GROUPED
from tilewright.ops.gemm.kernels.sm90 import cost_model, fp8_cost_model, grouping, middle_cost
from tilewright.ops.gemm.kernels.sm90.dense import sm_count
from tilewright.ops.gemm.kernels.sm90.fp8_cost_model import Problem, Tile
from tilewright.ops.gemm.kernels.sm90.fp8_kernel import Config, gemm, gemm_fp8, shared_bytes, waves
from tilewright.ops.gemm.kernels.sm90.operands import why_not_machine, why_not_scaled
from tilewright.ops.gemm.masked_matmul import FORWARD as MASKED
from tilewright.ops.gemm.operands import columns_out
from tilewright.ops.gemm.scaled.args import (
    ScaledBucket,
    ScaledMatmulArgs,
    ScaledMatmulFp8Args,
    as_batch,
    plain_scaled_args,
    with_result,
)
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.gemm.scaled_matmul import FORWARD as SCALED
from tilewright.ops.gemm.scaled_matmul_fp8 import FORWARD as SCALED_FP8

_SHARED = 232448 - 1024  # bytes a block may have, without its barriers
_MAX_STAGES = 8

# ------------------------------------------------------------------------------------------------------- what to choose


def _tiles(widths: dict[int, tuple[int, ...]]) -> tuple[Tile, ...]:
    return tuple(Tile(m, n) for m, columns in widths.items() for n in columns)


TILES = _tiles({64: (32, 64, 96, 128), 128: (64, 96, 128, 192), 192: (96, 128), 256: (128,)})
"""All tiles to choose from.  No shape was fastest with columns of 112, 144, 160, 176 or 256, or with a cluster."""

TILES_BY_TOKEN = (*TILES, *_tiles({256: (96, 112)}))
"""All tiles if columns have a scale each: tiles of 256 rows read them for two waves at once."""

TILES_FP8 = _tiles({64: (128, 256), 128: (128, 256), 256: (128,)})
"""All tiles for e4m3 results, whose columns are whole blocks of scales: 256 columns of op(B) if gated."""

SPLITS = middle_cost.splits(
    {64: (64, 96, 128, 256), 128: (64, 96, 128, 192, 256), 192: (96, 128)}, ((1, 1), (2, 1), (1, 2))
)
"""Tiles whose K is split, for products of at most `middle_cost.MAX_ROWS` rows whose result is not e4m3."""


def choose(problem: Problem) -> Config:
    """Returns the config of the least predicted time."""
    config = _choose(problem)
    if settings.current().print_configs:
        prediction = fp8_cost_model.predict(problem, tile_of(config))
        log_once(("fp8", problem), f"fp8 GEMM {problem}: {config}, {prediction}", logging.WARNING)
    return config


@cache
def _choose(problem: Problem) -> Config:
    return config_of(fp8_cost_model.rank(problem, _legal(problem))[0][0], problem)


def choose_middle(problem: Problem) -> Config:
    """Returns the config of the least predicted time for few rows, K split or not."""
    config = _choose_middle(problem)
    if settings.current().print_configs:
        us = middle_cost.predicted_us(_plain(problem), tile_of(config))
        log_once(("fp8", problem), f"fp8 GEMM {problem}: {config}, {us:.1f} us predicted", logging.WARNING)
    return config


@cache
def _choose_middle(problem: Problem) -> Config:
    return config_of(rank_middle(problem)[0], problem)


def rank_middle(problem: Problem) -> list[Tile]:
    """Sorts the tiles that fit, with and without a split of K, the least predicted time first."""
    plain = _plain(problem)
    splits = (
        tile for tile in SPLITS if middle_cost.fits(plain, tile) and (not problem.gated or tile.block_n % 32 == 0)
    )
    return middle_cost.rank(plain, (*_legal(problem), *splits))


def _plain(problem: Problem) -> cost_model.Problem:
    p = problem
    return cost_model.Problem(p.m, p.n, p.k, 1, p.out_bytes, p.gated, batch=p.batch, sms=p.sms)


def _is_middle(problem: Problem) -> bool:
    return problem.m <= middle_cost.MAX_ROWS and problem.out_bytes > 1


def choices(problem: Problem) -> tuple[Config, ...]:
    """Returns the configs of the six tiles of the least predicted time, each with several group_m."""
    configs = []
    for tile, _ in fp8_cost_model.rank(problem, _legal(problem))[:6]:
        config = config_of(tile, problem)
        configs += [config, *(config._replace(group_m=rows) for rows in (4, 8, 16) if rows != config.group_m)]
    return tuple(configs)


def _legal(problem: Problem) -> tuple[Tile, ...]:
    """Returns the tiles that fit: gated ones write whole strips of 32 bytes, or a block of scales.  With two waves of
    rows there are no registers for row scales in the epilogue.
    """
    quantised = problem.out_bytes == 1
    unquantised = TILES_BY_TOKEN if problem.scaling == Scaling.TOKEN_TOKEN and not problem.added else TILES
    return tuple(
        tile
        for tile in (TILES_FP8 if quantised else unquantised)
        if not problem.gated or tile.block_n % (256 if quantised else 32) == 0
        if problem.scaling != Scaling.ROW or waves(tile.block_m) == 1
    )


def config_of(tile: Tile, problem: Problem) -> Config:
    """Returns the config of a tile: as many stages as fit, and the order of tiles."""
    shared = {"cluster_m": tile.cluster_m, "cluster_n": tile.cluster_n, "split": tile.split}
    config = Config(tile.block_m, tile.block_n, stages=0, group_m=0, **shared)
    fixed = shared_bytes(config, problem.scaling)
    stages = (_SHARED - fixed) // (shared_bytes(config._replace(stages=1), problem.scaling) - fixed)
    return config._replace(stages=min(_MAX_STAGES, stages), group_m=fp8_cost_model.group_m(tile, problem.sms))


def tile_of(config: Config) -> Tile:
    """Returns the tile of a config."""
    return Tile(config.block_m, config.block_n, config.cluster_m, config.cluster_n, config.split)


def _configs(out_bytes: int) -> tuple[Config, ...]:
    problems = [Problem(1, 1, 1, out_bytes, scaling=scaling, sms=132) for scaling in range(4)]
    splits = SPLITS if out_bytes > 1 else ()
    return tuple(
        dict.fromkeys(config_of(tile, problem) for problem in problems for tile in (*_legal(problem), *splits))
    )


CONFIGS: tuple[Config, ...] = _configs(2)
"""Every config that `choose` and `choose_middle` can return on a GPU of 132 multiprocessors."""

CONFIGS_FP8: tuple[Config, ...] = _configs(1)
"""Every config of `gemm_fp8` on a GPU of 132 multiprocessors."""

# ------------------------------------------------------------------------------------------------------ single products


def why_not(args: ScaledMatmulArgs) -> str | None:
    """Why this kernel cannot run a scaled product; None if it can."""
    a, b, scale_a, scale_b, bias, c, _, activation, out_dtype = args
    return why_not_machine(a) or why_not_scaled(a, b, scale_a, scale_b, bias, c, activation, out_dtype)


def why_not_fp8(args: ScaledMatmulFp8Args) -> str | None:
    """Why this kernel cannot run a scaled product with an e4m3 result; None if it can."""
    n_out = columns_out(args.b.shape[-1], args.activation)
    reason = why_not_machine(args.a)
    if reason is None and n_out % 16:
        reason = f"writes rows of multiples of 16 columns, got {n_out}"
    return reason or why_not(with_result(args, torch.bfloat16))


def configure(bucket: ScaledBucket, dtype: torch.dtype) -> Config:
    """Returns the tile of the least predicted time."""
    problem = _problem(bucket)
    return choose_middle(problem) if _is_middle(problem) else choose(problem)


def candidates(bucket: ScaledBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the six tiles of the least predicted time, each with several group_m; of few rows, also the sixteen of
    the least time with or without a split of K.
    """
    problem = _problem(bucket)
    middle = rank_middle(problem)[:16] if _is_middle(problem) else ()
    return tuple(dict.fromkeys((*(config_of(tile, problem) for tile in middle), *choices(problem))))


def _problem(bucket: ScaledBucket) -> Problem:
    return Problem(
        bucket.M,
        bucket.N,
        bucket.K,
        out_bytes=bucket.out_bits // 8,
        gated=bucket.epilogue == GATED,
        scaling=bucket.scaling,
        sms=sm_count(),
        added=bucket.epilogue == SEPARATE,
    )


@register_kernel(
    SCALED, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: ScaledMatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch("scaled_matmul", args), config)


@register_kernel(
    SCALED_FP8, configure=configure, config_type=Config, configs=CONFIGS_FP8, candidates=candidates, why_not=why_not_fp8
)
def launch_fp8(outs: tuple[Tensor, Tensor], args: ScaledMatmulFp8Args, config: Config) -> None:
    q, scales = outs
    gemm_fp8(q.unsqueeze(0), scales.unsqueeze(0), as_batch("scaled_matmul_fp8", with_result(args, q.dtype)), config)


# ------------------------------------------------------------------------------------------------------ groups of rows


def why_not_rows(args: GroupedArgs) -> str | None:
    """Why this kernel cannot run groups of rows; None if it can."""
    return grouping.why_not_rows(args) or grouping.why_not_with_scales(args)


def configure_rows(bucket: GroupedBucket, dtype: torch.dtype) -> Config | None:
    """Returns the choice for a batch of products of the expected rows; None for operands without scales."""
    return next(iter(candidates_rows(bucket, dtype)), None)


def candidates_rows(bucket: GroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the choices for a batch of products of the expected rows."""
    if bucket.scaling == UNSCALED:
        return ()
    return choices(
        Problem(
            bucket.rows,
            bucket.N,
            bucket.K,
            out_bytes=bucket.out_bits // 8,
            gated=bool(bucket.gated),
            scaling=bucket.scaling,
            batch=max(1, bucket.G),
            sms=sm_count(),
        )
    )


def gemm_rows(d: Tensor, args: GroupedArgs, config: Config) -> None:
    """Rows of each group of d = act(those of a @ b of the group); other rows of d stay as they are."""
    assert args.scale_a is not None, "see why_not_rows"
    assert args.scale_b is not None, "see why_not_rows"
    if d.numel():
        product = plain_scaled_args(args.a, args.b, args.scale_a, args.scale_b, args.out_dtype, args.activation)
        gemm(d, product, config, grouping.groups_of_rows(args))


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
    return grouping.why_not_along_k(args) or grouping.why_not_with_scales(args)


def configure_along_k(bucket: KGroupedBucket, dtype: torch.dtype) -> Config | None:
    """Returns the choice for a batch of products with equal shares of K; None for operands without scales."""
    return None if bucket.scaling == UNSCALED else choose(_problem_along_k(bucket))


def candidates_along_k(bucket: KGroupedBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the choices for a batch of products with equal shares of K."""
    return () if bucket.scaling == UNSCALED else choices(_problem_along_k(bucket))


def _problem_along_k(bucket: KGroupedBucket) -> Problem:
    groups = max(1, bucket.G)
    return Problem(
        bucket.M,
        bucket.N,
        max(1, bucket.T // groups),
        out_bytes=bucket.out_bits // 8,
        scaling=bucket.scaling,
        batch=groups,
        sms=sm_count(),
        added=True,  # mostly, and the bucket does not say
    )


def gemm_along_k(d: Tensor, args: KGroupedArgs, config: Config) -> None:
    """d[g] = the product of group g + c[g]."""
    assert args.scale_a is not None, "see why_not_along_k"
    assert args.scale_b is not None, "see why_not_along_k"
    if grouping.is_done_along_k(d, args):
        return
    operands = (args.a[None], args.b[None], args.scale_a[None], args.scale_b[None])
    product = plain_scaled_args(*operands, args.out_dtype)._replace(c=args.c)
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
