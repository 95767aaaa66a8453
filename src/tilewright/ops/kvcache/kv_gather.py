"""Read tokens of a KV cache into packed tensors: the inverse of `kv_append_`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, Promises, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.arguments import Size, as_int
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.targets import several
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import checks, layout
from tilewright.ops.kvcache.samples import EDGE_GRID, problem, replaced, tokens_of
from tilewright.ops.quant.numbers import E4M3

OP = "kv_gather"


class KvGatherArgs(NamedTuple):
    k_cache: Tensor  # (pages, page_size, H_kv, D)
    v_cache: Tensor  # (pages, page_size, H_kv, D_v)
    lengths: Tensor  # (B,)
    block_table: Tensor | None  # (B, max_pages)
    cu_seqlens: Tensor | None  # (B + 1,)
    k_scale: Tensor | None  # (H_kv,) or (pages, page_size, H_kv)
    v_scale: Tensor | None
    tokens: Size
    out_dtype: torch.dtype


class KvGatherBucket(NamedTuple):
    T: int  # rounded up to a power of two
    H_kv: int
    D: int
    scales: int  # 0: none, 1: of heads, 2: of tokens


@dispatch(OP)
def kv_gather(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    tokens: int,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(k, v) with k[t] = k_cache[slot of token t], and so v: row cu_seqlens[b] + i is position lengths[b] - n_b + i of
    sequence b, n_b = cu_seqlens[b + 1] - cu_seqlens[b].  With lengths = n_b all of each sequence is read, else its end.

    k_cache:     (pages, page_size, H_kv, D) bf16|fp16|fp32|e4m3, any strides.   v_cache: the same, D_v.
    lengths:     (B,) int32.   block_table: (B, max_pages) int32, or None for contiguous caches.
    tokens:      T, the rows of the results, a number of the host: lengths are not read there.
    cu_seqlens:  (B + 1,) int32; rows from cu_seqlens[B] on are 0.   None: T = B * n, the last n of each sequence; rows
                 of negative positions are 0.
    k_scale, v_scale: float32, value = scale * stored, for e4m3 caches: (H_kv,) or (pages, page_size, H_kv).
    Returns k (T, H_kv, D) and v (T, H_kv, D_v), contiguous, in out_dtype: bf16|fp16|fp32, by default the caches', or
    bf16 for e4m3.  A value of an e4m3 cache is multiplied in float32 and rounded once.

    On a CPU, and on a GPU under TILEWRIGHT_CHECK=1, lengths and pages outside of the cache raise InputError, and so
    does cu_seqlens[B] > T.  Otherwise every row is written, with 0 where its token has no slot in the cache, and what
    would be row T or later is left out.  There is no gradient.
    out: (k, v), contiguous memory to write instead of allocating.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes or devices other than these, and for caches that require a gradient.
    """
    cache_dtype = k_cache.dtype if isinstance(k_cache, Tensor) else torch.bfloat16
    dtype = out_dtype or (torch.bfloat16 if cache_dtype == E4M3 else cache_dtype)
    args = KvGatherArgs(k_cache, v_cache, lengths, block_table, cu_seqlens, k_scale, v_scale, tokens, dtype)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend, several(out, 2, 2))
    return result if out is None else out


def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    tokens: int,
    block_table: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain torch; of float64 caches the result is float64, whatever `out_dtype` says."""
    default = torch.bfloat16 if k_cache.dtype == E4M3 else k_cache.dtype
    dtype = torch.float64 if k_cache.dtype == torch.float64 else out_dtype or default
    slots = layout.token_slots(k_cache, tokens, lengths, block_table, cu_seqlens)
    return layout.read(k_cache, slots, k_scale, dtype), layout.read(v_cache, slots, v_scale, dtype)


def _raw(args: KvGatherArgs) -> tuple[Tensor, Tensor]:
    return reference(
        args.k_cache, args.v_cache, args.lengths, tokens=args.tokens, block_table=args.block_table,
        cu_seqlens=args.cu_seqlens, k_scale=args.k_scale, v_scale=args.v_scale, out_dtype=args.out_dtype,
    )  # fmt: skip


def bucket(args: KvGatherArgs) -> KvGatherBucket:
    """The bucket of a call."""
    _, _, heads, depth = args.k_cache.shape
    scales = 0 if args.k_scale is None else 1 if args.k_scale.dim() == 1 else 2
    return KvGatherBucket(row_bucket(args.tokens), hint(heads), max(hint(depth), hint(args.v_cache.shape[3])), scales)


FORWARD = RawOp(
    OP,
    "fwd",
    KvGatherArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.kv_gather",),
    outputs=lambda args: tuple(
        ((args.tokens, cache.shape[2], cache.shape[3]), args.out_dtype) for cache in (args.k_cache, args.v_cache)
    ),
    reference=_raw,
    bucket=bucket,
    bucket_names=KvGatherBucket._fields,
    count=2,
    out=True,
    dtypes=(*checks.DTYPES, E4M3),
)


def check(args: KvGatherArgs) -> None:
    """Raise InputError for what the docstring of `kv_gather` excludes."""
    cache, tokens = args.k_cache, as_int(OP, "tokens", args.tokens)
    checks.check_caches(OP, cache, args.v_cache, args.k_scale, args.v_scale)
    checks.refuse_gradient(OP, k_cache=cache, v_cache=args.v_cache, k_scale=args.k_scale, v_scale=args.v_scale)
    if args.out_dtype not in checks.DTYPES:
        raise InputError(f"{OP}: out_dtype is {args.out_dtype}; allowed are bfloat16, float16, float32.")
    if tokens < 0:
        raise InputError(f"{OP}: tokens is {tokens}; needs the number of rows, from 0.")
    checks.check_sequences(OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)
    checks.check_numbers(OP, cache, tokens, args.lengths, args.block_table, args.cu_seqlens)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: those of `samples.problem`, optional out_dtype."""
    caches = problem(params, dtype, device, seed)
    options: dict[str, Any] = {"tokens": tokens_of(params, caches.new), **caches.options}
    if "out_dtype" in params:
        options["out_dtype"] = params["out_dtype"]
    return Sample((caches.k_cache, caches.v_cache, caches.lengths), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads the tokens and the metadata, and scales of tokens; writes them packed.  An operation an element."""
    k_cache, v_cache, lengths = sample.args
    options = sample.kwargs
    elements = options["tokens"] * k_cache.shape[2] * (k_cache.shape[3] + v_cache.shape[3])
    scale = options.get("k_scale")
    scales = 0 if scale is None or scale.dim() == 1 else 2 * 4 * options["tokens"] * k_cache.shape[2]
    default = torch.bfloat16 if k_cache.dtype == E4M3 else k_cache.dtype
    written = elements * (options.get("out_dtype") or default).itemsize
    metadata = rows.nbytes(lengths, options.get("cu_seqlens"))
    return Cost(elements, elements * k_cache.element_size() + scales + metadata, written)


def _fwd(name: str, params: Mapping[str, Any]) -> Workload:
    return Workload(name, params, directions=("fwd",))


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object], **params: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        sample = inputs({**_SMALL, "lengths": [5, 6], "new": [2, 1], **params}, torch.bfloat16, device, 0)
        names = ("k_cache", "v_cache", "lengths")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in names), arguments)

    return BadInput(name, make, match)


_LLAMA_8B = {"H_kv": 8, "D": 128, "page_size": 16}
_SMALL = {"H_kv": 2, "D": 16, "page_size": 4}
_EVEN = [1024] * 8
_RAGGED = {"lengths": [9, 3, 12], "new": [9, 0, 5]}
CONTRACT = register(
    Contract(
        name=OP,
        family="kvcache",
        summary="tokens of a paged or contiguous KV cache as packed tensors",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            _fwd("llama8b_8x1k", {**_LLAMA_8B, "lengths": _EVEN, "new": _EVEN}),
            _fwd("llama8b_ragged", {**_LLAMA_8B, "lengths": [5000, 17, 1175, 2000], "new": [5000, 17, 1175, 2000]}),
            _fwd("llama8b_e4m3_tokens", {**_LLAMA_8B, "lengths": _EVEN, "new": _EVEN, "scales": "token"}),
            _fwd("llama8b_e4m3_heads", {**_LLAMA_8B, "lengths": _EVEN, "new": _EVEN, "scales": "head"}),
            _fwd("qwen7b_1x32k", {"H_kv": 4, "D": 128, "page_size": 64, "lengths": [32768], "new": [32768]}),
        ),
        cpu_workloads=(
            Workload("small", {**_LLAMA_8B, "lengths": [128] * 4, "new": 128}, (torch.bfloat16, torch.float32)),
        ),
        edge_cases=(
            _fwd("whole: all of each sequence", {**_SMALL, "lengths": [9, 3, 4], "new": [9, 3, 4]}),
            _fwd("ends: the last tokens of each sequence", {**_SMALL, **_RAGGED}),
            _fwd("last_token: of each sequence, without cu_seqlens", {**_SMALL, "lengths": [4, 5, 1, 8], "new": 1}),
            _fwd("odd_page: pages of 3 tokens", {**_SMALL, **_RAGGED, "page_size": 3}),
            _fwd("page_1: a page a token", {**_SMALL, **_RAGGED, "page_size": 1}),
            _fwd("contiguous: a page is a sequence", {**_SMALL, **_RAGGED, "page_size": None, "capacity": 15}),
            _fwd("padding: rows of 0", {**_SMALL, "lengths": [5, 0, 6], "new": [2, 0, 6], "padding": 3}),
            _fwd("left_out: sequences of length 0", {**_SMALL, "lengths": [0, 5, 0], "new": 2}),
            _fwd("d_80: no power of two, another D of v", {**_SMALL, **_RAGGED, "D": 80, "D_v": 5}),
            _fwd("heads_first: strides of another layout", {**_SMALL, **_RAGGED, "heads_first": True}),
            _fwd("e4m3_heads: to bf16", {**_SMALL, **_RAGGED, "scales": "head"}),
            _fwd("e4m3_tokens: to float32", {**_SMALL, **_RAGGED, "scales": "token", "out_dtype": torch.float32}),
            _fwd("narrower: rounded to fp16", {**_SMALL, **_RAGGED, "out_dtype": torch.float16}),
            _fwd("empty: no tokens", {**_SMALL, "lengths": [4, 2], "new": 0}),
            _fwd("no_sequences: an empty batch", {**_SMALL, "lengths": [], "new": 1}),
        ),
        bad_inputs=(
            _bad("int64 lengths", r"lengths is \(2,\) torch.int64; needs int32", replaced("lengths", Tensor.long)),
            _bad("negative tokens", "tokens is -1", lambda a: a.update(tokens=-1)),
            _bad("tokens as a tensor", "tokens is a Tensor", lambda a: a.update(tokens=torch.tensor(3))),
            _bad("e4m3 out", "out_dtype is torch.float8_e4m3fn", lambda a: a.update(out_dtype=E4M3)),
            _bad("e4m3 without scales", "needs both", lambda a: a.pop("k_scale"), scales="token"),
            _bad("flat table", r"block_table is \(4,\)", replaced("block_table", Tensor.flatten)),
        ),
        batch_dim=None,  # tokens of all sequences are packed
        edge_grid={**EDGE_GRID, "H_kv": (1, 2, 3, 8)},
        promises=Promises(reference_bits=True),
    )
)
