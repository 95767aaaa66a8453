"""Between the projections and attention: QK-norm, rotary embedding, and the write into the KV cache, in one launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Contract, Cost, RawOp, Sample, call_in_place, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.ops import rows
from tilewright.ops.kvcache import layout, rope_checks, rope_samples
from tilewright.ops.kvcache.samples import EDGE_GRID
from tilewright.ops.norm import rms_norm
from tilewright.ops.rope.apply_rope.reference import reference as apply_rope


class RopeKvAppendArgs(NamedTuple):
    q: Tensor  # (T, H, D)
    k: Tensor  # (T, H_kv, D)
    v: Tensor  # (T, H_kv, D_v)
    cos: Tensor  # (P, W)
    sin: Tensor
    k_cache: Tensor  # (pages, page_size, H_kv, D)
    v_cache: Tensor  # (pages, page_size, H_kv, D_v)
    lengths: Tensor  # (B,)
    block_table: Tensor | None  # (B, max_pages)
    cu_seqlens: Tensor | None  # (B + 1,)
    positions: Tensor | None  # (T,)
    q_weight: Tensor | None  # (D,)
    k_weight: Tensor | None
    k_scale: Tensor | None  # (H_kv,) or (pages, page_size, H_kv)
    v_scale: Tensor | None
    eps: float
    rotary_dim: int  # 0: W


class RopeKvAppendBucket(NamedTuple):
    T: int  # rounded up to a power of two
    H: int
    H_kv: int
    D: int
    norm: int  # 0 or 1
    scales: int  # 0: none, 1: of heads, 2: of tokens


@dispatch("rope_kv_append_")
def rope_kv_append_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """q' = rope(norm(q)), returned; rope(norm(k)) and v are written into the cache, as `kv_append_` does.

    q:        (T, H, D), k: (T, H_kv, D), v: (T, H_kv, D_v), packed new tokens, any strides (slices of one projection).
    cos, sin: (P, W), rows of a table: that of a token is its position in the cache, or positions[t].
    positions: (T,) int32, where the angle is of another position: left padding, text after an image.
    k_cache, v_cache, lengths, block_table, cu_seqlens, k_scale, v_scale: as in `kv_append_`.
    q_weight, k_weight: (D,) in q's dtype: first an RMS norm of each head, x / sqrt(mean(x^2) + eps) rounded to q's
              dtype, times the weight, rounded again: Qwen3's q_norm and k_norm.   None: no norm.
    Pairs are elements (i, i + R/2) of a head, R = rotary_dim, by default W; W is R or R/2; elements from R on are not
    rotated.  Products and sum are each rounded to promote(q, cos), the result to q's dtype, as in `apply_rope`; a cache
    in e4m3 gets the rounded result.
    Returns q' (T, H, D) contiguous; rows of padding are 0.   out: contiguous tensor to write instead of allocating.

    Nothing is read on the host.  A row outside of the table raises InputError on a CPU and under TILEWRIGHT_CHECK=1;
    otherwise the rotated elements are NaN.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes or devices other than these, and for tensors that require a gradient.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Qwen3's model code.
    """
    tensors = (q, k, v, cos, sin, k_cache, v_cache, lengths, block_table, cu_seqlens, positions, q_weight, k_weight)
    args = RopeKvAppendArgs(*tensors, k_scale, v_scale, eps, rotary_dim or 0)
    result: Tensor = call_in_place(CONTRACT, args, backend, out)
    return result


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Plain torch, in place too: the references of `rms_norm` and `apply_rope`, then the write."""
    slots = layout.token_slots(k_cache, q.shape[0], lengths, block_table, cu_seqlens)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm.reference(q, q_weight, eps=eps), rms_norm.reference(k, k_weight, eps=eps)
    row = slots.position if positions is None else positions.long()
    cos, sin = _table_rows(cos, row), _table_rows(sin, row)
    q, k = apply_rope(q, k, cos, sin, rotary_dim=rotary_dim)
    layout.append(k_cache, slots, k, k_scale)
    layout.append(v_cache, slots, v, v_scale)
    return torch.where(slots.live[:, None, None], q, 0)


def _table_rows(table: Tensor, row: Tensor) -> Tensor:
    """Rows of a table, NaN outside of it."""
    if table.shape[0] == 0:
        return table.new_full((row.shape[0], table.shape[1]), torch.nan)
    inside = (row >= 0) & (row < table.shape[0])
    return torch.where(inside[:, None], table[row.clamp(0, table.shape[0] - 1)], torch.nan)


def _raw(args: RopeKvAppendArgs) -> Tensor:
    a = args
    return reference(
        a.q, a.k, a.v, a.cos, a.sin, a.k_cache, a.v_cache, a.lengths, block_table=a.block_table,
        cu_seqlens=a.cu_seqlens, positions=a.positions, q_weight=a.q_weight, k_weight=a.k_weight, eps=a.eps,
        rotary_dim=a.rotary_dim, k_scale=a.k_scale, v_scale=a.v_scale,
    )  # fmt: skip


def bucket(args: RopeKvAppendArgs) -> RopeKvAppendBucket:
    """The bucket of a call."""
    tokens, heads, depth = args.q.shape
    scales = 0 if args.k_scale is None else 1 if args.k_scale.dim() == 1 else 2
    norm = 0 if args.q_weight is None else 1
    width = max(hint(depth), hint(args.v.shape[2]))
    return RopeKvAppendBucket(row_bucket(tokens), hint(heads), hint(args.k.shape[1]), width, norm, scales)


FORWARD = RawOp(
    "rope_kv_append_",
    "fwd",
    RopeKvAppendArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.rope_kv_append",),
    outputs=lambda args: ((args.q.shape, args.q.dtype),),
    reference=_raw,
    bucket=bucket,
    bucket_names=RopeKvAppendBucket._fields,
    out=True,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads q, k, v, the metadata, and half of each row of the tables that is used; writes q' and the caches' slots."""
    q, k, v, cos, _, k_cache, _, lengths = sample.args
    options = sample.kwargs
    r = options.get("rotary_dim") or cos.shape[1]
    scale = options.get("k_scale")
    scales = 0 if scale is None or scale.dim() == 1 else 2 * 4 * k.shape[0] * k.shape[1]
    table = min(cos.shape[0], q.shape[0]) * r * cos.element_size()
    metadata = rows.nbytes(lengths, options.get("cu_seqlens"), options.get("positions"))
    norm = 4 * (q.numel() + k.numel()) if options.get("q_weight") is not None else 0
    pairs = (q.shape[1] + k.shape[1]) * q.shape[0] * (r // 2)
    stored = (k.numel() + v.numel()) * k_cache.element_size()
    read = rows.nbytes(q, k, v, options.get("q_weight"), options.get("k_weight")) + table + metadata
    return Cost(6 * pairs + norm, read, rows.nbytes(q) + stored + scales)


CONTRACT = register(
    Contract(
        name="rope_kv_append_",
        family="kvcache",
        summary="QK-norm and rotary embedding of new tokens, written into a KV cache",
        reference=reference,
        forward=FORWARD,
        check=rope_checks.check,
        inputs=rope_samples.inputs,
        cost=cost,
        workloads=rope_samples.WORKLOADS,
        cpu_workloads=rope_samples.CPU_WORKLOADS,
        edge_cases=rope_samples.EDGE_CASES,
        bad_inputs=rope_samples.BAD_INPUTS,
        batch_dim=None,  # tokens of all sequences are packed, and lie in the caches by other dimensions
        edge_grid=EDGE_GRID,
    )
)
