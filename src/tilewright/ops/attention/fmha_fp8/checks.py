"""What `fmha_fp8` refuses before anything is launched, in words."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention import checks
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args
from tilewright.ops.attention.fmha_fp8.rounding import SCALE_BLOCK
from tilewright.ops.quant.numbers import E4M3

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def check_dimensions(**tensors: Any) -> None:
    """q, k, v of four dimensions, in e4m3; their scales of two or three, in float32."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise InputError(f"fmha_fp8: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if name.endswith("_scale"):
            if t.dim() not in (2, 3):
                raise InputError(
                    f"fmha_fp8: {name} is {tuple(t.shape)}; needs (B, H), one for each head, or (B, H, blocks), "
                    f"one for each {SCALE_BLOCK} tokens of a head."
                )
            if t.dtype != torch.float32:
                raise InputError(f"fmha_fp8: {name} is {t.dtype}; needs float32.")
            continue
        if t.dim() != 4:
            raise InputError(
                f"fmha_fp8: {name} is {tuple(t.shape)}; needs (B, H, S, D), or (B, S, H, D) with layout='BSHD'."
            )
        if t.dtype != E4M3:
            raise InputError(
                f"fmha_fp8: {name} is {t.dtype}; needs float8_e4m3fn with scales. Quantise it, or call fmha."
            )


def check(args: FmhaFp8Args) -> None:
    """Raises InputError for raw arguments that cannot run."""
    q, k, v, sinks, mask = args.q, args.k, args.v, args.sinks, args.mask
    scales = {"q_scale": args.q_scale, "k_scale": args.k_scale, "v_scale": args.v_scale}
    check_dimensions(q=q, k=k, v=v, **scales)
    (b, h, _, d), (b_k, h_k, s_k, d_k), (b_v, h_v, s_v, d_v) = q.shape, k.shape, v.shape
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (B, H, S, D)"
    if not b == b_k == b_v or (h_k, s_k) != (h_v, s_v) or h_k == 0 or h % h_k or d != d_k or d == 0 or d_v == 0:
        raise InputError(
            f"fmha_fp8: {shapes}; all must agree in B, k and v in H and S, q and k in D; D is at least 1, and H of q a "
            "multiple of that of k and v."
        )
    for (name, t), operand in zip(scales.items(), (q, k, v), strict=True):
        heads, blocks = tuple(operand.shape[:2]), -(-operand.shape[2] // SCALE_BLOCK)
        if tuple(t.shape) not in ((*heads, 1), (*heads, blocks)):
            raise InputError(
                f"fmha_fp8: {name} is {tuple(t.shape)}; needs {heads}, one for each head, or {(*heads, blocks)}, "
                f"one for each {SCALE_BLOCK} tokens of a head."
            )
    tensors = {"k": k, "v": v, **scales, "sinks": sinks, "mask": mask.mask_data}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != q.device:
            raise InputError(f"fmha_fp8: q is on {q.device}, {name} on {tensor.device}. Move them to one device.")
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        raise InputError("fmha_fp8: q, k or v has another last stride than 1. Call .contiguous().")
    if sinks is not None and (tuple(sinks.shape) != (h,) or sinks.dtype != torch.float32):
        raise InputError(f"fmha_fp8: sinks is {tuple(sinks.shape)} {sinks.dtype}; needs ({h},), one float32 a head.")
    checks.check_scale("fmha_fp8", args.scale)
    band, data = (mask.left, mask.right), mask.mask_data
    if min(band) < -1 or args.softcap < 0 or bool(mask.program) != (data is not None):
        raise InputError(
            f"fmha_fp8: left {mask.left}, right {mask.right}, softcap {args.softcap}, program {mask.program!r} do not "
            "go together."
        )
    if data is not None and (data.dtype != torch.int32 or max(band) >= 0):
        raise InputError(
            f"fmha_fp8: the mask is {data.dtype}, left {mask.left}, right {mask.right}; needs int32 and no band."
        )
    if args.out_dtype not in _RESULTS:
        raise InputError(f"fmha_fp8: out_dtype is {args.out_dtype}; needs one of bfloat16, float16, float32.")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *tensors.values())):
        raise InputError(
            "fmha_fp8: a gradient is wanted of an attention over float8, which has none. Use torch.no_grad(), or fmha."
        )
