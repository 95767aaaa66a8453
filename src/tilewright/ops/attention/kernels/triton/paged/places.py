"""What surrounds the kernels of attention over a KV cache where they compute prefill's ops: small launches.

Before them the keys of every sequence are counted on the device.  They write (tokens, H, D); after them results that
lie otherwise are put in their places: 8 bytes of lse for a query and head, and 4 * D_v of o if it lies by head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.jit.tape import scratch
from tilewright.jit.triton_launch import TritonKernel
from tilewright.mask.program import HEADER_OF_SEQUENCES
from tilewright.ops.attention.arguments import FmhaArgs, VarlenArgs
from tilewright.ops.attention.fmha_fp8.args import FmhaFp8Args
from tilewright.ops.attention.paged.args import PagedArgs
from tilewright.ops.quant.kernels.triton.numbers import as_stored
from tilewright.ops.quant.numbers import E4M3

_LENGTHS, _ROWS = 256, 16  # of a program


@triton.jit(do_not_specialize=["count", "S_k"])
def _lengths_kernel(lengths, data, count, S_k, HEADER: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of each of `count` sequences: S_k, or what the program `data` of packed sequences gives each query."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < count
    keys = tl.zeros([BLOCK], tl.int32) + S_k
    if data is not None:
        first = tl.load(data + HEADER + b, mask=inside, other=0)
        end = tl.load(data + HEADER + count + b, mask=inside, other=0)
        keys = tl.maximum(end - first, 0)
    tl.store(lengths + b, keys, mask=inside)


@triton.jit(do_not_specialize=["count", "H", "S_q"])
def _rows_kernel(
    placed, dense, dense_lse, lse, count, H, S_q, stride_b, stride_h, stride_s,
    D: tl.constexpr, WIDTH: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy dense (B, S_q, H, D) to placed (B, H, S_q, D), or back if GATHER; and dense_lse (B, S_q, H) to lse
    (B, H, S_q).   count: rows, B * S_q * H.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    h, s, b = row % H, row // H % S_q, (row // H // S_q).to(tl.int64)
    if dense is not None:
        column = tl.arange(0, WIDTH)
        mask = inside[:, None] & (column < D)[None, :]
        dense_row = dense + row.to(tl.int64)[:, None] * D + column[None, :]
        place = b * stride_b + h.to(tl.int64) * stride_h + s.to(tl.int64) * stride_s
        place = placed + place[:, None] + column[None, :]
        if GATHER:
            tl.store(dense_row, tl.load(place, mask=mask), mask=mask)
        else:
            tl.store(place, tl.load(dense_row, mask=mask), mask=mask)
    if lse is not None:
        tl.store(lse + (b * H + h) * S_q + s, tl.load(dense_lse + row, mask=inside), mask=inside)


_lengths, _rows = TritonKernel(_lengths_kernel), TritonKernel(_rows_kernel)


class Problem(NamedTuple):
    """A call over a cache: its arguments, and where its kernels write."""

    args: PagedArgs
    o: Tensor  # (B * S_q, H, D_v), contiguous
    lse: Tensor  # (B * S_q, H)


def begin(outs: tuple[Tensor, Tensor], args: FmhaArgs | VarlenArgs | FmhaFp8Args) -> Problem:
    """The call over a cache that computes `args`, with lengths on the device; without scales of e4m3."""
    (o, lse), q, k, v = outs, args.q, args.k, args.v
    (batch, heads, s_q, d), s_k, tokens = q.shape, k.shape[2], q.shape[0] * q.shape[2]
    packed = args.mask_data
    lengths = scratch((batch if packed is None else s_q,), torch.int32, q.device)
    _lengths(
        (-(-lengths.shape[0] // _LENGTHS),),
        (lengths, packed, lengths.shape[0], s_k),
        (HEADER_OF_SEQUENCES, _LENGTHS),
        num_warps=4,
    )
    queries = _as_tokens(q)
    if queries is None:
        queries = scratch((tokens, heads, d), q.dtype, q.device)
        dense, placed = (as_stored(t) if t.dtype == E4M3 else t for t in (queries, q))
        _move(dense, placed, None, None, gather=True)
    k_cache, v_cache = (_from_every_token(t) if packed is not None else t.transpose(1, 2) for t in (k, v))
    table = None if packed is None else packed[HEADER_OF_SEQUENCES : HEADER_OF_SEQUENCES + s_q, None]
    problem = PagedArgs(
        queries, k_cache, v_cache, lengths, table, None, args.sinks, None, None, args.left, args.right == 0,
        args.scale, args.softcap, False,
    )  # fmt: skip
    of_tokens, lse_of_tokens = _dense_tokens(o), _dense_tokens(lse[..., None])
    return Problem(
        problem,
        scratch((tokens, heads, v.shape[3]), o.dtype, o.device) if of_tokens is None else of_tokens,
        scratch((tokens, heads), lse.dtype, lse.device) if lse_of_tokens is None else lse_of_tokens[..., 0],
    )


def end(outs: tuple[Tensor, Tensor], problem: Problem) -> None:
    """Put the results of `problem` into `outs`, unless they are there."""
    o, lse = outs
    rows = problem.o if _dense_tokens(o) is None else None
    lse_rows = problem.lse if _dense_tokens(lse[..., None]) is None else None
    if rows is not None or lse_rows is not None:
        _move(rows, o, lse_rows, None if lse_rows is None else lse)


def _move(
    dense: Tensor | None, placed: Tensor, dense_lse: Tensor | None, lse: Tensor | None, gather: bool = False
) -> None:
    """See `_rows_kernel`.  Sizes are those of `placed`, also where it stays as it is."""
    batch, heads, s_q, d = placed.shape
    count = batch * heads * s_q
    _rows(
        (-(-count // _ROWS),),
        (placed, dense, dense_lse, lse, count, heads, s_q, *placed.stride()[:3]),
        (d, triton.next_power_of_2(d), gather, _ROWS),
        num_warps=4,
    )


def _as_tokens(x: Tensor) -> Tensor | None:
    """View (B * S, H, D) of x (B, H, S, D); None if no stride leads from token to token."""
    batch, _, s, _ = x.shape
    if batch == 1:
        return x[0].transpose(0, 1)
    if s == 1:
        return x[:, :, 0]
    return x.transpose(1, 2).flatten(0, 1) if x.stride(0) == s * x.stride(2) else None


def _dense_tokens(x: Tensor) -> Tensor | None:
    """The same, contiguous, or None."""
    tokens = x.transpose(1, 2)
    return tokens.view(-1, *tokens.shape[2:]) if tokens.is_contiguous() else None


def _from_every_token(x: Tensor) -> Tensor:
    """Pages (1, T, H_kv, D) of x (1, H_kv, T, D): page i has its tokens from i on, of which those are there that a
    length allows.  The first page stands for all; the stride that leads to the others is that of a token.
    """
    (_, heads, tokens, d), (_, head, token, _) = x.shape, x.stride()
    return x.as_strided((1, tokens, heads, d), (token, token, head, 1))
