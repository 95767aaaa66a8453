"""Few queries behind many keys, of `fmha` and `fmha_varlen`: the kernels of `fmha_decode`, which divide the keys.

Traffic: the keys and values once for all queries of a sequence and all heads of a group; packed queries read those
that they see, each for itself.  27 sequences of one query over 30800 packed keys of 4 heads, D = 256, bf16: 126 MB,
29 us at 4.4 TB/s.  `paged/places.py` says what is launched beside them.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention import few_queries, fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaArgs, VarlenArgs
from tilewright.ops.attention.bucket import FmhaBucket, VarlenBucket, forward_bucket, varlen_bucket
from tilewright.ops.attention.kernels.triton import fmha_decode
from tilewright.ops.attention.kernels.triton.paged import places
from tilewright.ops.attention.kernels.triton.paged.launch import Tile, why_not_widths

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
