"""Few queries behind many keys, of `fmha` and `fmha_varlen`, in CUDA C++ for Hopper: the kernel of `fmha_decode`.

Traffic: the keys and values once for all queries of a sequence and all heads of a group, or for as many of these as a
row tile holds (32 at D = 64, 16 at 128, 8 at 256); packed queries read those that they see, each for itself.  Two
queries of eight heads behind 16384 keys of one, D = 64, bf16: 4.2 MB, 1 us at 4.4 TB/s.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.hardware.device import device_info
from tilewright.ops.attention import few_queries, fmha, fmha_varlen
from tilewright.ops.attention.arguments import FmhaArgs, VarlenArgs
from tilewright.ops.attention.bucket import FmhaBucket, VarlenBucket, forward_bucket, varlen_bucket
from tilewright.ops.attention.kernels.sm90 import decode
from tilewright.ops.attention.kernels.sm90 import decode_choice as choice
from tilewright.ops.attention.kernels.sm90.decode_choice import Config
from tilewright.ops.attention.kernels.triton.paged import places

CONFIGS = choice.configs()


def configure(bucket: FmhaBucket | VarlenBucket, dtype: torch.dtype) -> Config | None:
    """The configuration of `fmha_decode` for the same problem over a cache."""
    unable = few_queries.why_not_in_cuda(bucket, dtype) is not None
    return None if unable else choice.configure(few_queries.as_row_tiles(bucket), dtype)


def candidates(bucket: FmhaBucket | VarlenBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """The candidates of `fmha_decode`."""
    unable = few_queries.why_not_in_cuda(bucket, dtype) is not None
    return () if unable else choice.candidates(few_queries.as_row_tiles(bucket), dtype)


def why_not(args: FmhaArgs | VarlenArgs) -> str | None:
    arch = device_info(args.q.device).arch
    if arch != "sm_90":
        return f"is written for Hopper (sm_90), and this is {arch}"
    if args.q.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 or fp16, got {args.q.dtype}"
    bucket = varlen_bucket(args) if isinstance(args, VarlenArgs) else forward_bucket(args)
    return few_queries.why_not_in_cuda(bucket, args.q.dtype)


@register_kernel(
    fmha.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
    batch_invariant=False,
)
@register_kernel(
    fmha_varlen.FORWARD,
    configure=configure,
    config_type=Config,
    configs=CONFIGS,
    candidates=candidates,
    why_not=why_not,
    batch_invariant=False,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaArgs | VarlenArgs, config: Config) -> None:
    problem = places.begin(outs, args)
    decode.launch((problem.o, problem.lse), problem.args, config)
    places.end(outs, problem)
