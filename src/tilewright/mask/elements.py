"""A mask program evaluated in torch, per element: for references on any device, without a synchronisation."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tilewright.mask.program import OPERATORS, flags, offset, root

T = TypeVar("T")


def evaluate(program: str, data: Tensor, positions: Tensor, keys: Tensor, batch: int, heads: int) -> Tensor:
    """bool (B or 1, H or 1, len(positions), len(keys)): True where the query sees the key.

    positions, keys: 1-D int64 on the device of `data`; (program, data) come from `Mask.program`.
    """
    p = positions[:, None]
    d = p - keys

    def leaf(word: str) -> Tensor:
        kind, header = root(word), data[offset(word) :]
        if kind == "band":
            result = (d >= header[0]) & (d <= header[1])
        elif kind == "doc":
            query_ids, inside_q = document_ids(word, data, batch, positions)
            key_ids, inside_k = document_ids(word, data, batch, keys)
            same = query_ids[:, :, None] == key_ids[:, None]
            result = (same & inside_q[:, None] & inside_k)[:, None]
        elif kind == "seq":
            first, end = (row[:, None, :, None] for row in visible_intervals(word, data, batch, positions))
            result = (first <= keys) & (keys < end)
        elif kind == "prefix":
            result = keys < prefixes(word, data, batch)
        elif kind == "global":
            result = (p < header[0]) | (keys < header[0])
        elif kind == "dilated":
            result = d % header[0] == 0
        elif kind == "strided":
            result = keys % header[0] == header[0] - 1
        else:
            result = _cells(word, data, batch, heads, p, keys)
        return result

    result = walk(program, leaf, torch.logical_not, torch.logical_and, torch.logical_or)
    return result.expand(torch.broadcast_shapes(result.shape, (1, 1, *d.shape)))


def walk(
    program: str, leaf: Callable[[str], T], not_: Callable[[T], T], and_: Callable[[T, T], T], or_: Callable[[T, T], T]
) -> T:
    """Evaluate postfix words on a stack."""
    stack: list[T] = []
    for word in program.split():
        if word not in OPERATORS:
            stack.append(leaf(word))
        elif word == "~":
            stack.append(not_(stack.pop()))
        else:
            right = stack.pop()
            stack.append((and_ if word == "&" else or_)(stack.pop(), right))
    return stack.pop()


def document_ids(word: str, data: Tensor, batch: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (B or 1, places), and which of the places (places,) lie inside the document ids."""
    length, payload_offset = data[offset(word)], data[offset(word) + 1]
    rows = torch.arange(batch if "b" in flags(word) else 1, device=data.device)[:, None]
    inside = (places >= 0) & (places < length)
    return data[torch.where(inside, payload_offset + rows * length + places, 0)], inside


def visible_intervals(word: str, data: Tensor, batch: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(first, end) of the keys that queries see, (B or 1, positions); (0, 0) at positions without a query."""
    length, shift, payload_offset = data[offset(word)], data[offset(word) + 1], data[offset(word) + 2]
    queries = positions - shift
    inside = (queries >= 0) & (queries < length)
    rows = 3 * torch.arange(batch if "b" in flags(word) else 1, device=data.device)[:, None]
    places = payload_offset + rows * length + queries
    first, end = (data[torch.where(inside, places + n * length, 0)] * inside for n in range(2))
    return first, end


def prefixes(word: str, data: Tensor, batch: int) -> Tensor:
    """Prefix lengths (B or 1, 1, 1, 1)."""
    n = data[offset(word)]
    if flags(word):
        n = data[n + torch.arange(batch if "b" in flags(word) else 1, device=data.device)]
    return n.reshape(-1, 1, 1, 1)


def _cells(word: str, data: Tensor, batch: int, heads: int, p: Tensor, keys: Tensor) -> Tensor:
    """Bits of a block table, (B or 1, H or 1, positions, keys)."""
    size_q, size_k, rows, columns, table_heads, payload_offset = data[offset(word) : offset(word) + 6].long()
    row, column = p.div(size_q, rounding_mode="floor"), keys.div(size_k, rounding_mode="floor")
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    b = torch.arange(batch if "b" in flags(word) else 1, device=data.device)[:, None, None, None]
    h = torch.arange(heads if "h" in flags(word) else 1, device=data.device)[:, None, None]
    words = (columns + 31).div(32, rounding_mode="floor")
    bits = data[torch.where(inside, payload_offset + ((b * table_heads + h) * rows + row) * words + column // 32, 0)]
    return ((bits >> (column % 32)) & 1).bool() & inside
