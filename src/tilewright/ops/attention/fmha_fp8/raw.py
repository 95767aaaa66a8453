"""The raw op of `fmha_fp8`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import RawOp
from tilewright.dispatch.raw import OutputSpec
from tilewright.ops.attention.fmha import raw as fmha
from tilewright.ops.attention.fmha_fp8.plain import attention
from tilewright.ops.attention.layout import spec_like
from tilewright.ops.quant.numbers import E4M3

BUCKET = (*fmha.BUCKET, "blocks")
"""What a choice of kernel may depend on: as `fmha`, and the bits of `BLOCKS_*`."""

BLOCKS_Q, BLOCKS_K, BLOCKS_V = 1, 2, 4
"""Bits of `blocks` in a bucket: these scales change along the sequence."""


def bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    sinks: Tensor | None,
    mask_data: Tensor | None,
    program: str,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    out_dtype: torch.dtype,
) -> tuple[int, ...]:
    """The bucket of a call, named by `BUCKET`."""
    scales = {BLOCKS_Q: q_scale, BLOCKS_K: k_scale, BLOCKS_V: v_scale}
    blocks = sum(bit for bit, t in scales.items() if t.shape[2] > 1)
    return *fmha.bucket(q, k, v, sinks, None, mask_data, program, left, right, scale, softcap), blocks


def _outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[OutputSpec, ...]:
    """o lies as q does; lse is by head."""
    shape, _, strides = _lying(spec_like(q, v.shape[3]))
    return (shape, rest[-1], strides), (tuple(q.shape[:3]), torch.float32)


def _lying(spec: Sequence[Any]) -> tuple[Any, Any, Any]:
    shape, dtype, strides = spec
    return shape, dtype, strides


FORWARD = RawOp(
    "fmha_fp8",
    "fwd",
    "Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? sinks, Tensor? mask_data, "
    "str program, int left, int right, float scale, float softcap, ScalarType out_dtype",
    package="tilewright.ops.attention.fmha_fp8",
    outputs=_outputs,
    reference=attention,
    bucket=bucket,
    bucket_names=BUCKET,
    count=2,
    dtypes=(E4M3,),
)
