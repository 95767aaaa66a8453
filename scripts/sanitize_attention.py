"""Attention's cases of `sanitize_cases.py`: forwards and backwards of `fmha` and `mla`, the forward of `fmha_fp8`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sanitize_values import DEVICE, HALF, UNWRITTEN, drawn, near, unwritten

from tilewright import mask as masks
from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args
from tilewright.ops.attention.fmha_fp8.args import bucket as bucket_fp8
from tilewright.ops.attention.fmha_fp8.reference import attention as attention_fp8
from tilewright.ops.attention.kernels.sm90 import backward as fmha_backward_cuda
from tilewright.ops.attention.kernels.sm90 import decode
from tilewright.ops.attention.kernels.sm90 import forward as fmha_cuda
from tilewright.ops.attention.kernels.sm90 import fp8_forward as fmha_fp8_cuda
from tilewright.ops.attention.kernels.sm90 import mla_backward as mla_backward_cuda
from tilewright.ops.attention.kernels.sm90 import mla_decode as mla_decode_cuda
from tilewright.ops.attention.kernels.sm90.decode_choice import Config as DecodeConfig
from tilewright.ops.attention.mla.args import MlaArgs, MlaBackwardArgs
from tilewright.ops.attention.mla_decode import samples as decode_samples
from tilewright.ops.attention.mla_decode.args import problem_of as latent_problem_of
from tilewright.ops.attention.mla_decode.reference import attention as decode_attention
from tilewright.ops.attention.paged.args import PagedArgs, problem_of
from tilewright.ops.attention.paged.reference import attention as attention_over_cache
from tilewright.ops.attention.paged.samples import decode_inputs, paged_inputs
from tilewright.ops.attention.reference import attention

# queries, keys, D, band, mask of the keys, modified scores, config
ATTENTION = (
    (300, 450, 128, (-1, 0), "", False, fmha_cuda.Config(2, 128, 2, 2, turns=False)),
    (300, 450, 64, (90, 20), "", True, fmha_cuda.Config(3, 128, 2, 2)),
    (450, 300, 256, (-1, 0), "", False, fmha_cuda.Config(2, 64, 2, 1)),
    (300, 450, 128, (-1, -1), "documents", False, fmha_cuda.Config(2, 128, 2, 2)),
    (300, 450, 64, (-1, -1), "leaves", True, fmha_cuda.Config(3, 128, 2, 2)),
)
# The same without a config; scales are those of blocks, and softcap and sinks, if scores are modified
ATTENTION_FP8 = (
    (300, 450, 128, (-1, 0), "", False),
    (300, 450, 64, (90, 20), "", True),
    (450, 300, 256, (-1, 0), "", True),
    (300, 450, 80, (-1, -1), "leaves", False),
)
# queries, keys, widths, band, mask of the keys, config
LATENT = (
    (300, 450, (128, 64, 128), (-1, 0), "", fmha_cuda.Config(2, 128, 2, 1, turns=False)),
    (450, 300, (80, 24, 48), (90, 20), "", fmha_cuda.Config(2, 96, 2, 2)),
    (300, 450, (128, 64, 128), (-1, -1), "leaves", fmha_cuda.Config(2, 128, 2, 1)),
)
# queries, keys, widths, band, config
LATENT_BACKWARD = (
    (300, 450, (128, 64, 128), (-1, 0), fmha_backward_cuda.Config(64, 2, 1, 1)),
    (450, 300, (80, 24, 48), (90, 20), fmha_backward_cuda.Config(64, 2, 1, 1)),
    (300, 450, (64, 64, 64), (-1, -1), fmha_backward_cuda.Config(64, 2, 2, 2)),
)
# lengths, heads, new tokens, tokens of a page or None, config
LATENT_DECODE = (
    ((700, 0, 130), 128, 1, 64, mla_decode_cuda.Config(cost=0)),  # cut
    ((300, 1, 65, 90, 200), 128, 1, 24, mla_decode_cuda.Config(cost=100)),  # whole, one after another
    ((500, 63), 16, 3, 16, mla_decode_cuda.Config()),
    ((260, 100), 9, 1, None, mla_decode_cuda.Config()),
)
# queries, keys, D, band or PACKED, modified scores, config, and batch, heads and heads of keys if not 2, 4 and 2
PACKED = (-2, -2)
ATTENTION_BACKWARD = (
    (300, 450, 128, (-1, 0), False, fmha_backward_cuda.Config(64, 2, 2, 2)),
    (450, 300, 128, (90, 20), True, fmha_backward_cuda.Config(64, 2, 2, 2)),
    (300, 450, 64, (-1, 0), False, fmha_backward_cuda.Config(128, 2, 2, 2)),
    (450, 700, 128, PACKED, False, fmha_backward_cuda.Config(64, 2, 2, 2)),
    (450, 450, 64, PACKED, True, fmha_backward_cuda.Config(64, 3, 2, 2)),
    (450, 700, 64, PACKED, False, fmha_backward_cuda.Config(128, 2, 2, 2)),
    (300, 450, 40, (-1, -1), True, fmha_backward_cuda.Config(64, 3, 2, 2)),
    # Two key tiles of a group for four processors: the group is divided
    (300, 100, 128, (-1, 0), True, fmha_backward_cuda.Config(64, 2, 2, 2), (1, 12, 2)),
    (300, 100, 64, (-1, -1), False, fmha_backward_cuda.Config(128, 2, 2, 2), (1, 12, 2)),
)

# parameters of the problem, config, shares of a sequence's own
_RAGGED = {"H": 8, "H_kv": 2, "D": 64, "lengths": (130, 0, 1, 37, 300), "unused": "nan"}
DECODING: tuple[tuple[dict[str, Any], DecodeConfig, bool], ...] = (
    ({"page": 16}, DecodeConfig(8, 32, 8, 3), False),
    ({"page": 1, "S_q": 3, "window": (40, 0)}, DecodeConfig(16, 32, 4, 2), False),
    ({"page": 3, "D": 128}, DecodeConfig(8, 16, 8, 2, 1, 4), False),
    ({"D": 256, "sinks": True}, DecodeConfig(8, 16, 4, 2), True),
    ({"page": 16, "D": 128, "cache": "e4m3"}, DecodeConfig(8, 32, 4, 2, 1, 2), False),
    ({"page": 64, "cache": "e4m3", "token_scales": True, "softcap": 2.0}, DecodeConfig(8, 32, 8, 2), False),
    ({"page": 16, "new": (1, 0, 2, 1, 1), "behind": 2}, DecodeConfig(8, 32, 4, 3), False),
)


def attention_forward(
    s_q: int, s_k: int, d: int, band: tuple[int, int], mask: str, modified: bool, config: fmha_cuda.Config
) -> bool:
    """Grouped heads; modified: with softcap, ALiBi and sinks."""
    q, k, v = drawn(2, 4, s_q, d), drawn(2, 2, s_k, d), drawn(2, 2, s_k, d)
    program, data = ("", None) if not mask else _masks(s_k)[mask].program(DEVICE)
    sinks, slopes = (torch.rand(4, device=DEVICE) if modified else None for _ in range(2))
    scale, softcap, (left, right) = d**-0.5, 3.0 if modified else 0.0, band
    o = unwritten(2, 4, s_q + 1, d)
    lse = torch.empty(2, 4, s_q, device=DEVICE)
    args = FmhaArgs(q, k, v, sinks, slopes, data, program, left, right, scale, softcap)
    fmha_cuda.forward((o[:, :, :s_q], lse), args, config)
    exact, _ = attention(args._replace(q=q.double(), k=k.double(), v=v.double()))
    return bool((o[:, :, s_q:] == UNWRITTEN).all()) and near(o[:, :, :s_q], exact)


def attention_of_float8(s_q: int, s_k: int, d: int, band: tuple[int, int], mask: str, modified: bool) -> bool:
    """Grouped heads, every config."""
    eight, blocks = torch.float8_e4m3fn, 4 if modified else 1
    q, k, v = (drawn(2, h, s, d).to(eight) for h, s in ((4, s_q), (2, s_k), (2, s_k)))
    q_scale, k_scale, v_scale = (
        torch.rand(2, h, min(blocks, -(-s // 128)), device=DEVICE) + 0.5 for h, s in ((4, s_q), (2, s_k), (2, s_k))
    )
    program, data = ("", None) if not mask else _masks(s_k)[mask].program(DEVICE)
    sinks, softcap = (torch.rand(4, device=DEVICE), 3.0) if modified else (None, 0.0)
    args = FmhaFp8Args(q, k, v, q_scale, k_scale, v_scale, sinks, data, program, *band, d**-0.5, softcap, HALF)
    exact, _ = attention_fp8(args._replace(q=q.double(), k=k.double(), v=v.double()))
    right = True
    for config in fmha_fp8_cuda.candidates(bucket_fp8(args), eight):
        o, lse = unwritten(2, 4, s_q + 1, d), torch.empty(2, 4, s_q, device=DEVICE)
        fmha_fp8_cuda.forward((o[:, :, :s_q], lse), args, config)
        right = right and bool((o[:, :, s_q:] == UNWRITTEN).all()) and near(o[:, :, :s_q], exact, 5e-2)
    return right


def latent_attention(
    s_q: int,
    s_k: int,
    widths: tuple[int, int, int],
    band: tuple[int, int],
    mask: str,
    config: fmha_cuda.Config,
) -> bool:
    """Rotated parts of queries and keys apart; widths: D, D_pe, D_v."""
    d, d_pe, d_v = widths
    (q, q_pe), (k, v) = drawn(2, 4, s_q, d + d_pe).split((d, d_pe), -1), drawn(2, 4, s_k, d + d_v).split((d, d_v), -1)
    k_pe = drawn(2, 1, s_k, d_pe)
    program, data = ("", None) if not mask else _masks(s_k)[mask].program(DEVICE)
    args = MlaArgs(q, q_pe, k, k_pe, v, data, program, *band, (d + d_pe) ** -0.5)
    o, lse = unwritten(2, 4, s_q + 1, d_v), torch.empty(2, 4, s_q, device=DEVICE)
    fmha_cuda.forward((o[:, :, :s_q], lse), args.without_rope, config, pe=(q_pe, k_pe))
    joined = args.joined
    exact, _ = attention(joined._replace(q=joined.q.double(), k=joined.k.double(), v=v.double()))
    return bool((o[:, :, s_q:] == UNWRITTEN).all()) and near(o[:, :, :s_q], exact)


def attention_backward(
    s_q: int,
    s_k: int,
    d: int,
    band: tuple[int, int],
    modified: bool,
    config: fmha_backward_cuda.Config,
    shape: tuple[int, int, int] = (2, 4, 2),
) -> bool:
    """The same; gradients of q, k and v.   shape: batch, heads, heads of keys."""
    batch, heads, kv_heads = shape
    q, k = drawn(batch, heads, s_q, d), drawn(batch, kv_heads, s_k, d)
    v, do = drawn(batch, kv_heads, s_k, d), drawn(batch, heads, s_q, d)
    sinks, slopes = (torch.rand(heads, device=DEVICE) if modified else None for _ in range(2))
    program, data = "", None
    if band == PACKED:  # also an empty sequence, and tokens behind the last
        cu = torch.tensor((0, 90, 90, 301, 430), dtype=torch.int32, device=DEVICE)
        mask = masks.sequences(cu, cu + (s_k - s_q) * (cu > 0), length_q=s_q, length_k=s_k, causal=True)
        program, data = mask.program(DEVICE)
        band = (-1, -1)
    rest: tuple[Any, ...] = (sinks, slopes, data, program, *band, d**-0.5, 3.0 if modified else 0.0)
    exact: Any = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = attention(FmhaArgs(*exact, *rest))
    wanted = torch.autograd.grad(o, exact, do.double())
    o, lse = o.detach().to(HALF), lse.detach().float()
    wide = [unwritten(batch, t.shape[1], t.shape[2] + 1, d) for t in (q, k, v)]
    made = [w[:, :, :-1] for w in wide]
    dsinks = torch.empty(heads if modified else 0, device=DEVICE)
    args = FmhaBackwardArgs(do, None, q, k, v, o, lse, *rest)
    fmha_backward_cuda.backward((made[0], made[1], made[2], dsinks), args, config)
    beyond = all(bool((w[:, :, -1] == UNWRITTEN).all()) for w in wide)
    return beyond and all(near(g, w, 2e-2) for g, w in zip(made, wanted, strict=True))


def latent_attention_backward(
    s_q: int, s_k: int, widths: tuple[int, int, int], band: tuple[int, int], config: fmha_backward_cuda.Config
) -> bool:
    """Gradients of q, q_pe, k, k_pe and v."""
    d, d_pe, d_v = widths
    (q, q_pe), (k, v) = drawn(2, 4, s_q, d + d_pe).split((d, d_pe), -1), drawn(2, 4, s_k, d + d_v).split((d, d_v), -1)
    k_pe, do = drawn(2, 1, s_k, d_pe), drawn(2, 4, s_q, d_v)
    rest: tuple[Any, ...] = (None, "", *band, (d + d_pe) ** -0.5)
    tensors = (q, q_pe, k, k_pe, v)
    exact: Any = [t.double().requires_grad_() for t in tensors]
    o, lse = attention(MlaArgs(*exact, *rest).joined)
    wanted = torch.autograd.grad(o, exact, do.double())
    wide = [unwritten(2, t.shape[1], t.shape[2] + 1, t.shape[3]) for t in tensors]
    made = [w[:, :, :-1] for w in wide]
    args = MlaBackwardArgs(do, None, *tensors, o.detach().to(HALF), lse.detach().float(), *rest)
    mla_backward_cuda.backward(tuple(made), args, config)
    beyond = all(bool((w[:, :, -1] == UNWRITTEN).all()) for w in wide)
    return beyond and all(near(g, w, 2e-2) for g, w in zip(made, wanted, strict=True))


def decoding(changes: dict[str, Any], config: DecodeConfig, own: bool) -> bool:
    """Attention over a KV cache whose unused slots are NaN."""
    params = {**_RAGGED, **changes}
    sample = (paged_inputs if "new" in params else decode_inputs)(params, HALF, torch.device(DEVICE), 0)
    args = problem_of(sample)._replace(batch_invariant=own)
    (tokens, heads, d), lse = args.q.shape, torch.empty(args.q.shape[:2], device=DEVICE)
    o = unwritten(tokens + 1, heads, d)
    decode.launch((o[:tokens], lse), args, config)
    exact, _ = attention_over_cache(_widened(args))
    return bool((o[tokens:] == UNWRITTEN).all()) and near(o[:tokens], exact)


def _widened(args: PagedArgs) -> PagedArgs:
    """The same in float64, but for caches of e4m3, whose numbers are exact."""
    is_half = args.k_cache.dtype == HALF
    k, v = (t.double() if is_half else t for t in (args.k_cache, args.v_cache))
    return args._replace(q=args.q.double(), k_cache=k, v_cache=v)


def latent_decode(
    lengths: tuple[int, ...], heads: int, tokens: int, page: int | None, config: mla_decode_cuda.Config
) -> bool:
    """New tokens over a cache of latents, its unused slots NaN, with sinks."""
    sizes = {"H": heads, "D": 576, "d_v": 512, "lengths": lengths, "S_q": tokens, "page": page}
    args = latent_problem_of(decode_samples.inputs(sizes | {"sinks": True, "unused": "nan"}, HALF, DEVICE, 0))
    o, lse = unwritten(len(lengths) + 1, tokens, heads, 512), torch.empty(len(lengths), tokens, heads, device=DEVICE)
    mla_decode_cuda.launch((o[:-1], lse), args, config)
    assert args.sinks is not None
    exact, exact_lse = decode_attention(
        args._replace(q=args.q.double(), kv_cache=args.kv_cache.double(), sinks=args.sinks.double())
    )
    return bool((o[-1] == UNWRITTEN).all()) and near(o[:-1], exact, 6e-3) and near(lse, exact_lse, 1e-3)


def _masks(length: int) -> dict[str, masks.Mask]:
    """Masks that are no band; the second has every leaf."""
    documents = masks.document(torch.arange(length, device=DEVICE) // 70) & masks.causal()
    table = torch.rand(2, 4, -(-length // 64), -(-length // 64), device=DEVICE) > 0.5
    some = masks.prefix(torch.tensor([3, 40], device=DEVICE)) | masks.global_tokens(3) | masks.strided(5)
    return {"documents": documents, "leaves": documents | some & masks.dilated(2) | masks.block(table, 64)}


ATTENTION_RUNS: tuple[tuple[str, Callable[..., bool], Sequence[tuple[Any, ...]]], ...] = (
    ("attention", attention_forward, ATTENTION),
    ("float8 attention", attention_of_float8, ATTENTION_FP8),
    ("latent attention", latent_attention, LATENT),
    ("attention backward", attention_backward, ATTENTION_BACKWARD),
    ("latent attention backward", latent_attention_backward, LATENT_BACKWARD),
    ("decoding", decoding, DECODING),
    ("latent decode", latent_decode, LATENT_DECODE),
)
"""Name, function and arguments of each case."""
