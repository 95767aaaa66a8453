"""Few queries behind many keys, of `fmha`, `fmha_varlen` and `fmha_fp8`: the kernels of `fmha_decode`, which divide the
keys.

Traffic: the keys and values once for all queries of a sequence and all heads of a group; packed queries read those
that they see, each for itself.  27 sequences of one query over 30800 packed keys of 4 heads, D = 256, bf16: 126 MB,
29 us at 4.4 TB/s.  `paged/places.py` says what is launched beside them.

e4m3 is widened to float16 in registers, which holds each of its numbers; so probabilities are rounded to float16, not
to e4m3.  Scales are those of heads.  One query of 8 heads behind 65536 keys, D = 128: 134 MB, 31 us at 4.4 TB/s.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention import few_queries, fmha, fmha_fp8, fmha_varlen
from tilewright.ops.attention.arguments import FmhaArgs, VarlenArgs
from tilewright.ops.attention.bucket import FmhaBucket, VarlenBucket, forward_bucket, varlen_bucket
from tilewright.ops.attention.fmha_fp8.args import BLOCKS_K, BLOCKS_V, FmhaFp8Args, FmhaFp8Bucket
from tilewright.ops.attention.fmha_fp8.args import bucket as fp8_bucket
from tilewright.ops.attention.kernels.triton import fmha_decode
from tilewright.ops.attention.kernels.triton.paged import places
from tilewright.ops.attention.kernels.triton.paged.launch import Tile, why_not_widths
from tilewright.ops.attention.paged.args import HEAD_SCALES, PagedBucket

CONFIGS = fmha_decode.CONFIGS


def configure(bucket: FmhaBucket | VarlenBucket, dtype: torch.dtype) -> Tile | None:
    """The configuration of `fmha_decode` for the same problem over a cache."""
    return None if few_queries.why_not(bucket) else fmha_decode.configure(few_queries.as_paged(bucket), dtype)


def candidates(bucket: FmhaBucket | VarlenBucket, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The candidates of `fmha_decode`."""
    return () if few_queries.why_not(bucket) else fmha_decode.candidates(few_queries.as_paged(bucket), dtype)


def why_not(args: FmhaArgs | VarlenArgs) -> str | None:
    bucket = varlen_bucket(args) if isinstance(args, VarlenArgs) else forward_bucket(args)
    return few_queries.why_not(bucket) or why_not_widths(args.q, bucket.D, bucket.D_v)


@register_kernel(
    fmha.FORWARD,
    configure=configure,
    config_type=Tile,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
    batch_invariant=False,
)
@register_kernel(
    fmha_varlen.FORWARD,
    configure=configure,
    config_type=Tile,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaArgs | VarlenArgs, config: Tile) -> None:
    problem = places.begin(outs, args)
    fmha_decode.launch((problem.o, problem.lse), problem.args, config)
    places.end(outs, problem)


_ROWS = 32  # of a tile of unaligned keys: with 64 the kernel spills
FP8_CONFIGS = (
    *(Tile(m, 32, 4, 1) for m in (16, 32)),
    *(Tile(m, 128, 4, 3) for m in (16, 32, 64)),
    Tile(16, 64, 4, 3),
    *(Tile(m, 32, 8 if m == 64 else 4, 3) for m in (32, 64)),
)


def _why_not_fp8(sizes: FmhaFp8Bucket) -> str | None:
    if sizes.blocks & (BLOCKS_K | BLOCKS_V):
        return "has one scale for each head of keys and of values, not one for each 128 tokens"
    return few_queries.why_not(FmhaBucket(*sizes[:-1]))


def _as_paged(sizes: FmhaFp8Bucket) -> PagedBucket:
    """The bucket of the same problem over a cache in e4m3."""
    return few_queries.as_paged(FmhaBucket(*sizes[:-1]))._replace(cache=HEAD_SCALES)


def configure_fp8(sizes: FmhaFp8Bucket, dtype: torch.dtype) -> Tile | None:
    """Twice the keys of the tile of `fmha_decode`, as many bytes, where registers hold them.

    On an H200 (1, 8, 1 x 65536, 128) takes 54.4 us, 61.3 with as many keys; (16, 40/8, 5 x 1500, 128) 48.4 and 58.8;
    (1, 16/2, 1 x 32768, 256) 26.8 and 28.1.
    """
    if _why_not_fp8(sizes):
        return None
    tile = fmha_decode.configure(_as_paged(sizes), torch.float16)
    if not sizes.aligned:
        return tile._replace(block_m=min(tile.block_m, _ROWS))
    spills = max(sizes.D, sizes.D_v) > 128 and tile.block_m > 16
    return tile if spills else tile._replace(block_n=2 * tile.block_n)


def candidates_fp8(sizes: FmhaFp8Bucket, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The candidates of `fmha_decode`."""
    return () if _why_not_fp8(sizes) else fmha_decode.candidates(_as_paged(sizes), torch.float16)


def why_not_fp8(args: FmhaFp8Args) -> str | None:
    return _why_not_fp8(fp8_bucket(args)) or why_not_widths(args.q, args.q.shape[3], args.v.shape[3])


@register_kernel(
    fmha_fp8.FORWARD,
    configure=configure_fp8,
    config_type=Tile,
    configs=FP8_CONFIGS,
    candidates=candidates_fp8,
    why_not=why_not_fp8,
    batch_invariant=False,
)
def launch_fp8(outs: tuple[Tensor, Tensor], args: FmhaFp8Args, config: Tile) -> None:
    problem = places.begin(outs, args)
    scaled = problem.args._replace(k_scale=args.k_scale[..., 0], v_scale=args.v_scale[..., 0])
    fmha_decode.attend((problem.o, problem.lse), scaled, config, args.q_scale[..., 0])
    places.end(outs, problem)
