"""The leaves of masks: public constructors, and the check of each leaf against an attention's size.

A mask is a value: tensors given to it are copied as int32 (tables as bits), later changes to them do not reach it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.hardware.device_cache import Queued
from tilewright.hardware.graph_capture import current_capture
from tilewright.mask.algebra import HIGHEST, LOWEST, Band, Mask, MaskMod, refuse
from tilewright.mask.program import Part


def causal() -> Mask:
    """Keys up to the query's own position: j <= i."""
    return Band(0, HIGHEST)


def window(left: int | None, right: int | None = 0) -> Mask:
    """-right <= i - j <= left.  None: no limit on that side.  `window(4095)` is a causal window of 4096 keys."""
    for name, side in (("left", left), ("right", right)):
        if side is not None and not 0 <= side < HIGHEST:
            raise refuse(name, side, "a number of keys from 0, or None for no limit")
    return Band(LOWEST if right is None else -right, HIGHEST if left is None else left)


def prefix(n: int | Tensor) -> Mask:
    """The first n keys, for every query: j < n.  n: int, or (B,) int tensor.  `causal() | prefix(n)` is a prefix LM."""
    if isinstance(n, Tensor):
        if n.dim() != 1 or n.is_floating_point() or not n.numel():
            raise refuse("n", (tuple(n.shape), n.dtype), "an int or a (B,) int tensor")
        return Prefix(n.to(torch.int32, copy=True))
    return Prefix(_count("n", n, 0))


def global_tokens(g: int) -> Mask:
    """The first g positions see and are seen by all: i < g or j < g."""
    return GlobalTokens(_count("g", g, 0))


def dilated(step: int) -> Mask:
    """Every step-th key, counted from the query: (i - j) % step == 0."""
    return Dilated(_count("step", step, 1))


def strided(step: int) -> Mask:
    """The last key of every run of `step`, the same for all queries: j % step == step - 1.

    The summary columns of the Sparse Transformer (Child et al., 2019).
    """
    return Strided(_count("step", step, 1))


def block(table: Tensor, size: int | tuple[int, int]) -> Mask:
    """Blocks of queries and keys: table[..., i // size_q, j // size_k].

    table: bool (rows, columns) or (B, H, rows, columns), B and H may be 1; rows = ceil(S_k / size_q) because positions
    are counted like keys, columns = ceil(S_k / size_k).  size: one number or (size_q, size_k).
    """
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) != 2:
        raise refuse("size", size, "one number or (size_q, size_k)")
    if table.dtype != torch.bool or table.dim() not in (2, 4) or 0 in table.shape[:-2]:
        raise refuse("table", (tuple(table.shape), table.dtype), "bool (rows, columns) or (B, H, rows, columns)")
    full = table.reshape((1, 1, *table.shape) if table.dim() == 2 else table.shape)
    return Block(full.clone(), _count("size", sizes[0], 1), _count("size", sizes[1], 1))


class TensorLeaf(Mask):
    """A leaf that holds a tensor.  A leaf made during the capture of a CUDA graph belongs to that graph only."""

    def __post_init__(self) -> None:
        """Note the stream on which the tensor is made, and the capture, if any."""
        if torch.compiler.is_compiling():
            return
        for value in vars(self).values():
            if isinstance(value, Tensor) and value.is_cuda and type(value) is Tensor:
                queued = Queued([value])
                queued.made_on(value.device)
                capture = current_capture(value.device)
                object.__setattr__(self, "_made", (queued, value.device, capture))
                return

    def await_tensors(self) -> None:
        """Let the current stream read the tensor.  InputError outside the capture in which the mask was made."""
        queued, device, made_in = vars(self).get("_made", (None, None, None))
        if queued is None:
            return
        current = current_capture(device)
        if made_in is not None and made_in.number is not None and (current is None or current.number != made_in.number):
            raise InputError(
                f"{self!r} was made while a CUDA graph was captured, and holds numbers in replays of that graph alone. "
                "Make it before the capture, or anew in each."
            )
        if current is None or made_in is not None:
            queued.read_on(device)
        else:
            queued.complete()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Prefix(TensorLeaf):
    """n: int, or (B,) int32."""

    n: int | Tensor

    def __repr__(self) -> str:
        return f"prefix({tuple(self.n.shape) if isinstance(self.n, Tensor) else self.n})"

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        if isinstance(self.n, Tensor):
            check_size("prefix: n", "B", self.n.numel(), batch)

    @property
    def mask_mod(self) -> MaskMod:
        n = self.n
        if not isinstance(n, Tensor):
            return lambda b, h, q, k: k < n
        if n.numel() == 1:
            return lambda b, h, q, k: k < n[0]
        return lambda b, h, q, k: k < n[b]

    def to(self, device: torch.device | str) -> Mask:
        return Prefix(self.n.to(device)) if isinstance(self.n, Tensor) else self

    def narrow(self, start: int, length: int) -> Mask:
        return Prefix(narrowed(self.n, start, length)) if isinstance(self.n, Tensor) else self

    def _words(self) -> Iterator[Part | str]:
        if not isinstance(self.n, Tensor):
            yield Part("prefix", (self.n,))
        else:
            yield Part("prefix.b" if self.n.numel() > 1 else "prefix.t", (), self.n)


@dataclass(frozen=True, eq=False)
class GlobalTokens(Mask):
    """g: number of positions."""

    g: int

    @property
    def mask_mod(self) -> MaskMod:
        g = self.g
        return lambda b, h, q, k: (q < g) | (k < g)

    def _words(self) -> Iterator[Part | str]:
        yield Part("global", (self.g,))


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """step: distance between keys."""

    step: int

    @property
    def mask_mod(self) -> MaskMod:
        step = self.step
        return lambda b, h, q, k: (q - k) % step == 0

    def _words(self) -> Iterator[Part | str]:
        yield Part("dilated", (self.step,))


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """step: distance between summary columns."""

    step: int

    @property
    def mask_mod(self) -> MaskMod:
        step = self.step
        return lambda b, h, q, k: k % step == step - 1

    def _words(self) -> Iterator[Part | str]:
        yield Part("strided", (self.step,))


@dataclass(frozen=True, eq=False)
class Block(TensorLeaf):
    """table: (B or 1, H or 1, rows, columns) bool."""

    table: Tensor
    size_q: int
    size_k: int

    def __repr__(self) -> str:
        return f"block({tuple(self.table.shape)}, ({self.size_q}, {self.size_k}))"

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        needed = -(-s_k // self.size_q), -(-s_k // self.size_k)
        if tuple(self.table.shape[2:]) != needed:
            raise InputError(
                f"block: table of {tuple(self.table.shape[2:])} blocks of ({self.size_q}, {self.size_k}); "
                f"S_k = {s_k} needs {needed}"
            )
        check_size("block: table", "B", self.table.shape[0], batch)
        check_size("block: table", "H", self.table.shape[1], heads)

    @property
    def mask_mod(self) -> MaskMod:
        table, size_q, size_k = self.table, self.size_q, self.size_k
        by_batch, by_head = (int(size > 1) for size in table.shape[:2])
        last = table.shape[2] * size_q - 1

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return table[b * by_batch, h * by_head, q.clamp(0, last) // size_q, k // size_k] & (q >= 0)

        return allowed

    def to(self, device: torch.device | str) -> Mask:
        return Block(self.table.to(device), self.size_q, self.size_k)

    def narrow(self, start: int, length: int) -> Mask:
        return Block(narrowed(self.table, start, length), self.size_q, self.size_k)

    def _words(self) -> Iterator[Part | str]:
        batch, heads, rows, columns = self.table.shape
        flags = ("b" if batch > 1 else "") + ("h" if heads > 1 else "")
        word = f"block.{flags}" if flags else "block"
        yield Part(word, (self.size_q, self.size_k, rows, columns, heads), _packed(self.table))


def _packed(table: Tensor) -> Tensor:
    """Pack bool (..., columns) into int32 words of 32 columns, the first in the lowest bit; flat."""
    words = -(-table.shape[-1] // 32)
    padded = torch.nn.functional.pad(table, (0, 32 * words - table.shape[-1]))
    bits = padded.unflatten(-1, (words, 32)).to(torch.int32) << torch.arange(32, dtype=torch.int32, device=table.device)
    return bits.sum(-1, dtype=torch.int32).flatten()


def _count(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or not least <= value < HIGHEST:
        raise refuse(name, value, f"an int from {least}")
    return value


def narrowed(t: Tensor, start: int, length: int) -> Tensor:
    """t: (B or 1, ...).  `length` sequences of the batch from `start`; one row that is for all stays, and one row is
    left for no sequences, because programs read one.
    """
    return t if len(t) == 1 else t.narrow(0, start, length) if length else t[:1]


def check_size(what: str, axis: str, size: int, needed: int) -> None:
    """Raise InputError unless the size of a tensor along an axis is 1 or that of the attention."""
    if size not in (1, needed):
        raise InputError(f"{what} are for {axis} = {size}; the attention has {axis} = {needed}")
