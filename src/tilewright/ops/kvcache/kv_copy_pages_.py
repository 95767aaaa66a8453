"""Copy pages inside of a KV cache: the write of copy-on-write, where sequences share a prefix."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import (
    BadInput,
    Contract,
    Cost,
    Promises,
    RawOp,
    Sample,
    Workload,
    call_in_place,
    dispatch,
    register,
)
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import checks, layout
from tilewright.ops.kvcache.samples import problem, replaced
from tilewright.ops.quant.numbers import E4M3

OP = "kv_copy_pages_"


class KvCopyPagesArgs(NamedTuple):
    k_cache: Tensor  # (pages, page_size, H_kv, D)
    v_cache: Tensor  # (pages, page_size, H_kv, D_v)
    src: Tensor  # (N,)
    dst: Tensor  # (N,)
    k_scale: Tensor | None  # (pages, page_size, H_kv)
    v_scale: Tensor | None


class KvCopyPagesBucket(NamedTuple):
    N: int  # pairs, rounded up to a power of two
    page_size: int
    H_kv: int
    D: int


@dispatch(OP)
def kv_copy_pages_(
    k_cache: Tensor,
    v_cache: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """cache[dst[i]] = cache[src[i]] for both caches and every pair i.  Writes into the caches and scales; returns None.

    k_cache: (pages, page_size, H_kv, D) bf16|fp16|fp32|e4m3, any strides.   v_cache: the same, D_v.
    src, dst: (N,) int32, on the device.   A pair with a negative page is left out: a captured graph serves fewer pairs.
    k_scale, v_scale: (pages, page_size, H_kv) float32, scales of tokens, copied too.  Scales of heads are not given.

    The pages of dst must differ from one another and from those of src: the copies have no order.  Pages outside of the
    cache, and a dst that breaks the rule, raise InputError on a CPU and under TILEWRIGHT_CHECK=1; otherwise a pair
    outside of the cache is left out.  Nothing is read on the host.  There is no gradient.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for shapes, dtypes or devices other than these, and for tensors that require a gradient.
    """
    call_in_place(CONTRACT, KvCopyPagesArgs(k_cache, v_cache, src, dst, k_scale, v_scale), backend)


def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Plain torch, in place too."""
    for t in (k_cache, v_cache, k_scale, v_scale):
        if t is not None:
            layout.copy_pages(t, src, dst)


def _raw(args: KvCopyPagesArgs) -> None:
    return reference(args.k_cache, args.v_cache, args.src, args.dst, k_scale=args.k_scale, v_scale=args.v_scale)


def bucket(args: KvCopyPagesArgs) -> KvCopyPagesBucket:
    """The bucket of a call."""
    _, page_size, heads, depth = args.k_cache.shape
    width = max(hint(depth), hint(args.v_cache.shape[3]))
    return KvCopyPagesBucket(row_bucket(args.src.shape[0]), hint(page_size), hint(heads), width)


FORWARD = RawOp(
    OP,
    "fwd",
    KvCopyPagesArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.kv_copy_pages",),
    outputs=lambda args: (),
    reference=_raw,
    bucket=bucket,
    bucket_names=KvCopyPagesBucket._fields,
    count=0,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    dtypes=(*checks.DTYPES, E4M3),
)


def check(args: KvCopyPagesArgs) -> None:
    """Raise InputError for what the docstring of `kv_copy_pages_` excludes."""
    cache = args.k_cache
    checks.check_forms(OP, cache, args.v_cache)
    checks.check_tensors(OP, cache, k_scale=args.k_scale, v_scale=args.v_scale)
    for name, scale in (("k_scale", args.k_scale), ("v_scale", args.v_scale)):
        if scale is not None and (scale.shape != cache.shape[:3] or scale.dtype != torch.float32):
            raise InputError(
                f"{OP}: {name} is {tuple(scale.shape)} {scale.dtype}; needs float32 {tuple(cache.shape[:3])}, or None: "
                "scales of heads are not copied."
            )
    if not isinstance(args.src, Tensor) or not isinstance(args.dst, Tensor):
        raise InputError(f"{OP}: src and dst must be tensors, int32 (N,).")
    checks.check_integers(OP, cache, src=(args.src, None), dst=(args.dst, tuple(args.src.shape)))
    if checks.may_read(args.src):
        _check_pairs(cache.shape[0], args.src.cpu(), args.dst.cpu())


def _check_pairs(pages: int, src: Tensor, dst: Tensor) -> None:
    src, dst = src[(src >= 0) & (dst >= 0)], dst[(src >= 0) & (dst >= 0)]
    if src.numel() and max(int(src.max()), int(dst.max())) >= pages:
        raise InputError(f"{OP}: pages reach to {max(int(src.max()), int(dst.max()))}; needs 0 to {pages - 1}.")
    if dst.unique().numel() < dst.numel() or torch.isin(dst, src).any():
        raise InputError(f"{OP}: a page of dst is there twice, or in src too; the copies have no order.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: pages, page_size, H_kv, D, optional D_v, scales, heads_first, N (pairs), left_out (of them)."""
    pages, pairs = params["pages"], params["N"]
    sizes = {"lengths": [params["page_size"]] * pages, "new": 0}
    caches = problem({**params, "page_size": None, **sizes}, dtype, device, seed)
    order = torch.randperm(pages, generator=rows.generator(seed + 1)).to(torch.int32)
    dst = order[:pairs]
    src = order[pairs:][torch.arange(pairs) % max(pages - pairs, 1)] if pairs else dst  # a page may be copied twice
    if params.get("left_out"):
        src[::2], dst[1::3] = -1, -7
    options = caches.options if params.get("scales") == "token" else {}
    return Sample((caches.k_cache, caches.v_cache, src.to(device), dst.to(device)), options)


def cost(sample: Sample, direction: str) -> Cost:
    """Reads and writes the pages of all pairs, once; an operation an element."""
    tensors = [t for t in (*sample.args[:2], *sample.kwargs.values()) if t is not None]
    src = sample.args[2]
    copied = sum(src.shape[0] * rows.nbytes(t) // max(t.shape[0], 1) for t in tensors)
    elements = sum(src.shape[0] * t.numel() // max(t.shape[0], 1) for t in tensors)
    return Cost(elements, copied + 2 * rows.nbytes(src), copied)


def _fwd(name: str, params: Mapping[str, Any]) -> Workload:
    return Workload(name, params, directions=("fwd",))


def _bad(name: str, match: str, change: Callable[[dict[str, Any]], object]) -> BadInput:
    def make(device: torch.device) -> Sample:
        sample = inputs({**_SMALL, "N": 2}, torch.bfloat16, device, 0)
        names = ("k_cache", "v_cache", "src", "dst")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        change(arguments)
        return Sample(tuple(arguments.pop(name) for name in names), arguments)

    return BadInput(name, make, match)


_LLAMA_8B = {"page_size": 16, "H_kv": 8, "D": 128}
_SMALL = {"pages": 7, "page_size": 3, "H_kv": 2, "D": 16}
CONTRACT = register(
    Contract(
        name=OP,
        family="kvcache",
        summary="pages of a KV cache, copied inside of it",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            *(_fwd(f"llama8b_{n}", {**_LLAMA_8B, "pages": 2 * n, "N": n}) for n in (1, 16, 256, 2048)),
            _fwd("llama8b_256_e4m3", {**_LLAMA_8B, "page_size": 64, "pages": 512, "N": 256, "scales": "token"}),
        ),
        cpu_workloads=(Workload("small", {**_LLAMA_8B, "pages": 64, "N": 64 - 1}, (torch.bfloat16, torch.float32)),),
        edge_cases=(
            _fwd("pairs: one page to several", {**_SMALL, "N": 5}),
            _fwd("left_out: pairs with negative pages", {**_SMALL, "N": 3, "left_out": True}),
            _fwd("all_left_out: nothing is copied", {**_SMALL, "N": 1, "left_out": True}),
            _fwd("page_1: a page a token", {**_SMALL, "page_size": 1, "N": 2}),
            _fwd("long_page: more rows than a program takes", {**_SMALL, "page_size": 67, "N": 2}),
            _fwd("d_80: no power of two, another D of v", {**_SMALL, "D": 80, "D_v": 5, "N": 2}),
            _fwd("heads_first: strides of another layout", {**_SMALL, "heads_first": True, "N": 2}),
            _fwd("e4m3: with scales of tokens", {**_SMALL, "scales": "token", "N": 3}),
            _fwd("e4m3_heads: without", {**_SMALL, "scales": "head", "N": 3}),
            _fwd("empty: no pairs", {**_SMALL, "N": 0}),
        ),
        bad_inputs=(
            _bad("int64 pages", r"src is \(2,\) torch.int64; needs int32", replaced("src", Tensor.long)),
            _bad("other count", r"dst is \(1,\) torch.int32; needs int32, \(2,\)", replaced("dst", lambda t: t[:1])),
            _bad("a list", "must be tensors", lambda a: a.update(src=[0, 1])),
            _bad(
                "scales of heads",
                "scales of heads are not copied",
                lambda a: a.update(k_scale=a["k_cache"].new_ones(2).float()),
            ),
            _bad("another cache", "they must have one dtype", replaced("v_cache", lambda t: t[1:])),
            _bad("expanded cache", "k_cache is expanded", replaced("k_cache", lambda t: t[:1].expand(t.shape))),
            _bad("flat cache", r"k_cache is \(7, 96\)", replaced("k_cache", lambda t: t.flatten(1))),
        ),
        batch_dim=None,  # pages are no rows of a batch
        edge_grid={
            "pages": (2, 7, 40),
            "N": lambda params: [0, 1, params["pages"] // 2, params["pages"] - 1],
            "page_size": (1, 3, 16, 67),
            "H_kv": (1, 2, 3, 8),
        },
        promises=Promises(reference_bits=True),
    )
)
