"""Write the latents of new tokens into a paged or contiguous cache of latent attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, Promises, RawOp, Sample, call_in_place, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import checks, layout, mla_samples
from tilewright.ops.kvcache.mla_layout import LATENT, ROPE, TOKEN_BYTES, is_aligned, is_packed, quantize_mla_cache
from tilewright.ops.kvcache.samples import EDGE_GRID
from tilewright.ops.quant.numbers import E4M3

_OP = "mla_kv_append_"


class MlaKvAppendArgs(NamedTuple):
    c_kv: Tensor  # (T, D_c)
    k_pe: Tensor  # (T, D_pe)
    kv_cache: Tensor  # (pages, page_size, D_c + D_pe), or uint8 (pages, page_size, 656)
    lengths: Tensor  # (B,)
    block_table: Tensor | None  # (B, max_pages)
    cu_seqlens: Tensor | None  # (B + 1,)


class MlaKvAppendBucket(NamedTuple):
    T: int  # rounded up to a power of two
    D: int
    packed: int  # 1: tokens of 656 bytes, 2: at no multiples of 16 bytes


@dispatch("mla_kv_append_")
def mla_kv_append_(
    kv_cache: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """kv_cache[slot of token t] = c_kv[t] joined with k_pe[t]: token i of the n_b new ones of sequence b has position
    lengths[b] - n_b + i.  Writes into the cache, as `mla_decode` reads it; returns None.

    kv_cache:    (pages, page_size, D_c + D_pe) or (pages, page_size, 1, D_c + D_pe) bf16|fp16|fp32, any strides.
                 Or of tokens of 656 bytes, uint8|float8_e4m3fn (pages, page_size, 656): D_c = 512 in e4m3 with a scale,
                 max(amax, 1e-4) / 448, of each 128 numbers, and D_pe = 64 in bfloat16 (`mla_layout`).  Triton writes
                 those that begin at multiples of 16 bytes.
    c_kv, k_pe:  (T, D_c), (T, D_pe), the latents of packed new tokens after their norm, and the rotated parts of their
                 keys after rope, in the cache's dtype; for 656 bytes bf16|fp16|fp32.  Views of one projection are.
    lengths, block_table, cu_seqlens: as in `kv_append_`.  None: contiguous caches (B, capacity, D_c + D_pe).

    Nothing is read on the host: one CUDA graph serves all lengths and tables.  Padding is not written: tokens from
    cu_seqlens[B] on, and those at negative positions.  Slots of different tokens must be different.  On a CPU, and on a
    GPU under TILEWRIGHT_CHECK=1, lengths and pages outside of the cache raise InputError; otherwise a token without a
    slot is not written.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes or devices other than these, and for tensors that require a gradient.
    Source: DeepSeek-AI, "DeepSeek-V2", 2024; FlashMLA (the form of 656 bytes).
    """
    args = MlaKvAppendArgs(c_kv, k_pe, _plain(kv_cache), lengths, block_table, cu_seqlens)
    call_in_place(CONTRACT, args, backend)


def reference(
    kv_cache: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Plain torch, in place too."""
    _write(MlaKvAppendArgs(c_kv, k_pe, _plain(kv_cache), lengths, block_table, cu_seqlens))


def _plain(kv_cache: Any) -> Any:
    """A view without the dimension of one head, of e4m3 as bytes; what is no cache stays, and `check` names it."""
    if not isinstance(kv_cache, Tensor):
        return kv_cache
    if kv_cache.dim() == 4 and kv_cache.shape[2] == 1:
        kv_cache = kv_cache.squeeze(2)
    return kv_cache.view(torch.uint8) if kv_cache.dtype == E4M3 and kv_cache.stride(-1) == 1 else kv_cache


def _write(args: MlaKvAppendArgs) -> None:
    cache = args.kv_cache
    slots = layout.token_slots(cache, args.c_kv.shape[0], args.lengths, args.block_table, args.cu_seqlens)
    tokens = torch.cat((args.c_kv, args.k_pe), -1)
    layout.write(cache, slots, quantize_mla_cache(tokens) if is_packed(cache) else tokens)


def bucket(args: MlaKvAppendArgs) -> MlaKvAppendBucket:
    """The bucket of a call."""
    width = hint(args.c_kv.shape[1]) + hint(args.k_pe.shape[1])
    packed = (1 if is_aligned(args.kv_cache) else 2) if is_packed(args.kv_cache) else 0
    return MlaKvAppendBucket(row_bucket(args.c_kv.shape[0]), width, packed)


FORWARD = RawOp(
    _OP,
    "fwd",
    MlaKvAppendArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.mla_kv_append",),
    outputs=lambda args: (),
    reference=_write,
    bucket=bucket,
    bucket_names=MlaKvAppendBucket._fields,
    count=0,
    mutates=("kv_cache",),
)


def check(args: MlaKvAppendArgs) -> None:
    """Raise InputError for what the docstring of `mla_kv_append_` excludes."""
    cache = args.kv_cache
    if not isinstance(cache, Tensor):
        raise InputError(f"{_OP}: kv_cache is a {type(cache).__name__}; needs a torch.Tensor.")
    form = f"kv_cache is {tuple(cache.shape)} {cache.dtype}"
    if cache.dim() != 3:
        raise InputError(f"{_OP}: {form}; needs (pages, page_size, D), or (B, capacity, D) without a block_table.")
    packed = is_packed(cache)
    if not packed and cache.dtype not in (*checks.DTYPES, torch.float64):
        raise InputError(f"{_OP}: {form}; needs bfloat16, float16, float32, or tokens of {TOKEN_BYTES} bytes.")
    checks.check_tensors(_OP, cache, c_kv=args.c_kv, k_pe=args.k_pe)
    dtypes = (*checks.DTYPES, torch.float64) if packed else (cache.dtype,)
    tokens = args.c_kv.shape[0] if args.c_kv.dim() else 0
    for name, x in (("c_kv", args.c_kv), ("k_pe", args.k_pe)):
        if x.dim() != 2 or x.shape[0] != tokens or x.shape[1] == 0:
            raise InputError(f"{_OP}: {name} is {tuple(x.shape)}; needs packed tokens ({tokens}, D), D at least 1.")
        if x.dtype not in dtypes or x.dtype != args.c_kv.dtype:
            raise InputError(f"{_OP}: {name} is {x.dtype}, {form}; needs one dtype, the cache's if that is no bytes.")
    widths = args.c_kv.shape[1], args.k_pe.shape[1]
    if (widths != (LATENT, ROPE)) if packed else sum(widths) != cache.shape[2]:
        needs = f"({LATENT}, {ROPE})" if packed else f"a sum of {cache.shape[2]}"
        raise InputError(f"{_OP}: c_kv and k_pe have {widths} columns, {form}; needs {needs}.")
    checks.check_sequences(_OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    checks.check_numbers(_OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads c_kv, k_pe and the metadata; writes as many tokens of the cache.  An operation for each element."""
    kv_cache, c_kv, k_pe, lengths = sample.args
    metadata = rows.nbytes(lengths, sample.kwargs.get("cu_seqlens")) + 4 * min(c_kv.shape[0], rows.nbytes(lengths))
    written = c_kv.shape[0] * kv_cache.shape[-1] * kv_cache.element_size()
    return Cost(c_kv.numel() + k_pe.numel(), rows.nbytes(c_kv, k_pe) + metadata, written)


CONTRACT = register(
    Contract(
        name=_OP,
        family="kvcache",
        summary="latents of new tokens into a paged or contiguous cache, in their dtype or in 656 bytes",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=mla_samples.inputs,
        cost=cost,
        workloads=mla_samples.WORKLOADS,
        cpu_workloads=mla_samples.CPU_WORKLOADS,
        edge_cases=mla_samples.EDGE_CASES,
        bad_inputs=mla_samples.BAD_INPUTS,
        batch_dim=None,  # tokens of all sequences are packed, and lie in the cache by other dimensions
        edge_grid={**EDGE_GRID, "H_kv": (1,)},
        promises=Promises(reference_bits=True),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
)
