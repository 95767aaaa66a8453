"""torch's fused attention on a GPU: cuDNN and FLASH of 16 bits, EFFICIENT of float32, the backends of
scaled_dot_product_attention, through the calls that return lse too.  Memory is linear in S.  All load vectors of 16
bytes without checking addresses: tensors whose rows are not aligned are copied.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)

from tilewright.dispatch.bucket import hint
from tilewright.log import log_once
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.bucket import few_scores
from tilewright.ops.attention.layout import loadable

_aten = torch.ops.aten


class Kernels(NamedTuple):
    """forward: (o, lse) of a band.

    backward: (dq, dk, dv); also where sinks joined o and lse, because p = exp(s - lse) is all it needs.  It adds to dq
    in any order, so `numerics("deterministic")` does not call it.  None: the backward is the reference's own steps.
    """

    forward: Callable[[FmhaArgs], tuple[Tensor, Tensor]]
    backward: Callable[[FmhaBackwardArgs], tuple[Tensor, Tensor, Tensor]] | None


def kernels(args: FmhaArgs) -> Kernels | None:
    """cuDNN's, else FLASH's, of float32 EFFICIENT's, else None.  They have scores of scale * q k^T and nothing else;
    sinks only join the denominator.
    """
    q, k, v, left, right = args.q, args.k, args.v, args.left, args.right
    plain = args.slopes is None and args.softcap == 0.0 and not args.program
    if q.device.type != "cuda" or not plain or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    batch, heads, s_q, s_k = (hint(n) for n in (*q.shape[:3], k.shape[2]))
    full = left < 0 and right < 0
    if few_scores(batch * heads, s_q, s_k) or not batch * heads * s_q:
        return None
    # With fewer keys than queries a causal row may see no key, for which FLASH returns lse = +inf
    if not full and q.shape[2] > k.shape[2]:
        return None
    if q.dtype == torch.float32:  # of grouped heads and windows it has no kernel
        fills = batch * heads * -(-s_q // _ROWS) >= _TILES or s_k <= _SHORT
        fits = fills and (full or _causal(left, right)) and can_use_efficient_attention(_params(q, k, v, False))
        return EFFICIENT if fits else None
    # cuDNN's causal mask is top left, ours bottom right: they agree if S_q = S_k
    causal = _causal(left, right) and q.shape[2] == k.shape[2]
    if (full or causal) and can_use_cudnn_attention(_params(q, k, v, causal)) and _remembers(q, k, v, causal):
        return CUDNN
    if q.shape[3] % 8 == 0 and can_use_flash_attention(_params(q, k, v, False)):
        return FLASH
    return None


_ROWS, _TILES, _SHORT = 64, 64, 1024
"""EFFICIENT gives a tile of queries to one program, for all keys: how many tiles it gets, unless keys are few.  An
estimate.
"""
_SIGNATURES = 16
"""Signatures that cuDNN gets in a process.  torch builds a graph for each and never frees it: 1.6 to 1.9 MiB of host
memory and 40 ms (torch 2.11 on an H200, 1500 forwards).
"""
_given: set[tuple[Any, ...]] = set()


def _remembers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """True if torch has a cuDNN graph for such a call, or may build one."""
    if is_fake(q):
        return True
    shapes = [(t.shape, t.stride()) for t in (q, k, v)]
    signature = (q.device, q.dtype, causal, *shapes)
    if signature not in _given:
        if len(_given) >= _SIGNATURES:
            log_once(
                ("cudnn", "signatures"),
                f"attention: cuDNN has {_SIGNATURES} signatures; FLASH gets others",
                logging.INFO,
            )
            return False
        _given.add(signature)
    return True


def forget_signatures() -> None:
    """Let cuDNN have signatures as in a new process: for a program that measures more sizes than a process has."""
    _given.clear()


def _cudnn(args: FmhaArgs) -> tuple[Tensor, Tensor]:
    q, k, v = map(loadable, (args.q, args.k, args.v))
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, args.right == 0, scale=args.scale)
    return o, lse.squeeze(-1)


def _cudnn_backward(args: FmhaBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    do, q, k, v, o = map(loadable, (args.do, args.q, args.k, args.v, args.o))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the unused dropout
    sizes = (q.shape[2], k.shape[2])
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, args.lse[..., None], seed, seed, None, None, None, *sizes, 0.0, args.right == 0,
        scale=args.scale,
    )  # fmt: skip
    return dq, dk, dv


def _flash(args: FmhaArgs) -> tuple[Tensor, Tensor]:
    rows = [loadable(t).transpose(1, 2) for t in (args.q, args.k, args.v)]
    o, lse, *_ = _aten._flash_attention_forward(
        *rows, None, None, args.q.shape[2], args.k.shape[2], 0.0, _causal(args.left, args.right), False,
        scale=args.scale, **_window(args.left, args.right),
    )  # fmt: skip
    return o.transpose(1, 2), lse


def _flash_backward(args: FmhaBackwardArgs) -> tuple[Tensor, Tensor, Tensor]:
    rows = [loadable(t).transpose(1, 2) for t in (args.do, args.q, args.k, args.v, args.o)]
    seed = torch.zeros(2, dtype=torch.uint64, device=args.q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        *rows, args.lse, None, None, args.q.shape[2], args.k.shape[2], 0.0, _causal(args.left, args.right), seed,
        seed.new_empty(0), scale=args.scale, **_window(args.left, args.right),
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _efficient(args: FmhaArgs) -> tuple[Tensor, Tensor]:
    rows = [loadable(t).transpose(1, 2) for t in (args.q, args.k, args.v)]
    o, lse, *_ = _aten._efficient_attention_forward(
        *rows, None, None, None, None, None, 0.0, _BOTTOM_RIGHT if args.right == 0 else _NO_MASK, True,
        scale=args.scale,
    )  # fmt: skip
    return o.transpose(1, 2), lse[..., : args.q.shape[2]].contiguous()  # its rows are padded


_NO_MASK, _BOTTOM_RIGHT = 0, 2
"""EFFICIENT's masks: `CustomMaskType` of torch's source."""

CUDNN, FLASH = Kernels(_cudnn, _cudnn_backward), Kernels(_flash, _flash_backward)
EFFICIENT = Kernels(_efficient, None)
"""Its products are of three TF32 products each, so they have the precision of float32."""


def _params(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> SDPAParams:
    return SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])


def _causal(left: int, right: int) -> bool:
    return left < 0 and right == 0


def _window(left: int, right: int) -> dict[str, Any]:
    """FLASH's window arguments; none for a causal or a full mask."""
    if left < 0 and right <= 0:
        return {}
    return {"window_size_left": left, "window_size_right": right}
