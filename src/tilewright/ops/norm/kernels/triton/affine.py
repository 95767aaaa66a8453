"""Weight and bias of a norm, which may be absent."""

import triton
import triton.language as tl


@triton.jit
def load_weight(weight, offsets, mask):
    """Load weights in float32; None gives 1."""
    w = tl.full(offsets.shape, 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    return w


@triton.jit
def load_bias(bias, offsets, mask):
    """Load biases in float32; None gives 0."""
    b = tl.zeros(offsets.shape, tl.float32)
    if bias is not None:
        b = tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
    return b
