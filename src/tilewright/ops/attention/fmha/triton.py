"""fmha in Triton, both directions: `engines/triton_forward.py` and `engines/triton_backward.py`."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.jit.tape import scratch
from tilewright.ops.attention.kernels.triton import backward as triton_backward
from tilewright.ops.attention.kernels.triton import forward as triton_forward
from tilewright.ops.attention.kernels.triton.delta import delta, sink_gradient
from tilewright.ops.attention.kernels.triton.tiles import Config


@register_impl(
    "fmha",
    backend="triton",
    configure=triton_forward.configure,
    config_type=Config,
    configs=triton_forward.CONFIGS,
    candidates=triton_forward.candidates,
    supports=triton_forward.why_not,
)
def launch(outs: tuple[Tensor, Tensor], *args: Any, config: Config) -> None:
    """See `raw.FORWARD`."""
    triton_forward.forward(*outs, *args, config)


@register_impl(
    "fmha",
    backend="triton",
    direction="bwd",
    configure=triton_backward.configure,
    config_type=triton_backward.Config,
    configs=triton_backward.CONFIGS,
    candidates=triton_backward.candidates,
    supports=triton_backward.why_not,
)
def launch_backward(
    outs: tuple[Tensor, Tensor, Tensor, Tensor],
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *rest: Any,
    config: triton_backward.Config,
) -> None:
    """See `raw.BACKWARD`."""
    *gradients, dsinks = outs
    row_delta = scratch(tuple(lse.shape), torch.float32, lse.device)
    # Of sums over all queries, which may cancel: delta holds the rounding of o
    means = None if sinks is None else scratch(tuple(lse.shape), torch.float32, lse.device)
    delta(row_delta, do, o, dlse)
    triton_backward.backward(*gradients, do, row_delta, q, k, v, lse, sinks, *rest, config, means=means)
    if sinks is not None:
        assert means is not None
        sink_gradient(dsinks, means, lse, sinks, dlse)
