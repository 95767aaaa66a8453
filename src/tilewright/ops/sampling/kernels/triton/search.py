"""Search of a threshold in every row: the largest key t so that at least `goal` of the row lies at keys >= t, exactly.

The measure is a count (top-k) or a mass of integer weights (top-p).  A few launches narrow a bracket lo <= t < hi, each
by PIVOTS sums over all parts of a row: first at distances from the maximum that double, then evenly between.  Then the
keys inside go to a list, in any order, for sums of integers do not depend on it, and one program a row bisects that.
However badly pivots fit the row, the result is the same; only the list gets longer.
"""

import triton
import triton.language as tl

from tilewright.ops.sampling.kernels.triton.numbers import (
    NOTHING,
    load_clean,
    ordered,
    share,
    slope,
    value,
    weights,
)

PIVOTS = tl.constexpr(7)


@triton.jit
def parameter(tensor, number, row, IS_TENSOR: tl.constexpr):
    """A parameter of this row."""
    return tl.load(tensor + row) if IS_TENSOR else number


@triton.jit
def row_maximum(maxima, row, parts, PARTS: tl.constexpr):
    """The largest key of a row, of the maxima (M, parts)."""
    offs = tl.arange(0, PARTS)
    return tl.max(tl.load(maxima + row * parts + offs, mask=offs < parts, other=NOTHING), 0)


@triton.jit
def row_total(sums, row, parts, PARTS: tl.constexpr):
    """The sum of int64 `sums` (M, parts) of a row."""
    offs = tl.arange(0, PARTS)
    return tl.sum(tl.load(sums + row * parts + offs, mask=offs < parts, other=0), 0)


@triton.jit
def _goal(masses, amounts, amount, row, N, parts, MASS: tl.constexpr, IS_TENSOR: tl.constexpr, PARTS: tl.constexpr):
    """(goal, whether it excludes anything)."""
    setting = parameter(amounts, amount, row, IS_TENSOR)
    if MASS:
        goal, restricts = share(row_total(masses, row, parts, PARTS), setting), setting < 1.0
    else:
        goal, restricts = setting.to(tl.int64), (setting > 0) & (setting < N)
    return goal, restricts


@triton.jit
def _bracket(
    brackets, pivots, sums, lowest, highest, goal, row, parts,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """(lo, hi, measure at hi) that begin a round: those of the round before, narrowed by its sums."""
    lo, hi, base = lowest.to(tl.int64), highest.to(tl.int64) + 1, tl.zeros((), tl.int64)
    if ROUND > 0:
        before = row * ROUNDS + ROUND - 1
        bracket = brackets + (row * (ROUNDS + 1) + ROUND - 1) * 3
        lo, hi, base = tl.load(bracket), tl.load(bracket + 1), tl.load(bracket + 2)
        for j in tl.static_range(PIVOTS):
            pivot = tl.load(pivots + before * PIVOTS + j)
            measure = row_total(sums, before * PIVOTS + j, parts, PARTS)
            enough = measure >= goal
            nearer = (measure < goal) & (pivot < hi)
            lo = tl.where(enough, tl.maximum(lo, pivot), lo)
            base = tl.where(nearer, measure, base)
            hi = tl.where(nearer, pivot, hi)
    return lo, hi, base


@triton.jit
def store_bracket(brackets, row, part, lo, hi, base, ROUND: tl.constexpr, ROUNDS: tl.constexpr):
    """The first part of a row stores what the next launch needs."""
    bracket = brackets + (row * (ROUNDS + 1) + ROUND) * 3
    tl.store(bracket, lo, mask=part == 0)
    tl.store(bracket + 1, hi, mask=part == 0)
    tl.store(bracket + 2, base, mask=part == 0)


@triton.jit
def _round_kernel(
    brackets, pivots, sums, masses, floors, maxima, x, temperatures, amounts,  # brackets: (M, ROUNDS + 1, 3)
    temperature, amount, N, parts, stride_x,  # pivots: (M, ROUNDS, PIVOTS)  sums: (M, ROUNDS, PIVOTS, parts)
    MASS: tl.constexpr, HAS_T: tl.constexpr, HAS_AMOUNTS: tl.constexpr, HAS_FLOOR: tl.constexpr,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One round: measures of one part of a row at PIVOTS keys.   floors: keys below them do not count."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    t = parameter(temperatures, temperature, row, HAS_T)
    goal, restricts = _goal(masses, amounts, amount, row, N, parts, MASS, HAS_AMOUNTS, PARTS)
    highest = row_maximum(maxima, row, parts, PARTS)
    if (t > 0) & restricts & (highest > NOTHING):
        lowest = tl.load(floors + row) if HAS_FLOOR else tl.full((), NOTHING + 1, tl.int32)
        lo, hi, base = _bracket(brackets, pivots, sums, lowest, highest, goal, row, parts, ROUND, ROUNDS, PARTS)
        store_bracket(brackets, row, part, lo, hi, base, ROUND, ROUNDS)
        offs = part * BLOCK + tl.arange(0, BLOCK)
        logits = load_clean(x + row * stride_x, offs, offs < N)
        key = ordered(logits)
        measure = weights(logits, value(highest), slope(t)) if MASS else tl.full((BLOCK,), 1, tl.int64)

        unit = t if MASS else 1.0
        top = value((hi - 1).to(tl.int32))
        bottom = tl.maximum(value(lo.to(tl.int32)), top - 64.0 * unit)
        for j in tl.static_range(PIVOTS):
            if ROUND == 0:
                place = top - (0.5 * (1 << j)) * unit
            else:
                place = bottom + (top - bottom) * ((j + 1) / (PIVOTS + 1))
            pivot = tl.minimum(tl.maximum(ordered(place).to(tl.int64), lo), hi)
            index = (row * ROUNDS + ROUND) * PIVOTS + j
            tl.store(pivots + index, pivot, mask=part == 0)
            tl.store(sums + index * parts + part, tl.sum(tl.where(key >= pivot.to(tl.int32), measure, 0), 0))


@triton.jit
def _gather_kernel(
    keys, counters, brackets, pivots, sums, masses, floors, maxima, x, temperatures, amounts,
    temperature, amount, N, parts, stride_x,  # keys: (M, N)  counters: (M,), zero
    MASS: tl.constexpr, HAS_T: tl.constexpr, HAS_AMOUNTS: tl.constexpr, HAS_FLOOR: tl.constexpr,
    ROUNDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append the keys of one part that lie inside the bracket to the list of the row."""
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    t = parameter(temperatures, temperature, row, HAS_T)
    goal, restricts = _goal(masses, amounts, amount, row, N, parts, MASS, HAS_AMOUNTS, PARTS)
    highest = row_maximum(maxima, row, parts, PARTS)
    if (t > 0) & restricts & (highest > NOTHING):
        lowest = tl.load(floors + row) if HAS_FLOOR else tl.full((), NOTHING + 1, tl.int32)
        lo, hi, base = _bracket(brackets, pivots, sums, lowest, highest, goal, row, parts, ROUNDS, ROUNDS, PARTS)
        store_bracket(brackets, row, part, lo, hi, base, ROUNDS, ROUNDS)
        offs = part * BLOCK + tl.arange(0, BLOCK)
        key = ordered(load_clean(x + row * stride_x, offs, offs < N))
        inside = (key >= lo.to(tl.int32)) & (key < hi.to(tl.int32))
        number = inside.to(tl.int32)
        start = tl.atomic_add(counters + row, tl.sum(number, 0), sem="relaxed")
        tl.store(keys + row * N + start + tl.cumsum(number, 0) - 1, key, mask=inside)


@triton.jit
def _finish_kernel(
    thresholds, keys, counters, brackets, masses, floors, maxima, temperatures, amounts,
    temperature, amount, N, parts,  # thresholds: (M,)
    MASS: tl.constexpr, HAS_T: tl.constexpr, HAS_AMOUNTS: tl.constexpr, HAS_FLOOR: tl.constexpr,
    ROUNDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bisect the bracket of a row down to one key."""
    row = tl.program_id(0).to(tl.int64)
    t = parameter(temperatures, temperature, row, HAS_T)
    goal, restricts = _goal(masses, amounts, amount, row, N, parts, MASS, HAS_AMOUNTS, PARTS)
    highest = row_maximum(maxima, row, parts, PARTS)
    lo = (tl.load(floors + row) if HAS_FLOOR else tl.full((), NOTHING + 1, tl.int32)).to(tl.int64)
    if (t > 0) & restricts & (highest > NOTHING):
        bracket = brackets + (row * (ROUNDS + 1) + ROUNDS) * 3
        lo, hi, base = tl.load(bracket), tl.load(bracket + 1), tl.load(bracket + 2)
        count = tl.load(counters + row)
        offs = tl.arange(0, BLOCK)
        steepness, largest = slope(t), value(highest)
        while hi - lo > 1:
            middle = lo + ((hi - lo) >> 1)
            acc = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, count, BLOCK):
                key = tl.load(keys + row * N + start + offs, mask=start + offs < count, other=NOTHING)
                above = key >= middle.to(tl.int32)
                if MASS:
                    acc += tl.where(above, weights(value(key), largest, steepness), 0)
                else:
                    acc += above.to(tl.int64)
            enough = base + tl.sum(acc, 0) >= goal
            lo = tl.where(enough, middle, lo)
            hi = tl.where(enough, hi, middle)
    tl.store(thresholds + row, lo.to(tl.int32))
