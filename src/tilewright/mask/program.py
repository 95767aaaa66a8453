"""The mask program that kernels take: a text that combines leaves, and one tensor with all their numbers.

Text: postfix words `leaf[.flags]:offset`, `&`, `|`, `~`, for example "band:0 doc.b:2 & prefix:4 |".  Offsets point into
`data`, 1-D int32, where each leaf has its header; ids and tables follow after all headers.  So the text depends on the
structure only, and kernels compiled for one text serve all lengths, windows and documents.

With i the position of a query, j a key, d = i - j:

    leaf                  header at its offset                         allowed
    band                  low, high                                    low <= d <= high
    doc, doc.b            length, at                                   ids[i] == ids[j], both in 0 .. length - 1
    prefix, .t, .b        n; at; at                                    j < n
    global                g                                            i < g or j < g
    seq, seq.b            length, shift, at                            first[q] <= j < end[q], q = i - shift
    dilated               step                                         d % step == 0
    strided               step                                         j % step == step - 1
    block, .b, .h, .bh    size_q, size_k, rows, columns, heads, at     bit (i // size_q, j // size_k) of a table

`at`: index of the payload in data.  Flags say what it depends on: .b batch, .h head, .t neither.  doc: ids (length,),
doc.b: (B, length); seq: (3, length), for every query first, end, and how many queries up to it see a key, seq.b:
(B, 3, length), shift = S_k - S_q; prefix.t: n (1,), prefix.b: (B,); block: bits (B, heads, rows, words) with
words = ceil(columns / 32), column c is bit c % 32 of word c // 32, B and heads 1 without .b, .h.
Outside the table nothing is allowed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

OPERATORS = ("&", "|", "~")
HEADER_OF_SEQUENCES = 3
"""Numbers of the header of `seq`."""


class Leaf(NamedTuple):
    """One leaf of a text.  offset: index of its header in data."""

    name: str
    by_batch: bool
    by_head: bool
    offset: int


class Part(NamedTuple):
    """A leaf's part of data.  word: name and flags; payload: int32, 1-D, its index is appended to the header."""

    word: str
    header: tuple[int, ...]
    payload: Tensor | None = None


def assemble(words: Sequence[Part | str], device: torch.device) -> tuple[str, Tensor]:
    """(text, data) of leaves and operators in postfix order."""
    text: list[str] = []
    header: list[int] = []
    payloads: list[Tensor] = []
    payload_offset = sum(len(w.header) + (w.payload is not None) for w in words if isinstance(w, Part))
    for word in words:
        if isinstance(word, str):
            text.append(word)
            continue
        text.append(f"{word.word}:{len(header)}")
        header += word.header
        if word.payload is not None:
            header.append(payload_offset)
            payload_offset += word.payload.numel()
            payloads.append(word.payload.to(device))
    numbers = _numbers(header, device)
    return " ".join(text), torch.cat([*numbers, *payloads]) if len(numbers) + len(payloads) > 1 else numbers[0]


def _numbers(values: Sequence[int], device: torch.device) -> list[Tensor]:
    """The values on `device`.  On a GPU each is a fill: a copy from the host synchronises and breaks a capture."""
    if device.type == "cuda":
        return [torch.full((1,), value, dtype=torch.int32, device=device) for value in values]
    return [torch.tensor(values, dtype=torch.int32, device=device)]


def root(text: str) -> str:
    """The outermost node: "&", "|", "~", or the leaf's name without its flags."""
    return text.rsplit(maxsplit=1)[-1].partition(":")[0].partition(".")[0]


def offset(text: str) -> int:
    """Index of the header of the leaf `text` in data."""
    return int(text.partition(":")[2])


def flags(text: str) -> str:
    """What the leaf `text` depends on: "", "b", "h", "bh" or "t"."""
    return text.partition(":")[0].partition(".")[2]


# Each function below is self-contained: Triton calls it at compile time, and a kernel's key holds only its source.


def first(text: str) -> str:
    """First operand of the outermost `&` or `|`."""
    words = text.split()
    missing, start = 1, len(words) - 1
    while missing:
        start -= 1
        missing += {"&": 1, "|": 1, "~": 0}.get(words[start], -1)
    return " ".join(words[:start])


def second(text: str) -> str:
    """Second operand of the outermost `&` or `|`; the operand of `~`."""
    words = text.split()
    missing, start = 1, len(words) - 1
    while missing:
        start -= 1
        missing += {"&": 1, "|": 1, "~": 0}.get(words[start], -1)
    return " ".join(words[start:-1])


def document_count(text: str) -> int:
    """Number of document leaves, "doc" and "seq"."""
    return sum(word.startswith(("doc", "seq")) for word in text.split())


def document(text: str, number: int) -> str:
    """The document leaf with this number."""
    return [word for word in text.split() if word.startswith(("doc", "seq"))][number]


def document_number(text: str, leaf: str) -> int:
    """The number of the document leaf `leaf`, from 0."""
    return [word for word in text.split() if word.startswith(("doc", "seq"))].index(leaf)


def leaves(text: str) -> tuple[Leaf, ...]:
    """All leaves, in order."""
    return tuple(
        Leaf(root(word), "b" in flags(word), "h" in flags(word), offset(word))
        for word in text.split()
        if word not in OPERATORS
    )


def extent(text: str, batch: int, heads: int) -> tuple[int, int]:
    """(batch, heads) of the mask: 1 where it does not depend on them."""
    all_leaves = leaves(text)
    return batch if any(leaf.by_batch for leaf in all_leaves) else 1, heads if any(
        leaf.by_head for leaf in all_leaves
    ) else 1
