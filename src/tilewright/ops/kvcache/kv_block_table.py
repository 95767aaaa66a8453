"""Page lists in compressed rows (CSR), as FlashInfer keeps them, into the block table that ops of this library take."""

from collections.abc import Mapping
from itertools import accumulate
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
    call,
    dispatch,
    register,
)
from tilewright.dispatch.arguments import Size, as_int
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.dispatch.targets import several
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache import checks

OP = "kv_block_table"


class KvBlockTableArgs(NamedTuple):
    indptr: Tensor  # (B + 1,)
    indices: Tensor  # (N,)
    last_page_len: Tensor  # (B,)
    page_size: Size
    max_pages: Size


class KvBlockTableBucket(NamedTuple):
    B: int  # sequences, rounded up to a power of two
    max_pages: int


@dispatch(OP)
def kv_block_table(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    *,
    page_size: int,
    max_pages: int,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(block_table, lengths) of sequences whose pages lie end to end: block_table[b, j] = indices[indptr[b] + j].

    FlashInfer's `paged_kv_indptr`, `paged_kv_indices` and `paged_kv_last_page_len`, for `fmha_decode`, `fmha_paged` and
    the ops over a KV cache.  One call a step serves all layers, and a CUDA graph may hold it with them:
    `block_table, lengths = kv_block_table(indptr, indices, last, page_size=16, max_pages=512)`.
    indptr:        (B + 1,) int32, from 0, not decreasing, at most N: sequence b has n_b = indptr[b + 1] - indptr[b]
                   pages.
    indices:       (N,) int32, the pages.   Memory behind indptr[B] may hold anything.
    last_page_len: (B,) int32, tokens in the last page of each sequence, 1 to page_size; not read where n_b = 0.
    max_pages:     columns of the table, a number of the host: the most pages of a sequence.
    Returns block_table (B, max_pages) int32, 0 behind the last page, and lengths (B,) int32, (n_b - 1) * page_size +
    last_page_len[b], 0 where n_b = 0.   out: that pair, in contiguous memory, to write instead of allocating.

    Nothing is read on the host.  On a CPU, and on a GPU under TILEWRIGHT_CHECK=1, numbers that break these rules raise
    InputError; otherwise entries outside of `indices` are 0, and pages from max_pages on are left out.
    backend: run on exactly this backend ("triton", "torch") or raise BackendError.
    Raises InputError for other shapes, dtypes and devices.
    Source: Ye et al., "FlashInfer", 2025.
    """
    args = KvBlockTableArgs(indptr, indices, last_page_len, page_size, max_pages)
    result: tuple[Tensor, Tensor] = call(CONTRACT, args, backend, several(out, 2, 2))
    return result if out is None else out


def reference(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, page_size: int, max_pages: int
) -> tuple[Tensor, Tensor]:
    """Plain torch."""
    starts, counts = indptr[:-1].long(), indptr.diff()
    column = torch.arange(max_pages, device=indptr.device)
    place = starts[:, None] + column
    inside = (column < counts[:, None]) & (place >= 0) & (place < indices.shape[0])
    padded = torch.cat((indices, indices.new_zeros(1)))
    table = padded[torch.where(inside, place, indices.shape[0])]
    return table, torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0).to(torch.int32)


FORWARD = RawOp(
    OP,
    "fwd",
    KvBlockTableArgs,
    package="tilewright.ops.kvcache",
    kernels=("triton.kv_block_table",),
    outputs=lambda args: (
        ((args.last_page_len.shape[0], args.max_pages), torch.int32),
        ((args.last_page_len.shape[0],), torch.int32),
    ),
    reference=lambda args: reference(*args[:3], page_size=args.page_size, max_pages=args.max_pages),
    bucket=lambda args: KvBlockTableBucket(row_bucket(hint(args.last_page_len.shape[0])), hint(args.max_pages)),
    bucket_names=KvBlockTableBucket._fields,
    count=2,
    out=True,
    dtypes=(torch.int32,),
)


def check(args: KvBlockTableArgs) -> None:
    """Raise InputError for what the docstring of `kv_block_table` excludes."""
    for name, t in (("indptr", args.indptr), ("indices", args.indices), ("last_page_len", args.last_page_len)):
        if not isinstance(t, Tensor):
            raise InputError(f"{OP}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.device != args.indptr.device:
            raise InputError(f"{OP}: {name} is on {t.device}, indptr on {args.indptr.device}. Move them to one device.")
    checks.check_integers(OP, args.indptr, indptr=(args.indptr, None), indices=(args.indices, None))
    if not args.indptr.shape[0]:
        raise InputError(f"{OP}: indptr is (0,); needs one number more than there are sequences.")
    batch = (args.indptr.shape[0] - 1,)
    checks.check_integers(OP, args.indptr, last_page_len=(args.last_page_len, batch))
    for name, value, least in (("page_size", args.page_size, 1), ("max_pages", args.max_pages, 0)):
        if as_int(OP, name, value) < least:
            raise InputError(f"{OP}: {name} is {value}; needs a number from {least}.")
    if checks.may_read(args.indptr):
        _check_numbers(args)


def _check_numbers(args: KvBlockTableArgs) -> None:
    bounds, last = args.indptr.long().cpu(), args.last_page_len.long().cpu()
    counts = bounds.diff()
    if int(bounds[0]) != 0 or int(bounds[-1]) > args.indices.shape[0] or bool((counts < 0).any()):
        raise InputError(
            f"{OP}: indptr is {bounds.tolist()[:9]}; must not fall, from 0 to at most N = {args.indices.shape[0]}."
        )
    if bool((counts > args.max_pages).any()):
        raise InputError(f"{OP}: a sequence has {int(counts.max())} pages; max_pages is {args.max_pages}.")
    wrong = (counts > 0) & ((last < 1) | (last > args.page_size))
    if bool(wrong.any()):
        raise InputError(f"{OP}: last_page_len is {int(last[wrong][0])}; needs 1 to page_size, {args.page_size}.")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: lengths of sequences, in an order that `seed` turns, page_size; optional max_pages, and slack, entries
    behind the last page.
    """
    lengths, page_size, generator = params["lengths"], params["page_size"], rows.generator(seed)
    turn = seed % max(len(lengths), 1)
    lengths = [*lengths[turn:], *lengths[:turn]]
    counts = [-(-n // page_size) for n in lengths]
    indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    entries = sum(counts) + params.get("slack", 0)
    indices = torch.randint(0, 1 << 20, (entries,), generator=generator, dtype=torch.int32)
    last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)
    most = params.get("max_pages", max(counts, default=1))
    tensors = (indptr.to(device), indices.to(device), last.to(device))
    return Sample(tensors, {"page_size": page_size, "max_pages": most})


def cost(sample: Sample, direction: str) -> Cost:
    """Reads the list, writes the table; a comparison an entry."""
    last = sample.args[2]
    table = last.shape[0] * sample.kwargs["max_pages"]
    return Cost(table, rows.nbytes(*sample.args), 4 * table + 4 * last.shape[0])


def _case(name: str, lengths: list[int], page_size: int, **options: Any) -> Workload:
    params = {"lengths": lengths, "page_size": page_size, **options}
    return Workload(name, params, (torch.int32,), ("fwd",))


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        sample = inputs({"lengths": [5, 9], "page_size": 4}, torch.int32, device, 0)
        names = ("indptr", "indices", "last_page_len")
        arguments = {**dict(zip(names, sample.args, strict=True)), **sample.kwargs}
        for argument, change in changes.items():
            arguments[argument] = change(arguments[argument]) if callable(change) else change
        return Sample(tuple(arguments.pop(n) for n in names), arguments)

    return BadInput(name, make, match)


CONTRACT = register(
    Contract(
        name=OP,
        family="kvcache",
        summary="page lists in compressed rows (CSR) as a block table and lengths",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(
            _case("64x8k", [8192 - 37 * b for b in range(64)], 16, max_pages=512),
            _case("256x32k_page_1", [32768 - 101 * b for b in range(256)], 1, max_pages=32768),
        ),
        cpu_workloads=(_case("small", [512 - 31 * b for b in range(8)], 16, max_pages=32),),
        edge_cases=(
            _case("ragged: an empty sequence, full last pages", [5, 0, 8, 3, 16], 4),
            _case("one: a sequence of one token", [1], 16),
            _case("page_1: a page a token", [7, 1, 3], 1),
            _case("wide: columns behind the longest, entries behind the last", [9, 2], 4, max_pages=300, slack=5),
            _case("blocks: more columns than a program", [5000, 1, 4097], 1, max_pages=5003),
            _case("no_pages: a table without columns", [0, 0], 4, max_pages=0),
            _case("no_sequences: an empty batch", [], 4, max_pages=3),
        ),
        bad_inputs=(
            _bad("indptr of 64 bits", "indptr is .* torch.int64", indptr=Tensor.long),
            _bad("no indptr", r"indptr is \(0,\)", indptr=lambda t: t[:0]),
            _bad("flat last", r"last_page_len is \(1,\)", last_page_len=lambda t: t[:1]),
            _bad("indices as a table", r"indices is \(5, 1\)", indices=lambda t: t[:, None]),
            _bad("page_size of 0", "page_size is 0", page_size=0),
            _bad("negative max_pages", "max_pages is -1", max_pages=-1),
            _bad("max_pages as a tensor", "max_pages is a Tensor", max_pages=torch.tensor(3)),
        ),
        batch_dim=None,
        promises=Promises(reference_bits=True),
    )
)
