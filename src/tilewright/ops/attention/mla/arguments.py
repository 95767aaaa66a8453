"""Arguments of the raw op from those of a public call of `mla`."""

from typing import Any

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention import arguments
from tilewright.ops.attention.layout import readable
from tilewright.ops.attention.score import Scores

_PLAIN = Scores(0.0, None, None, ())


def raw_arguments(
    q: Tensor, q_pe: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, causal: bool, mask: Any, scale: float | None
) -> tuple[Any, ...]:
    """Arguments of the raw op for tensors that passed `check_dimensions`."""
    merged_mask = arguments.merged("mla", mask, causal)
    if merged_mask is not None and merged_mask.only_flex:
        raise InputError("mla: the mask is a BlockMask with a function of its own, which no kernel here can evaluate.")
    width = q.shape[3] + q_pe.shape[3]
    if scale is None:
        scale = float(width) ** -0.5 if width else 1.0
    q, k, v, _, _, data, program, left, right, scale, _ = arguments.raw_arguments(q, k, v, merged_mask, scale, _PLAIN)
    return q, readable(q_pe), k, readable(k_pe), v, data, program, left, right, scale
