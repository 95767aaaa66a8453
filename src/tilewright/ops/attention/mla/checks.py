"""Checks of `mla`'s arguments before anything is launched."""

from typing import Any

from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention import checks
from tilewright.ops.attention.mla.args import MlaArgs

NAMES = ("q", "q_pe", "k", "k_pe", "v")


def check_dimensions(*tensors: Any) -> None:
    """Five tensors of four dimensions each."""
    q, q_pe, k, k_pe, v = tensors
    checks.check_heads("mla", q, k, v)
    for name, t in (("q_pe", q_pe), ("k_pe", k_pe)):
        if not isinstance(t, Tensor):
            raise InputError(f"mla: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dim() != 4:
            raise InputError(
                f"mla: {name} is {tuple(t.shape)}; needs (B, H, S, D_pe), or (B, S, H, D_pe) with layout='BSHD'; "
                "H of k_pe is 1."
            )


def check(args: MlaArgs) -> None:
    """Raises InputError for raw arguments that cannot run."""
    q, q_pe, k, k_pe, v = args.q, args.q_pe, args.k, args.k_pe, args.v
    check_dimensions(q, q_pe, k, k_pe, v)
    checks.check_raw("mla", args.without_rope)
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(NAMES, (q, q_pe, k, k_pe, v), strict=True))
    if q.shape[1] != k.shape[1]:
        raise InputError(f"mla: {shapes} as (B, H, S, D); q, k and v must have one number of heads.")
    if q_pe.shape[:3] != q.shape[:3]:
        raise InputError(f"mla: {shapes} as (B, H, S, D); q_pe must be as q but for D.")
    if k_pe.shape[:3] != (k.shape[0], 1, k.shape[2]):
        raise InputError(f"mla: {shapes} as (B, H, S, D); k_pe must be as k but for D, and have one head.")
    if q_pe.shape[3] != k_pe.shape[3] or q_pe.shape[3] == 0:
        raise InputError(f"mla: {shapes} as (B, H, S, D); q_pe and k_pe must agree in D_pe, which is at least 1.")
    for name, t in (("q_pe", q_pe), ("k_pe", k_pe)):
        if t.dtype != q.dtype or t.device != q.device:
            raise InputError(f"mla: {name} is {t.dtype} on {t.device}, q {q.dtype} on {q.device}; they must agree.")
        if t.stride(-1) != 1:
            raise InputError(f"mla: {name} has another last stride than 1. Call .contiguous().")
