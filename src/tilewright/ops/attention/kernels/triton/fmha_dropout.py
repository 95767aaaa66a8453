"""Attention with dropout in Triton: the kernels of `fmha`, which compute the mask of each tile in both directions.

Philox is 10 integer multiplications a score, in each of the three kernels that compute scores: that of the forward, and
those of dk and dv and of dq.  The flops and bytes are those of `fmha`.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.bucket import FmhaBucket
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


@register_kernel(
    FORWARD,
    configure=forward.configure,
    config_type=Config,
    configs=forward.CONFIGS,
    candidates=forward.candidates,
    why_not=why_not,
)
def launch(outs: tuple[Tensor, Tensor], args: FmhaDropoutArgs, config: Config) -> None:
    forward.forward(outs, args.fmha, config, dropout=_of_any(args.dropout))


_QUERIES = 32
"""Queries of a tile for dk and dv, of heads of more than 64 numbers: twice as many spill 320 bytes for sm_90."""


def configure_backward(bucket: FmhaBucket, dtype: torch.dtype) -> backward.Config:
    """That of `fmha`, with registers for the words of Philox."""
    return _with_words(backward.configure(bucket, dtype)) if _is_wide(bucket) else backward.configure(bucket, dtype)


def candidates_backward(bucket: FmhaBucket, dtype: torch.dtype) -> tuple[backward.Config, ...]:
    found = backward.candidates(bucket, dtype)
    return tuple(dict.fromkeys(map(_with_words, found))) if _is_wide(bucket) else found


def _is_wide(bucket: FmhaBucket) -> bool:
    return max(bucket.D, bucket.D_v) > 64


def _with_words(config: backward.Config) -> backward.Config:
    return config._replace(keys_m=min(config.keys_m, _QUERIES))


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=backward.Config,
    configs=tuple(dict.fromkeys((*backward.CONFIGS, *map(_with_words, backward.CONFIGS)))),
    candidates=candidates_backward,
    why_not=why_not,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor, Tensor], args: FmhaDropoutBackwardArgs, config: backward.Config
) -> None:
    backward.with_delta(outs, args.fmha, config, _of_any(args.dropout))
