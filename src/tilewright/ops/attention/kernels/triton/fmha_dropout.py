"""Attention with dropout in Triton: the kernels of `fmha`, which compute the mask of each tile in both directions.

Philox is 10 integer multiplications a score, in each of the three kernels that compute scores: that of the forward, and
those of dk and dv and of dq.  The flops and bytes are those of `fmha`.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.bucket import SOFTCAP, FmhaBucket
from tilewright.ops.attention.dropped import Dropout
from tilewright.ops.attention.fmha_dropout.args import FmhaDropoutArgs, FmhaDropoutBackwardArgs
from tilewright.ops.attention.fmha_dropout.raw_ops import BACKWARD, FORWARD
from tilewright.ops.attention.kernels.triton import backward, forward
from tilewright.ops.attention.kernels.triton.tiles import Config


def why_not(args: FmhaDropoutArgs | FmhaDropoutBackwardArgs) -> str | None:
    return forward.why_not_operands(args.q, args.k, args.v)


def _of_any(dropout: Dropout) -> Dropout | None:
    """None where nothing is dropped."""
    return None if dropout.last < 0 else dropout


def _with_terms(bucket: FmhaBucket) -> FmhaBucket:
    """The bucket under a softcap: it too needs registers beside the scores, and gets tiles that have them."""
    return bucket._replace(extras=bucket.extras | SOFTCAP)


def configure(bucket: FmhaBucket, dtype: torch.dtype) -> Config:
    return forward.configure(_with_terms(bucket), dtype)


def configure_backward(bucket: FmhaBucket, dtype: torch.dtype) -> backward.Config:
    """For sm_90 64 queries and 64 keys of 128 numbers spill 320 bytes for dk and dv, and 32 queries nothing.  Tiles of
    narrow heads in float32 spill too, so heads count as 64 numbers or more.
    """
    return backward.configure(_with_terms(bucket)._replace(D=max(bucket.D, 64)), dtype)


def candidates_backward(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[backward.Config, ...]:
    """Those of `fmha` with as many queries of a tile as have registers."""
    most = configure_backward(bucket, dtype).keys_m
    return tuple(config for config in backward.candidates(bucket, dtype) if config.keys_m <= most)


@register_kernel(
    FORWARD,
    configure=configure,
    config_type=Config,
    configs=forward.CONFIGS,
    candidates=forward.candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaDropoutArgs, config: Config) -> None:
    forward.forward(outs, args.fmha, config, dropout=_of_any(args.dropout))


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=backward.Config,
    configs=backward.CONFIGS,
    candidates=candidates_backward,
    why_not=why_not,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaDropoutBackwardArgs, config: backward.Config
) -> None:
    backward.with_delta(outs, args.fmha, config, _of_any(args.dropout))
