"""Dense products in cuTile, matmul and bmm of bf16, fp16 and float8_e4m3: choice of tiles, and the launch.

A persistent kernel: one block for each SM, with tileiras' warp-specialized pipeline.  `dense_kernel.py` has the
kernel and its epilogue.  float8 operands accumulate as in torch._scaled_mm with use_fast_accum, in the tensor cores,
which keep 14 bits; without `fast_acc` each k block is added in float32.

Traffic of a perfect kernel: (M*K + K*N) * itemsize + M*N*itemsize_out; 2*M*N*K flops: 8192^3 in bf16 cannot beat
1.1 ms at 989 TFLOP/s.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.sm_budget import usable_sms
from tilewright.jit.cutile_launch import Hints
from tilewright.ops.gemm.bmm import FORWARD as BMM
from tilewright.ops.gemm.dense.args import BmmBucket, MatmulArgs, MatmulBucket, as_batch
from tilewright.ops.gemm.kernels.cutile.dense_kernel import kernel
from tilewright.ops.gemm.matmul import FORWARD as MATMUL
from tilewright.ops.gemm.operands import ACTIVATIONS, FP8, LAYOUTS, VECTOR, Major, major_a, major_b

DTYPES = (torch.bfloat16, torch.float16, FP8)
SMS = 132  # of the GPU that the rule below was measured on; the launch reads the real number
FEW_ROWS = 64
BYTES_K = 128  # of a tile along K: one swizzled row of shared memory


class Config(NamedTuple):
    """A tile of the result, and how blocks order and store the tiles."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int  # math warps, 4 or 8; 4 more warps load
    group_m: int = 8  # rows of tiles in a group of the tile order
    swap: bool = False  # multiply the transposed operands: M of an instruction is 64, N a multiple of 8
    slice_n: int = 0  # columns stored at once from registers; 0: the whole tile, by TMA
    occupancy: int = 1  # blocks that share an SM
    fast_acc: bool = False  # float8: accumulate in the tensor cores


class Tile(NamedTuple):
    """A tile for 2-byte operands, and the share of the best tile's speed that it reaches when every SM has one."""

    block_m: int
    block_n: int
    num_warps: int
    speed: float


# H200, persistent, bf16, B K-major, 8192^3: 707, 683 and 663 TFLOP/s of one run.  128x256 with 4 warps spills 1.8 KB;
# 128x128 with 8 loses 30 %.  The smaller ones are estimates, from the bytes that they read for each flop.
TILES = (
    Tile(128, 256, 8, 1.0),
    Tile(256, 128, 8, 0.96),
    Tile(128, 128, 4, 0.94),
    Tile(64, 256, 4, 0.80),
    Tile(128, 64, 4, 0.72),
    Tile(64, 64, 4, 0.55),
)
# (block_m, block_n, num_warps, occupancy, bytes of a tile along K) of the search, without what spills on sm_90
SPACE = (
    (128, 256, 8, 1, (64, 128)),
    (256, 128, 8, 1, (64, 128)),
    (128, 128, 4, 1, (128, 256)),
    (128, 128, 8, 1, (64, 128, 256)),
    (64, 256, 4, 1, (128,)),
    (64, 256, 8, 1, (128, 256)),
    (256, 64, 8, 1, (128,)),
    (128, 64, 4, 1, (128, 256)),
    (128, 64, 4, 2, (128,)),
    (64, 128, 4, 1, (128, 256)),
    (64, 64, 4, 1, (128, 256)),
    (64, 64, 4, 2, (128,)),
)
FAST_K = 8192  # beyond it 14 bits are too few: at 16384 the error is twice what bf16 results allow
SLOW_TILE = Tile(128, 128, 8, 1.0)  # without fast_acc, two accumulators
# float8 operands that are not K-major pass through registers: larger tiles spill
FP8_TILES = {"nn": Tile(128, 128, 8, 1.0), "tn": Tile(64, 64, 4, 1.0), "tt": Tile(128, 128, 8, 1.0)}


def configure(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> Config:
    """Returns the tile that finishes first if each wave of tiles costs its area over its speed."""
    m, n, k, layout, aligned = bucket.M, bucket.N, bucket.K, bucket.layout, bucket.aligned
    fp8 = dtype == FP8
    fast = fp8 and k <= FAST_K
    block_k = BYTES_K // dtype.itemsize
    if not aligned:  # element by element through registers: larger tiles spill
        return Config(64, 64, 32, 4, fast_acc=fast) if fp8 else Config(128, 64, 64, 8)
    fixed = FP8_TILES.get(LAYOUTS[layout], None if fast else SLOW_TILE) if fp8 else None
    if fixed is None and m <= FEW_ROWS:  # bound by the bytes of b in flight
        block_n = 128 if -(-n // 128) >= SMS else 64
        return Config(max(16, m), block_n, 2 * block_k, 4, swap=m < FEW_ROWS, fast_acc=fast)
    tile = fixed or min(TILES, key=lambda t: _waves(t, m, n) * _area(t) / t.speed)
    return Config(
        tile.block_m, tile.block_n, block_k, tile.num_warps, slice_n=_slice(tile, bucket.out_bits), fast_acc=fast
    )


def _waves(tile: Tile, m: int, n: int) -> int:
    return -(-(-(-m // tile.block_m) * -(-n // tile.block_n)) // SMS)


def _area(tile: Tile | Config) -> int:
    return tile.block_m * tile.block_n


def _slice(tile: Tile, out_bits: int) -> int:
    """Slices large float32 tiles: staging 128x256 would take the shared memory of two stages out of four."""
    return 64 if _area(tile) * out_bits >= 128 * 256 * 32 else 0


def _every_config() -> tuple[Config, ...]:
    """Returns every result of `configure`, over a grid of buckets."""
    shapes = [(m, n) for m in (16, 32, 64, 128, 256, 1024, 4096) for n in (64, 576, 2112, 4096, 7168, 24576)]
    return tuple(
        dict.fromkeys(
            configure(MatmulBucket(m, n, k, layout, aligned, bits, 0), dtype)
            for dtype, k in ((torch.bfloat16, 4096), (FP8, 4096), (FP8, 2 * FAST_K))
            for layout in range(len(LAYOUTS))
            for aligned in (1, 0)
            for bits in (16, 32)
            for m, n in shapes
        )
    )


CONFIGS = _every_config()


def candidates(bucket: MatmulBucket | BmmBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns `SPACE`, and the widest tile with several group_m; for few rows every width and depth, swapped or not."""
    m, n, k, layout, aligned = bucket.M, bucket.N, bucket.K, bucket.layout, bucket.aligned
    fp8 = dtype == FP8
    step = BYTES_K // dtype.itemsize
    if not aligned or (fp8 and LAYOUTS[layout] != "nt"):
        return ()
    if m <= FEW_ROWS:
        return tuple(
            Config(max(16, m), columns, block_k, warps, swap=swap, fast_acc=fp8 and k <= FAST_K)
            for columns, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
            for block_k in (step, 2 * step)
            for swap in (True, False)
            if columns <= 128 or (swap and block_k == step)
        )
    configs = [
        Config(block_m, block_n, bytes_k // dtype.itemsize, warps, occupancy=occupancy, fast_acc=fp8 and k <= FAST_K)
        for block_m, block_n, warps, occupancy, depths in SPACE
        for bytes_k in depths
    ]
    best = configs[1]  # 128x256, one swizzled row along K
    configs += [best._replace(slice_n=64), *(best._replace(group_m=rows) for rows in (4, 16, 32))]
    return tuple(c for c in configs if c.block_n <= 2 * n)


def why_not(args: MatmulArgs) -> str | None:
    """Why this kernel cannot run these arguments, by dtype alone; None if it can."""
    if args.a.dtype in DTYPES:
        return None
    return f"multiplies bfloat16, float16 and float8_e4m3fn, given {args.a.dtype}"


def gemm(d: Tensor, args: MatmulArgs, config: Config) -> None:
    """d = act(alpha * scale * a @ b + bias) + c, of any strides with a unit one among the last two of a and b.

    d: (B, M, N_out), contiguous along N_out; a: (B, M, K); b: (B, K, N); c: (B, M, N_out), may be d.
    """
    a, b, bias, c, scale, alpha, activation, _ = args
    batch, m, _ = a.shape
    n = b.shape[2]
    a_transposed, b_transposed = major_a(a) is Major.MN, major_b(b) is Major.K
    use_tma = d.shape[2] * d.element_size() % VECTOR == 0  # TMA writes multiples of 16 bytes
    whole_tile = c is not None or not config.slice_n  # c would be read without TMA too, which spills
    tiles = batch * -(-m // config.block_m) * -(-n // config.block_n)
    kernel(
        (min(tiles, config.occupancy * max(1, usable_sms(d.device))),),
        (
            d,
            a.mT if a_transposed else a,
            b.mT if b_transposed else b,
            d if bias is None else bias,
            d if c is None else c,
            d if scale is None else scale.reshape(1),
            float(alpha),
            config.group_m,
        ),
        (
            a_transposed, b_transposed, bias is not None, c is not None, scale is not None,
            ACTIVATIONS.index(activation),
            config.fast_acc, config.swap, use_tma, *config[:3], config.block_n if whole_tile else config.slice_n,
        ),
        Hints(config.num_warps, config.occupancy if config.occupancy > 1 else None),
    )  # fmt: skip


@register_kernel(
    MATMUL, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0].unsqueeze(0), as_batch(args), config)


@register_kernel(BMM, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not)
def launch_batch(outs: tuple[Tensor], args: MatmulArgs, config: Config) -> None:
    gemm(outs[0], args, config)
