"""Packed sequences as a leaf: every query sees one interval of keys, stored as two numbers.

Within a sequence the last query stands at the last key, so query i of document d has position
i - cu_q[d + 1] + cu_k[d + 1] among all keys; it sees the keys of its document that lie in a band around that position.
Neither end of the intervals decreases from query to query, so tiles are classified exactly: a binary search finds the
first and the last query that see a key of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.dispatch.backends import module_exists
from tilewright.errors import InputError
from tilewright.hardware.graph_capture import current_capture
from tilewright.jit.collect import collecting
from tilewright.mask.algebra import HIGHEST, LOWEST, Band, Mask, MaskMod, refuse
from tilewright.mask.leaves import TensorLeaf, check_size, narrowed
from tilewright.mask.leaves import causal as causal_band
from tilewright.mask.leaves import window as window_band
from tilewright.mask.program import HEADER_OF_SEQUENCES, Part

PACKED_PROGRAMS = "seq:0", "seq.b:0"
"""The programs of packed sequences and nothing else, the same for all rows of the batch or for each its own."""


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    length_q: int,
    length_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Mask:
    """Query and key in the same document, of sequences packed end to end; `causal` and `window` within each.

    cu_seqlens_q, cu_seqlens_k: (documents + 1,) int, from 0, never decreasing, where the queries and the keys of each
    document begin; the keys' are the queries' by default.  Either side of a document may be empty.  length_q, length_k:
    S_q and S_k of the attention; tokens after the last document see nothing and are seen by none.
    In each document the last query sees the last key (bottom right); window: (left, right) around that position, None
    for no limit.  Made on the tensors' device without a synchronisation, so it may be made in a CUDA graph or under
    torch.compile.  Raises InputError for shapes and dtypes that do not fit.
    """
    cu_q, cu_k = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.numel() < 1 or cu.is_floating_point() or cu.dtype == torch.bool:
            raise refuse(name, (tuple(cu.shape), cu.dtype), "(documents + 1,) int")
    if cu_q.shape != cu_k.shape or cu_q.device != cu_k.device:
        shapes = [(tuple(cu.shape), str(cu.device)) for cu in (cu_q, cu_k)]
        raise refuse("cu_seqlens", shapes, "queries and keys have as many documents, on one device")
    band = window_band(None, None) if window is None else window_band(*window)
    if causal:
        band = band & causal_band()  # not `&=`, which the Dynamo of torch 2.11 cannot trace
    assert isinstance(band, Band), "an intersection of bands is a band"
    keys = length_q if length_k is None else length_k
    if _launchable(cu_q) and _launchable(cu_k):
        return _written(cu_q, cu_k, length_q, keys, band)
    return Sequences(_table(cu_q, cu_k, length_q, keys, band)[None], keys)


def _launchable(cu: Tensor) -> bool:
    """Can a kernel of ours read these boundaries now?  A trace keeps torch's steps, for other boundaries too."""
    if torch.compiler.is_compiling() or not module_exists("triton"):
        return False
    collector = collecting()
    if collector is not None:  # the kernels of calls are listed, for a GPU that need not be here
        return collector.arch != "cpu"
    if cu.device.type != "cuda":
        return False
    if type(cu) is not Tensor or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return False
    return not torch._C._are_functorch_transforms_active()  # they would wrap the mask, too


def _written(cu_q: Tensor, cu_k: Tensor, length_q: int, length_k: int, band: Band) -> "Sequences":
    """The mask with its whole program, from a kernel."""
    from tilewright.mask import triton_packed

    same, cu_q = cu_k is cu_q, cu_q.contiguous()
    size = HEADER_OF_SEQUENCES + 3 * length_q
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a mask made in inference may serve training later
            data = torch.empty(size, dtype=torch.int32, device=cu_q.device)
    else:
        data = torch.empty(size, dtype=torch.int32, device=cu_q.device)
    limits = _limits(band, length_q + length_k)
    triton_packed.write(data, cu_q, cu_q if same else cu_k.contiguous(), (length_q, length_k), limits)
    return Sequences(data[HEADER_OF_SEQUENCES:].view(1, 3, length_q), length_k, data)


def _limits(band: Band, furthest: int) -> tuple[int | None, int | None]:
    """(low, high) of a band, at most `furthest` from 0, None for a side without a limit."""
    low = None if band.low == LOWEST else min(max(band.low, -furthest), furthest)
    return low, None if band.high == HIGHEST else min(max(band.high, -furthest), furthest)


def _table(cu_q: Tensor, cu_k: Tensor, length_q: int, length_k: int, band: Band) -> Tensor:
    """int32 (3, length_q): a row of `Sequences.table`, in as few torch calls as possible, because each is a launch."""
    same, cu_q, cu_k = cu_k is cu_q, cu_q.to(torch.int32).contiguous(), cu_k.to(torch.int32)
    queries = torch.arange(length_q, dtype=torch.int32, device=cu_q.device)
    return intervals(queries, cu_q, cu_k, band, length_q + length_k, same)


def intervals(queries: Tensor, cu_q: Tensor, cu_k: Tensor, band: Band, furthest: int, same: bool = True) -> Tensor:
    """int32 (3, queries): a row of `Sequences.table` for these indices of queries that `cu_q` divides; all int32.

    furthest: larger than every distance, so that positions stay in int32.  same: `cu_q` and `cu_k` are equal.
    """
    # Documents that begin at a query or before it: the number of the query's document, or beyond the last one
    number = torch.bucketize(queries, cu_q, right=True)
    bounds = torch.cat((cu_k[:1], cu_k, cu_k[-1:]))
    begin, end = bounds.unfold(0, 2, 1)[number].unbind(1)
    position = queries if same else queries + (bounds[1:] - torch.cat((cu_q, cu_q[-1:])))[number]
    return bounded(begin, end, position, band, furthest)


def bounded(begin: Tensor, end: Tensor, position: Tensor, band: Band, furthest: int) -> Tensor:
    """int32 (.., 3, queries): the part of the keys begin .. end - 1 that a band leaves, and `Sequences`' counts.

    begin, end: (.., queries), position: (queries,), int32; none of them decreases.  furthest: as for `intervals`.
    """
    (low, high), first, stop = _limits(band, furthest), begin, end
    if high is not None:
        first = (position - high).clamp(begin, end)
    if low is not None:
        stop = (position + (1 - low)).clamp(begin, end)
    return torch.stack((first, stop, (first < stop).cumsum(-1, dtype=torch.int32)), -2)


@dataclass(frozen=True, eq=False)
class Sequences(TensorLeaf):
    """table: (B or 1, 3, S_q) int32, for every query the first and the end of the keys that it sees, neither of which
    decreases (first >= end: none), and how many queries up to it see any key.   data: the whole program, where a kernel
    has written it; the table is its end.
    """

    table: Tensor
    length_k: int
    data: Tensor | None = None

    def __repr__(self) -> str:
        return f"sequences({self.table.shape[2]}, {self.length_k})"

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        lengths = self.table.shape[2], self.length_k
        if lengths != (s_q, s_k):
            raise InputError(f"sequences: made for (S_q, S_k) = {lengths}; the attention has {(s_q, s_k)}")
        check_size("sequences", "B", self.table.shape[0], batch)

    @property
    def mask_mod(self) -> MaskMod:
        (first, end, _), (rows, _, length) = self.table.unbind(1), self.table.shape
        shift, by_batch = self.length_k - length, int(rows > 1)

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            row, i = b * by_batch, (q - shift).clamp(0, length - 1)
            return (i == q - shift) & (first[row, i] <= k) & (k < end[row, i])

        return allowed

    def to(self, device: torch.device | str) -> Mask:
        return Sequences(self.table.to(device), self.length_k)

    def narrow(self, start: int, length: int) -> Mask:
        return Sequences(narrowed(self.table, start, length), self.length_k)

    def _kept_program(self, device: torch.device, sizes: tuple[int, int] | None) -> tuple[str, Tensor]:
        if self.data is None or self.data.device != device or torch.compiler.is_compiling():
            return super()._kept_program(device, sizes)
        if current_capture(device) is not None:  # the graph keeps what it reads
            return super()._kept_program(device, sizes)
        self.await_tensors()
        return PACKED_PROGRAMS[0], self.data

    def _new_program(self, device: torch.device, sizes: tuple[int, int] | None) -> tuple[str, Tensor]:
        if self.data is not None and self.data.device == device:
            return PACKED_PROGRAMS[0], self.data
        return super()._new_program(device, sizes)

    def _words(self) -> Iterator[Part | str]:
        rows, _, length = self.table.shape
        yield Part("seq.b" if rows > 1 else "seq", (length, self.length_k - length), self.table.flatten())
