"""FlashInfer's attention over a KV cache.  It plans on the host, before anything is timed."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.attention.paged.args import PagedArgs, problem_of
from tilewright.ops.peer import Call

_PAGE_SIZES = (64, 16)
_WORKSPACE = 256 << 20  # bytes, for parts of split sequences


class Pages(NamedTuple):
    """A cache and its block table as FlashInfer takes them: compressed rows."""

    starts: Tensor  # (B + 1,) int32
    pages: Tensor  # (starts[B],) int32
    last: Tensor  # (B,) int32, tokens of the last page
    caches: tuple[Tensor, Tensor]  # (pages, page_size, H_kv, D)


def pages_of(args: PagedArgs) -> Pages | None:
    """The pages in use.  None where a sequence is empty.

    A contiguous cache is cut into pages, because sequences are divided at pages alone.
    """
    lengths, device, table = args.lengths.tolist(), args.q.device, args.block_table
    if min(lengths, default=0) == 0:
        return None
    caches, page_size = (args.k_cache, args.v_cache), args.k_cache.shape[1]
    if table is None:
        size = next(n for n in (*_PAGE_SIZES, page_size) if page_size % n == 0)
        caches = (_cut(args.k_cache, size), _cut(args.v_cache, size))
        table = torch.arange(caches[0].shape[0], dtype=torch.int32, device=device).view(len(lengths), -1)
        page_size = size
    counts = [-(-n // page_size) for n in lengths]
    pages = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32, device=device)
    return Pages(starts, pages, last, caches)


def _cut(cache: Tensor, page_size: int) -> Tensor:
    return cache.view(-1, page_size, *cache.shape[2:])


def _unfit(args: PagedArgs, sample: Sample) -> bool:
    """Options that its wrappers lack, or that this file does not translate; float32 has no kernel."""
    options = args.sinks is not None or args.k_scale is not None or bool(sample.kwargs.get("return_lse"))
    strided = any(not cache.is_contiguous() for cache in (args.k_cache, args.v_cache))
    return options or strided or args.q.dtype not in (torch.float16, torch.bfloat16)


def _options(args: PagedArgs) -> dict[str, Any]:
    return {
        "sm_scale": args.scale, "window_left": args.left, "logits_soft_cap": args.softcap or None,
        "q_data_type": args.q.dtype, "kv_data_type": args.k_cache.dtype,
    }  # fmt: skip


@dataclass(frozen=True)
class Decode:
    """`BatchDecodeWithPagedKVCacheWrapper`, for one token a sequence."""

    name: str
    tensor_cores: bool
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """Only where it is installed."""
        return find_spec("flashinfer") is not None

    def make(self, sample: Sample) -> Call | None:
        """The planned call."""
        args = problem_of(sample)
        d, batch = args.q.shape[2], args.lengths.shape[0]
        one_each = args.cu_seqlens is None and args.q.shape[0] == batch
        if _unfit(args, sample) or not one_each or args.v_cache.shape[3] != d:
            return None
        rows = pages_of(args)
        if rows is None:
            return None
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=args.q.device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=self.tensor_cores)
        page_size = rows.caches[0].shape[1]
        wrapper.plan(*rows[:3], args.q.shape[1], args.k_cache.shape[2], d, page_size, **_options(args))
        return _running(wrapper, args, rows, sample)


@dataclass(frozen=True)
class Prefill:
    """`BatchPrefillWithPagedKVCacheWrapper`, for any number of tokens a sequence."""

    name: str
    devices: tuple[str, ...] = ("cuda",)

    def available(self) -> bool:
        """Only where it is installed."""
        return find_spec("flashinfer") is not None

    def make(self, sample: Sample) -> Call | None:
        """The planned call; one token for each sequence is `Decode`'s."""
        args = problem_of(sample)
        tokens, batch, cu = args.q.shape[0], args.lengths.shape[0], args.cu_seqlens
        if _unfit(args, sample) or (cu is None and tokens == batch):
            return None
        rows = pages_of(args)
        if rows is None:
            return None
        if cu is None:
            cu = torch.arange(0, tokens + 1, tokens // batch, dtype=torch.int32, device=args.q.device)
        if int(cu[-1]) != tokens:
            return None
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=args.q.device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            cu, *rows[:3], args.q.shape[1], args.k_cache.shape[2], args.q.shape[2], rows.caches[0].shape[1],
            head_dim_vo=args.v_cache.shape[3], causal=args.causal, **_options(args),
        )  # fmt: skip
        return _running(wrapper, args, rows, sample)


def _running(wrapper: Any, args: PagedArgs, rows: Pages, sample: Sample) -> Call:
    shape = (*sample.args[0].shape[:-1], args.v_cache.shape[3])

    def call() -> Tensor:
        o: Tensor = wrapper.run(args.q, rows.caches)
        return o.view(shape)

    return call
