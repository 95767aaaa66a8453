// Loops along a row, and reductions with a fixed order of summation, so that a row's result depends on its elements
// only.
#pragma once

#include <tilewright/host/vector.h>

namespace tilewright {

// Calls body(i, Whole{}) for i = 0, kWidth, 2 kWidth, ... and last for n - kWidth, so the tail is a whole vector that overlaps
// the one before.  body sees some elements twice: it must not read what it wrote.  A row shorter than an F32 gets
// body(0, Part{n}).
template <class Body>
inline void sweep(int64_t n, Body body) {
    if (n < kWidth) return body(0, Part{int(n)});
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
    if (i < n) body(n - kWidth, Whole{});
}

enum Use { kRead, kWrite };

// Prefetches the F32 at `from`, which may lie outside of the tensor.
template <Use kUse = kRead, class T>
inline void prefetch(const T* from) {
    constexpr int kLine = 64;
    for (unsigned byte = 0; byte < kWidth * sizeof(T); byte += kLine)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, kUse);
}

// Index of the iteration in which `sweep` reaches element i.
inline int64_t slot(int64_t i) { return (i + kWidth - 1) / kWidth; }

// Reduces body(i, extent) over a row with `combine`.  Four accumulators, two in each F32, hide the latency of an addition.
// body is called as in `sweep`.
template <class Row, class Combine, class Body>
inline float reduce(int64_t n, float identity, Combine combine, Body body) {
    F32 acc0{splat(identity), splat(identity)}, acc1 = acc0;
    int64_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
        acc0 = map(combine, acc0, body(i, Whole{}));
        acc1 = map(combine, acc1, body(i + kWidth, Whole{}));
    }
    if (i + kWidth <= n) {
        acc0 = map(combine, acc0, body(i, Whole{}));
        i += kWidth;
    }
    if (n < kWidth)
        acc1 = Row::only(body(0, Part{int(n)}), 0, n, identity);
    else if (i < n)
        acc1 = map(combine, acc1, Row::only(body(n - kWidth, Whole{}), kWidth - (n - i), kWidth, identity));
    // Butterfly over the lanes
    Float result = combine(combine(acc0.a, acc0.b), combine(acc1.a, acc1.b));
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        Int other;
        for (int lane = 0; lane < kLanes; ++lane) other[lane] = lane ^ offset;
        result = combine(result, __builtin_shuffle(result, other));
    }
    return result[0];
}

// Sum of body(i, extent) over a row.
template <class Row, class Body>
inline float sum(int64_t n, Body body) {
    return reduce<Row>(n, 0.0f, [](auto a, auto b) { return a + b; }, body);
}

// Maximum of body(i, extent) over a row; a NaN may be ignored.
template <class Row, class Body>
inline float largest(int64_t n, Body body) {
    return reduce<Row>(n, -__builtin_inff(), [](auto a, auto b) { return a > b ? a : b; }, body);
}

}  // namespace tilewright
