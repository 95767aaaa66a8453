"""fmha in cuTile, forward: `engines/cutile_forward.py`."""

from typing import Any

from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.attention.engines import cutile_forward
from tilewright.ops.attention.fmha import raw


def _supports(*args: Any) -> str | None:
    q, _, v, *_ = args
    bucket = dict(zip(raw.BUCKET, raw.bucket(*args), strict=True))
    if bucket["mask"] == raw.PROGRAM:
        return "has causal masks and windows; others are programs, which triton evaluates"
    if not bucket["S_k"]:
        return "has no keys to read"
    if not bucket["aligned"]:
        return "needs addresses and strides of q, k and v that are multiples of 16 bytes"
    return cutile_forward.refusal(q, v)


@register_impl(
    "fmha",
    backend="cutile",
    configure=cutile_forward.configure,
    config_type=cutile_forward.Config,
    configs=cutile_forward.CONFIGS,
    candidates=cutile_forward.candidates,
    supports=_supports,
)
def launch(outs: tuple[Tensor, Tensor], *args: Any, config: cutile_forward.Config) -> None:
    """See `raw.FORWARD`."""
    cutile_forward.forward(*outs, *args, config)
