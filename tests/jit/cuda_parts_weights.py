"""Instances of the products by weights of few bits, and what finds the parameters of a launch."""

from collections.abc import Callable
from typing import Any

import torch

from tilewright.jit.collect import collect
from tilewright.ops.gemm.operands import columns_out
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import block_weights, weight_only_model
from tilewright.ops.weight_only.kernels.sm90 import weight_only_matmul as weight_only
from tilewright.ops.weight_only.weight_only_matmul import WeightOnlyMatmulArgs


def launched(call: Callable[[], None]) -> Any:
    """Parameters of the one kernel that `call` would launch."""
    with collect("sm_90") as collector:
        call()
    (job,) = collector.jobs
    return job.key[2]  # type: ignore[index]


def integer_weights(bits: int, shape: tuple[int, ...], activation: str = "") -> Any:
    """Parameters of the weight-only product.  shape: tokens, tiles, warps, split, blocks a multiprocessor."""
    q = torch.empty(512, 2048 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    x, d = (
        torch.empty(8, 2048, dtype=torch.bfloat16),
        torch.empty(8, columns_out(512, activation), dtype=torch.bfloat16),
    )
    scales = packing.layout(torch.bfloat16).empty(512, 2048, "cpu")
    config = weight_only_model.deepest(bits, *shape)
    args = WeightOnlyMatmulArgs(x, q, scales, None, activation, torch.bfloat16)
    return launched(lambda: weight_only.launch((d,), args, config))


def block_weights_of(form: int, tokens: int) -> block_weights.Params:
    """Parameters of the product by weights in registers.   form: of the weight."""
    dtypes = (torch.bfloat16,) * 4
    return block_weights.Params(form, tokens, *block_weights.CONFIGS[tokens // 8 - 1], *dtypes)


WEIGHTS: list[tuple[Any, Any, dict[str, int]]] = [
    (weight_only.KERNEL, integer_weights(8, (8, 2, 4, 4, 2)), {"HMMA": 16, "UTMALDG": 4}),
    (weight_only.KERNEL, integer_weights(4, (64, 2, 4, 1, 1), "swiglu"), {"HMMA": 128, "UTMALDG": 6}),
    (block_weights.KERNEL, block_weights_of(block_weights.INT4, 8), {"HMMA": 8}),
    (block_weights.KERNEL, block_weights_of(block_weights.MXFP4, 16), {"HMMA": 64}),
    (block_weights.KERNEL, block_weights_of(block_weights.NVFP4, 8), {"HMMA": 8}),
    (block_weights.KERNEL, block_weights_of(block_weights.MXFP8, 8), {"HMMA": 8}),
]
