"""Masks as values: leaves joined by `&`, `|` and `~`.

Intervals of the distance between query and key (causal, windows) fold where they meet, so that
`causal() & window(4095)` is one band, which kernels take as two numbers.  Everything else becomes a program
(`mask.program`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.hardware.device_cache import DeviceCache
from tilewright.mask.program import Part, assemble

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOWEST, HIGHEST = -(2**31), 2**31 - 1
"""The bounds of a band without a limit."""
_KEPT = "programs of masks"


class Mask:
    """Which keys a query sees.  Immutable; combine with `&`, `|`, `~`.

    A mask is a function of a key and of a query's position, i + S_k - S_q: the last query stands at the last key.
    """

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        joined = _joined(And, self, other)
        if isinstance(other, Band) and (other.low, other.high) == (0, HIGHEST) and not torch.compiler.is_compiling():
            # An op with causal=True creates this in every call: cache its programs in the mask that lives on
            joined.__dict__["_programs"] = self.__dict__.setdefault("_programs_and_causal", DeviceCache(_KEPT))
        return joined

    def __or__(self, other: "Mask") -> "Mask":
        return _joined(Or, self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ~, not with and, or, not")

    @property
    def only_flex(self) -> bool:
        """True if only FlexAttention can evaluate a part of the mask."""
        return any(leaf.only_flex for leaf in self.leaves() if leaf is not self)

    def leaves(self) -> "Iterator[Mask]":
        """Every leaf, in order."""
        yield self

    def band(self) -> tuple[int, int] | None:
        """(left, right) if the mask is -right <= position - key <= left and nothing else, -1 for a side without limit.

        None also for an interval that does not contain the diagonal: the bands of kernels do.
        """
        return None

    def program(self, device: torch.device | str) -> tuple[str, Tensor]:
        """(text, data): the whole mask for kernels, see `mask.program`.  data: 1-D int32 on `device`.

        Cached in the mask, for calls on any stream and in any CUDA graph; a compiled graph computes it again.
        InputError if only FlexAttention can evaluate the mask, and outside the capture that the mask belongs to.
        """
        return self._kept_program(torch.device(device), None)

    def fitted_program(self, s_q: int, s_k: int, device: torch.device) -> tuple[str, Tensor]:
        """`program` of `fitted(s_q, s_k)`, cached too."""
        return self._kept_program(device, (s_q, s_k) if self.has_leaf() else None)

    def _kept_program(self, device: torch.device, sizes: tuple[int, int] | None) -> tuple[str, Tensor]:
        if torch.compiler.is_compiling():  # a compiled graph has separate memory, and sizes may be symbolic
            return self._new_program(device, sizes)
        # `__dict__` only here: the Dynamo of torch 2.11 cannot trace it
        programs: DeviceCache[tuple[str, Tensor]] | None = self.__dict__.get("_programs")
        if programs is None:
            programs = self.__dict__.setdefault("_programs", DeviceCache(_KEPT))
        result = programs.find((device, sizes), device)
        if result is not None:
            return result
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())

        def make() -> tuple[str, Tensor]:
            for leaf in self.leaves():
                leaf.await_tensors()
            return self._new_program(device, sizes)

        return programs.get((device, sizes), device, make, needs=self)

    def _new_program(self, device: torch.device, sizes: tuple[int, int] | None) -> tuple[str, Tensor]:
        fitted = self if sizes is None else self.fitted(*sizes)
        return assemble(tuple(fitted._words()), device)

    def await_tensors(self) -> None:
        """Make the tensors of a leaf readable on the current stream."""

    def fitted(self, s_q: int, s_k: int) -> "Mask":
        """The same mask in its cheapest form for an attention of this size, which it must fit."""
        result = self.as_leaf(s_q, s_k) if self.has_leaf() else None
        return self if result is None else result

    def has_leaf(self) -> bool:
        """True if `as_leaf` returns a leaf."""
        return False

    def as_leaf(self, s_q: int, s_k: int, band: "Band | None" = None) -> "Mask | None":
        """`self & band` as one leaf for an attention of this size, or None if there is no such leaf."""
        return None

    def check(self, batch: int, heads: int, s_q: int, s_k: int) -> None:
        """Raise InputError if ids or tables do not fit an attention of this size."""
        for leaf in self.leaves():
            if leaf is not self:
                leaf.check(batch, heads, s_q, s_k)

    @property
    def mask_mod(self) -> MaskMod:
        """FlexAttention's `mask_mod(b, h, q_idx, kv_idx)` for S_q == S_k; else see `mask_mod_at`."""
        raise NotImplementedError

    def mask_mod_at(self, shift: int) -> MaskMod:
        """`mask_mod` for queries whose position is their index + `shift`, S_k - S_q."""
        allowed = self.mask_mod
        return allowed if shift == 0 else lambda b, h, q, k: allowed(b, h, q + shift, k)

    def dense(self, batch: int, heads: int, s_q: int, s_k: int, device: torch.device | str = "cpu") -> Tensor:
        """bool (batch, heads, s_q, s_k), True where allowed: for small sizes and tests."""
        from torch.nn.attention.flex_attention import create_mask

        self.check(batch, heads, s_q, s_k)
        if not batch * heads * s_q * s_k:
            return torch.empty(batch, heads, s_q, s_k, dtype=torch.bool, device=device)
        mask: Tensor = create_mask(self.to(device).mask_mod_at(s_k - s_q), batch, heads, s_q, s_k, device=str(device))
        return mask

    def to_block_mask(
        self,
        batch: int,
        heads: int,
        s_q: int,
        s_k: int,
        device: torch.device | str,
        block_size: int | tuple[int, int] = 128,
    ) -> "BlockMask":
        """torch's BlockMask of the same mask, from the closed forms: O(tiles), never S_q x S_k."""
        from tilewright.mask.flex import block_mask

        return block_mask(self, batch, heads, s_q, s_k, torch.device(device), block_size)

    def to(self, device: torch.device | str) -> "Mask":
        """The same mask with its tensors on `device`."""
        return self

    def narrow(self, start: int, length: int) -> "Mask":
        """The mask of `length` sequences of the batch from `start`."""
        return self

    def _words(self) -> Iterator[Part | str]:
        """Leaves and operators in postfix order."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Band(Mask):
    """low <= position - key <= high; nothing if low > high."""

    low: int
    high: int

    def __repr__(self) -> str:
        sides = [None if side in (LOWEST, HIGHEST) else side for side in (self.high, self.low)]
        return f"band({sides[0]}, {None if sides[1] is None else -sides[1]})"

    def __invert__(self) -> Mask:
        if self.low > self.high:
            return EVERYTHING
        if self.low == LOWEST:
            return NOTHING if self.high == HIGHEST else Band(self.high + 1, HIGHEST)
        return Band(LOWEST, self.low - 1) if self.high == HIGHEST else Not(self)

    def band(self) -> tuple[int, int] | None:
        if self.low > min(self.high, 0) or self.high < 0:
            return None
        return -1 if self.high == HIGHEST else self.high, -1 if self.low == LOWEST else -self.low

    @property
    def mask_mod(self) -> MaskMod:
        low, high = self.low, self.high
        if low > LOWEST and high < HIGHEST:
            return lambda b, h, q, k: (q - k >= low) & (q - k <= high)
        if low > LOWEST:
            return lambda b, h, q, k: q - k >= low
        return lambda b, h, q, k: q - k <= high

    def _words(self) -> Iterator[Part | str]:
        yield Part("band", (self.low, self.high))


NOTHING, EVERYTHING = Band(1, 0), Band(LOWEST, HIGHEST)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """The complement of `operand`."""

    operand: Mask

    def __repr__(self) -> str:
        return f"~({self.operand!r})"

    def __invert__(self) -> Mask:
        return self.operand

    def leaves(self) -> Iterator[Mask]:
        return self.operand.leaves()

    @property
    def mask_mod(self) -> MaskMod:
        allowed = self.operand.mask_mod
        return lambda b, h, q, k: ~allowed(b, h, q, k)

    def to(self, device: torch.device | str) -> Mask:
        return Not(self.operand.to(device))

    def narrow(self, start: int, length: int) -> Mask:
        return Not(self.operand.narrow(start, length))

    def _words(self) -> Iterator[Part | str]:
        yield from self.operand._words()
        yield "~"


@dataclass(frozen=True, eq=False)
class _Many(Mask):
    """Two or more operands; bands that overlap are folded into one."""

    operands: tuple[Mask, ...]
    sign = ""

    def __repr__(self) -> str:
        return f" {self.sign} ".join(f"({o!r})" if isinstance(o, _Many) else repr(o) for o in self.operands)

    def leaves(self) -> Iterator[Mask]:
        for operand in self.operands:
            yield from operand.leaves()

    def to(self, device: torch.device | str) -> Mask:
        return type(self)(tuple(o.to(device) for o in self.operands))

    def narrow(self, start: int, length: int) -> Mask:
        return type(self)(tuple(o.narrow(start, length) for o in self.operands))

    def _words(self) -> Iterator[Part | str]:
        for position, operand in enumerate(self.operands):
            yield from operand._words()
            if position:
                yield self.sign


class And(_Many):
    """The intersection of the operands."""

    sign = "&"

    @property
    def mask_mod(self) -> MaskMod:
        return _chain([o.mask_mod for o in self.operands], torch.logical_and)

    @staticmethod
    def fold(bands: list[Band]) -> list[Band]:
        """The intersection of intervals, one interval."""
        return [Band(max(b.low for b in bands), min(b.high for b in bands))]

    def has_leaf(self) -> bool:
        """True for a band and one other mask that has a leaf."""
        operands = self.operands
        return len(operands) == 2 and operands[1].has_leaf() and isinstance(operands[0], Band)

    def as_leaf(self, s_q: int, s_k: int, band: Band | None = None) -> Mask | None:
        """The second operand within the band, the first operand."""
        first, second = self.operands[:2]
        if band is not None or not self.has_leaf():
            return None
        return second.as_leaf(s_q, s_k, first if isinstance(first, Band) else None)

    @staticmethod
    def settles(band: Band) -> bool:
        """True if the result is this band, whatever the other operands are."""
        return band.low > band.high

    @staticmethod
    def neutral(band: Band) -> bool:
        """True if this band does not change the result."""
        return band.low == LOWEST and band.high == HIGHEST


class Or(_Many):
    """The union of the operands."""

    sign = "|"

    @property
    def mask_mod(self) -> MaskMod:
        return _chain([o.mask_mod for o in self.operands], torch.logical_or)

    @staticmethod
    def fold(bands: list[Band]) -> list[Band]:
        """The union of intervals; those that overlap or touch are merged."""
        result: list[Band] = []
        for band in sorted((b for b in bands if b.low <= b.high), key=lambda b: b.low):
            if result and band.low <= result[-1].high + 1:
                result[-1] = Band(result[-1].low, max(result[-1].high, band.high))
            else:
                result.append(band)
        return result or [NOTHING]

    settles = And.neutral
    neutral = And.settles


def _joined(kind: type[And] | type[Or], left: Mask, right: Mask) -> Mask:
    """One flat node with the bands folded and first: they are the cheapest to evaluate."""
    operands = [o for side in (left, right) for o in (side.operands if type(side) is kind else (side,))]
    bands = [o for o in operands if isinstance(o, Band)]
    others = [o for o in operands if not isinstance(o, Band)]
    bands = kind.fold(bands) if bands else []
    for band in bands:
        if kind.settles(band):
            return band
    if others:
        bands = [b for b in bands if not kind.neutral(b)]
    result = (*bands, *others)
    return result[0] if len(result) == 1 else kind(result)


def _chain(mods: list[MaskMod], join: Callable[[Tensor, Tensor], Tensor]) -> MaskMod:
    first, *rest = mods

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = first(b, h, q, k)
        for mod in rest:
            result = join(result, mod(b, h, q, k))
        return result

    return allowed


def refuse(what: str, value: Any, allowed: str) -> InputError:
    """The InputError for a parameter that no mask can have."""
    return InputError(f"mask: {what} = {value!r}; {allowed}")
