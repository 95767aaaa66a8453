"""fmha in cuTile, forward and backward: `engines/cutile_forward.py` and `engines/cutile_backward.py`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.fmha import raw
from tilewright.ops.attention.kernels.cutile import backward as cutile_backward
from tilewright.ops.attention.kernels.cutile import forward as cutile_forward


def _why_not(*args: Any) -> str | None:
    return _why_not_operands(raw.FORWARD.bucket_of(args, "default"), args[0], args[2])


def _why_not_backward(*args: Any) -> str | None:
    return _why_not_operands(raw.BACKWARD.bucket_of(args, "default"), args[2], args[4])


def _why_not_operands(bucket: Sequence[int], q: Tensor, v: Tensor) -> str | None:
    return raw.why_not_band(bucket) or raw.why_not_addressable(bucket) or cutile_forward.why_not(q, v)


@register_impl(
    "fmha",
    backend="cutile",
    configure=cutile_forward.configure,
    config_type=cutile_forward.Config,
    configs=cutile_forward.CONFIGS,
    candidates=cutile_forward.candidates,
    supports=_why_not,
)
def launch(outs: tuple[Tensor, Tensor], *args: Any, config: cutile_forward.Config) -> None:
    """See `raw.FORWARD`."""
    cutile_forward.forward(*outs, *args, config)


@register_impl(
    "fmha",
    backend="cutile",
    direction="bwd",
    configure=cutile_backward.configure,
    config_type=cutile_backward.Config,
    configs=cutile_backward.CONFIGS,
    candidates=cutile_backward.candidates,
    supports=_why_not_backward,
)
def launch_backward(outs: tuple[Tensor, Tensor, Tensor, Tensor], *args: Any, config: cutile_backward.Config) -> None:
    """See `raw.BACKWARD`."""
    cutile_backward.backward(*outs, *args, config)
