"""mla in CUDA C++ for Hopper, forward: the kernel of `fmha` with two more operands (`forward.py`).

q with q_pe and k with k_pe are joined in shared memory only.  At DeepSeek's widths the flops are 1.25 times those of
D = 128, 2560 cycles of the tensor cores for a tile of 128 queries and keys, with as many exponentials.
"""

import torch
from torch import Tensor

from tilewright.dispatch import register_kernel
from tilewright.ops.attention.kernels.sm90 import forward as fmha
from tilewright.ops.attention.kernels.sm90.forward import Config
from tilewright.ops.attention.mla import FORWARD
from tilewright.ops.attention.mla.args import MlaArgs, MlaBucket, bucket, of_fmha

_LATENT = (Config(2, 128, 2, 1, turns=False), Config(2, 128, 2, 1), Config(2, 112, 2, 1), Config(2, 96, 2, 2))
"""Tiles for 129 to 192 columns of q and k and at most 128 of v, as in DeepSeek: 128 keys are the most that fit."""

CONFIGS = tuple(dict.fromkeys((*_LATENT, *fmha.CONFIGS)))
"""Every config that `configure` and `candidates` can return."""


def candidates(bucket: MlaBucket, dtype: torch.dtype) -> tuple[Config, ...]:
    """Tiles that fit the registers and shared memory at these widths."""
    width = fmha.columns(bucket.D, bucket.D_pe)
    if 128 < width <= 192 and bucket.D_v <= 128:
        return _LATENT
    return fmha.candidates(of_fmha(bucket)._replace(D=width), dtype)


def configure(bucket: MlaBucket, dtype: torch.dtype) -> Config:
    """The tile by widths and kind of mask; batch and length are ignored, so that results do not depend on them."""
    return candidates(bucket, dtype)[0]


def why_not(args: MlaArgs) -> str | None:
    sizes = bucket(args)
    if not sizes.S_k:
        return "has no keys to read"
    if not sizes.aligned:
        return "needs addresses and strides of q, q_pe, k, k_pe and v that are multiples of 16 bytes"
    return fmha.why_not_operands(args.q, args.v, args.q_pe.shape[3])


@register_kernel(
    FORWARD, configure=configure, config_type=Config, configs=CONFIGS, candidates=candidates, why_not=why_not
)
def launch(outs: tuple[Tensor, Tensor], args: MlaArgs, config: Config) -> None:
    fmha.forward(outs, args.without_rope, config, pe=(args.q_pe, args.k_pe))
