"""mla in Triton, both directions: the kernels of fmha with a second pair of score operands.

q and q_pe, k and k_pe are never concatenated: the scores are the sum of two products, and k_pe is read once for all
heads that run together.  dk_pe is written per head in float32, 4 * B * H * S_k * D_pe bytes, then summed in a fixed
order.  A loop over the heads inside a key tile's program would need none of that memory, but leave S_k / 64 programs
per batch, too few for the GPU at the lengths of training.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.jit.tape import scratch
from tilewright.ops.attention.bucket import PROGRAM
from tilewright.ops.attention.kernels.triton import backward, forward
from tilewright.ops.attention.kernels.triton.delta import delta
from tilewright.ops.attention.kernels.triton.latent.head_sum import head_sum
from tilewright.ops.attention.kernels.triton.tiles import MOST_D, Config
from tilewright.ops.attention.mla import BACKWARD, FORWARD
from tilewright.ops.attention.mla.args import MlaArgs, MlaBackwardArgs, MlaBucket, of_fmha


def configure(bucket: MlaBucket, dtype: torch.dtype) -> Config:
    return forward.configure(of_fmha(bucket), dtype)


def candidates(bucket: MlaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    return forward.candidates(of_fmha(bucket), dtype)


def why_not(args: MlaArgs) -> str | None:
    if max(args.q.shape[3] + args.q_pe.shape[3], args.v.shape[3]) > MOST_D:
        return f"holds heads of up to {MOST_D} numbers, D + D_pe or D_v"
    return "has no keys to read" if args.k.shape[2] == 0 else None


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=forward.CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: MlaArgs, config: Config) -> None:
    forward.forward(outs, args.without_rope, config, pe=(args.q_pe, args.k_pe))


_KEYS = ((64, 64, 8, 2), (32, 128, 8, 2))
_QUERIES = ((128, 64, 8, 2), (64, 64, 8, 2))
"""Halves for DeepSeek's widths that compile without spills for sm_90, the first of each under every mask."""


def _latent(bucket: MlaBucket, dtype: torch.dtype) -> bool:
    """Are keys of 129 to 192 numbers and values of at most 128 copied, in 16 bits?"""
    return 128 < bucket.D + bucket.D_pe <= 192 and bucket.D_v <= 128 and bool(bucket.aligned) and dtype.itemsize == 2


def configure_backward(bucket: MlaBucket, dtype: torch.dtype) -> backward.Config:
    if _latent(bucket, dtype):
        return backward.Config(*_KEYS[0], *_QUERIES[0], True)
    return backward.configure(of_fmha(bucket), dtype)


def candidates_backward(bucket: MlaBucket, dtype: torch.dtype) -> tuple[backward.Config, ...]:
    if not _latent(bucket, dtype):
        return backward.candidates(of_fmha(bucket), dtype)
    settled = _KEYS[:1] if bucket.mask == PROGRAM else _KEYS
    return tuple(backward.Config(*k, *q, True) for k in settled for q in _QUERIES)


def why_not_backward(args: MlaBackwardArgs) -> str | None:
    return why_not(args.forward)


@register_kernel(
    BACKWARD,
    configure=configure_backward,
    config_type=backward.Config,
    configs=(backward.Config(*_KEYS[0], *_QUERIES[0], True), *backward.CONFIGS),
    candidates=candidates_backward,
    why_not=why_not_backward,
)
def launch_backward(outs: tuple[Tensor, ...], args: MlaBackwardArgs, config: backward.Config) -> None:
    dq, dq_pe, dk, dk_pe, dv = outs
    k, k_pe, lse = args.k, args.k_pe, args.lse
    row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
    dk_pe_per_head = scratch((*k.shape[:3], k_pe.shape[3]), torch.float32, k.device)
    delta(row_delta, args.do, args.o, args.dlse)
    pe = backward.Rope(args.q_pe, k_pe, dq_pe, dk_pe_per_head)
    backward.backward((dq, dk, dv), args.backward_of(args.forward.without_rope), row_delta, config, pe=pe)
    head_sum(dk_pe, dk_pe_per_head)
