"""Gates for the ops that quantise: values whose groups of 128 differ in magnitude."""

import torch


def problem(shape, dtype, device="cpu"):
    """Blocks of columns of very different size, so that every group has a scale of its own."""
    spans = torch.exp2(torch.randint(-6, 7, (-(-shape[-1] // 128),))).repeat_interleave(128)[: shape[-1]]
    return torch.randn(shape).to(device, dtype), (torch.randn(shape) * spans).to(device, dtype)
