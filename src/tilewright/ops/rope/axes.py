"""Tables of `ops.apply_rope` for tokens with a position on each of several axes, and positions of packed sequences.

Text has one position a token; a patch of an image has a row and a column, one of a video a time too.  Such a table
gives each pair of a head one axis: pair i rotates by positions[axes[i]] * inv_freq[i].  Nothing else differs, so the
table of any choice of axes goes into `apply_rope` and its kernels as any other.  Models differ in two things, which
pairs belong to which axis and which frequencies those have:

    mrope_table   text among images and videos: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V, PaddleOCR-VL
    axial_table   patches of an image: the vision towers of Qwen-VL, GLM-4V, Pixtral and Llama 4
    axes_table    any other, such as ERNIE 4.5 VL, whose text has rows and columns in turn, then times
Not HunYuan-VL: there the two elements of a pair may rotate by different angles.

    cos, sin = mrope_table(config, position_ids, mrope_interleaved=False, dtype=q.dtype)    # position_ids (3, B, S)
    q, k = ops.apply_rope(q, k, cos, sin)                                                  # q (B, H, S, D)

    cos, sin = axial_table(torch.stack((row, column)), head_dim)      # row, column (T,): patches of packed images
    q, k = ops.apply_rope(q, k, cos, sin)                             # q (T, H, D)

Tables are made on the device of the positions, in float32, then rounded to dtype; on a CPU they equal those of Hugging
Face's modules bit for bit.  They serve all layers of a step: make them before a CUDA graph is captured, since
frequencies and axes come from the host.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.rope.tables import frequencies, inverse_frequencies

INTEGERS = (torch.int32, torch.int64)


def axes_table(
    positions: Tensor,
    inv_freq: Tensor,
    axes: Sequence[int],
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (..., R): pair i rotates by positions[axes[i]] * inv_freq[i]; columns R/2 to R repeat 0 to R/2.

    positions: (A, ...) int32|int64, the position of every token on each of A axes; below 2^24, which float32 has.
    inv_freq: (R/2,) float32, radians a step.   axes: R/2 numbers from 0 to A - 1.
    attention_factor: times cos and sin, as `tables.frequencies` returns it.
    Raises InputError for other shapes and dtypes, and axes that do not exist.
    """
    if not isinstance(positions, Tensor) or positions.dim() < 2 or positions.dtype not in INTEGERS:
        got = (
            f"{tuple(positions.shape)} {positions.dtype}" if isinstance(positions, Tensor) else type(positions).__name__
        )
        raise InputError(f"rope: positions is {got}; needs (A, ...) int32 or int64, a row for each axis.")
    if inv_freq.shape != (len(axes),) or not set(axes) <= set(range(positions.shape[0])):
        raise InputError(
            f"rope: axes are {list(axes)}, inv_freq is {tuple(inv_freq.shape)}, positions {tuple(positions.shape)}; "
            f"needs an axis for each frequency, from 0 to {positions.shape[0] - 1}."
        )
    each = torch.tensor(axes, device=positions.device)
    angles = positions.float()[each].movedim(0, -1) * inv_freq.to(positions.device)
    cos, sin = ((t * attention_factor).to(dtype) for t in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def mrope_table(
    config: Any,
    positions: Tensor,
    *,
    mrope_interleaved: bool,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of multimodal RoPE, each (B, S, R), for positions (3, B, S): time, row and column of every token.

    config             a `RopeConfig` or Hugging Face's config of the text model, any rope_type of `tables`, with
                       rope_parameters["mrope_section"]: numbers of pairs, R/2 in all
    mrope_interleaved  False: sections follow each other, and section i belongs to axis i mod 3 (Qwen2-VL, Qwen2.5-VL,
                       GLM-4V).  True: time, row and column take turns until the sections of row and column are used up,
                       and time has the rest (Qwen3-VL, Qwen3.5).  A config does not always say which.
    length             as in `tables.rope_table`
    The pairs of GLM-4V's text are neighbours: apply_rope(..., interleaved=True) on the same table.
    Raises InputError without sections or for sections of another sum, and as `tables.frequencies` and `axes_table` do.
    """
    sections = config.rope_parameters.get("mrope_section")
    inv_freq, attention_factor = frequencies(config, length=length)
    pairs = len(inv_freq)
    if not sections or sum(sections) != pairs or (mrope_interleaved and len(sections) != 3):
        raise InputError(
            f"mrope_table: mrope_section is {sections}; needs numbers of pairs that sum to {pairs}, three of them if "
            "mrope_interleaved. Put them into config.rope_parameters."
        )
    if mrope_interleaved:
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs)]
    else:
        axes = [i % 3 for i, section in enumerate(sections) for _ in range(section)]
    return axes_table(positions, inv_freq, axes, attention_factor=attention_factor, dtype=dtype)


def axial_table(
    positions: Tensor,
    head_dim: int,
    *,
    base: float = 10_000.0,
    alternating: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of two axes that share a head, each (..., head_dim), for positions (2, ...): rows, then columns.

    The first half of the pairs belongs to axis 0, the second to axis 1.   head_dim: a multiple of 4.
    alternating  False: both axes have the frequencies of a head of head_dim / 2 (Qwen-VL, GLM-4V, Llama 4).
                 True: axis 0 has frequencies 0, 2, ... of a head of head_dim, and axis 1 1, 3, ... (Pixtral).
    Qwen-VL rotates in float32: give it float32 tables.   Llama 4 has neighbours as pairs, apply_rope(...,
    interleaved=True), columns before rows, counted from 1, and (0, 0) for its class token.
    Raises InputError for another head_dim, and as `axes_table` does.
    """
    if head_dim < 4 or head_dim % 4:
        raise InputError(f"axial_table: head_dim is {head_dim}; needs a multiple of 4, pairs for two axes.")
    if alternating:
        inv_freq = inverse_frequencies(head_dim, base)
        inv_freq = torch.cat((inv_freq[0::2], inv_freq[1::2]))
    else:
        inv_freq = inverse_frequencies(head_dim // 2, base).repeat(2)
    return axes_table(positions, inv_freq, [0] * (head_dim // 4) + [1] * (head_dim // 4), dtype=dtype)


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(T,) of cu_seqlens' dtype: the position of each of `tokens` tokens in its own sequence, for `apply_rope`.

    cu_seqlens: (N + 1,) int32|int64, where sequences begin, 0 first.   Tokens after the last sequence count from 0 too.
    Nothing is read on the host.   Raises InputError for another cu_seqlens.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INTEGERS or cu_seqlens.shape[0] == 0:
        raise InputError(
            f"packed_positions: cu_seqlens is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; needs (N + 1,) int32 or "
            "int64, the first one 0."
        )
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return token - cu_seqlens[sequence]
