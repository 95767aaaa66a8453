"""Documents as a leaf: by the id of every key, or packed end to end.  Where each is one run of keys, kernels get
`Sequences`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.errors import InputError
from tilewright.mask.algebra import EVERYTHING, Band, Mask, MaskMod, refuse
from tilewright.mask.leaves import TensorLeaf, check_size, narrowed
from tilewright.mask.packed import Sequences, bounded, intervals
from tilewright.mask.program import Part


def document(
    ids: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
    contiguous: bool = False,
) -> Mask:
    """Query and key in the same document.

    ids: (S_k,) or (B, S_k) int of 32 bits, the document of every key; with S_q < S_k the queries are the last.
    contiguous: a document is a run of neighbouring keys with one id, and an id that comes again begins another
    document.  Where no id comes again, as where ids never decrease, that changes no result.  Ids on a CPU are looked
    at, so there nothing need be said; those on a GPU are not, which would wait for it.
    Or cu_seqlens: (documents + 1,) int, from 0, as for packed sequences, with `length` = S_k, which otherwise is read
    from the device; keys after the last boundary are one document.
    Alone or with a band, documents of cu_seqlens and contiguous ones become `sequences` in kernels: one interval of
    keys per query.  Tile tables of other ids are exact where ids never decrease, sound otherwise.
    """
    if (ids is None) == (cu_seqlens is None):
        raise InputError("document: give either ids or cu_seqlens=")
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise refuse("cu_seqlens", tuple(cu_seqlens.shape), "(documents + 1,) int")
        size = int(cu_seqlens[-1]) if length is None else length
        return PackedDocuments(cu_seqlens.clamp(max=size).to(torch.int32), size)
    assert ids is not None
    if ids.dim() not in (1, 2) or ids.is_floating_point() or (ids.dim() == 2 and not len(ids)):
        raise refuse("ids", (tuple(ids.shape), ids.dtype), "(S_k,) or (B, S_k) int")
    if length is not None and length != ids.shape[-1]:
        raise refuse("length", length, f"ids are {ids.shape[-1]} long")
    copied = torch.atleast_2d(ids).to(torch.int32, copy=True).contiguous()
    if contiguous or (_readable(ids) and _none_comes_again(copied)):
        return Document(_run_numbers(copied), True)
    return Document(copied)


def _run_numbers(ids: Tensor) -> Tensor:
    """(rows, S_k) int32: the number of each key's run of equal ids, from 0 in each row."""
    changes = ids.diff(prepend=ids[:, :1])  # 0 for equal ids alone, also where the difference overflows
    return (changes != 0).cumsum(1, dtype=torch.int32)


def _none_comes_again(ids: Tensor) -> bool:
    """True if every id of a row is one run: there are no more runs than ids."""
    return torch.equal(_run_numbers(ids)[:, -1:], _run_numbers(ids.sort(1).values)[:, -1:])


def _readable(ids: Tensor) -> bool:
    """True if the ids can be looked at: on a CPU, and in no trace, whose program would serve other ids too."""
    if torch.compiler.is_compiling() or ids.device.type != "cpu" or type(ids) is not Tensor:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(ids)


@dataclass(frozen=True, eq=False)
class Document(TensorLeaf):
    """ids: (B or 1, S_k) int32.  contiguous: each is one run of keys, and they never decrease."""

    ids: Tensor
    contiguous: bool = False

    def __repr__(self) -> str:
        return f"document({tuple(self.ids.shape)})"

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        if self.ids.shape[-1] != s_k:
            raise InputError(f"document: ids of {self.ids.shape[-1]} keys for S_k = {s_k}")
        check_size("document: ids", "B", self.ids.shape[0], batch)

    @property
    def mask_mod(self) -> MaskMod:
        ids, last = self.ids, self.ids.shape[-1] - 1
        if self.ids.shape[0] == 1:
            return lambda b, h, q, k: (ids[0, q.clamp(0, last)] == ids[0, k]) & (q >= 0)
        return lambda b, h, q, k: (ids[b, q.clamp(0, last)] == ids[b, k]) & (q >= 0)

    def to(self, device: torch.device | str) -> Mask:
        return Document(self.ids.to(device), self.contiguous)

    def narrow(self, start: int, length: int) -> Mask:
        return Document(narrowed(self.ids, start, length), self.contiguous)

    def has_leaf(self) -> bool:
        """True if each document is one run: then there is a `Sequences` for every size."""
        return self.contiguous

    def as_leaf(self, s_q: int, s_k: int, band: Band | None = None) -> Mask | None:
        """The documents as intervals of keys within the band."""
        if not self.contiguous:
            return None
        queries = F.pad(self.ids, (s_q - s_k, 0), value=-1)  # a query before the first key is in no document
        begin, end = (torch.searchsorted(self.ids, queries, right=side, out_int32=True) for side in (False, True))
        positions = torch.arange(s_k - s_q, s_k, dtype=torch.int32, device=self.ids.device)
        return Sequences(bounded(begin, end, positions, EVERYTHING if band is None else band, s_q + s_k), s_k)

    def _words(self) -> Iterator[Part | str]:
        yield Part("doc.b" if self.ids.shape[0] > 1 else "doc", (self.ids.shape[-1],), self.ids.flatten())


@dataclass(frozen=True, eq=False)
class PackedDocuments(TensorLeaf):
    """boundaries: (documents + 1,) int32.  length: number of keys; those after the last boundary are one document."""

    boundaries: Tensor
    length: int

    def __repr__(self) -> str:
        return f"document({(1, self.length)})"

    def by_id(self) -> Document:
        """The same documents by the id of every key."""
        places = torch.arange(self.length, device=self.boundaries.device, dtype=torch.int32)
        # All boundaries, although the first, 0, is passed by all: before torch 2.13 Inductor cannot search in a slice
        return Document(torch.bucketize(places, self.boundaries, right=True, out_int32=True)[None] - 1)

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        if self.length != s_k:
            raise InputError(f"document: ids of {self.length} keys for S_k = {s_k}")

    @property
    def mask_mod(self) -> MaskMod:
        return self.by_id().mask_mod

    def to(self, device: torch.device | str) -> Mask:
        return PackedDocuments(self.boundaries.to(device), self.length)

    def has_leaf(self) -> bool:
        """True: there is a `Sequences` for every size."""
        return True

    def as_leaf(self, s_q: int, s_k: int, band: Band | None = None) -> Mask:
        """The documents as intervals of keys within the band."""
        ends = torch.cat((self.boundaries, self.boundaries.new_full((1,), self.length)))
        queries = torch.arange(s_k - s_q, s_k, dtype=torch.int32, device=ends.device)
        table = intervals(queries, ends, ends, EVERYTHING if band is None else band, s_q + s_k)
        return Sequences(table[None], s_k)

    def _words(self) -> Iterator[Part | str]:
        yield from self.by_id()._words()
