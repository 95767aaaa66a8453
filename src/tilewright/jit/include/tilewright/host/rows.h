// Walking along a row, and reductions with a fixed order of summation, so that a row's result depends on its elements
// alone.
#pragma once

#include <tilewright/host/vector.h>

namespace tilewright {

// body(i, Whole{}) for i = 0, kWidth, 2 kWidth ... and last for n - kWidth, so that the tail is whole as well and meets
// some elements twice: body may write, but only what depends on nothing that it wrote.  body(0, Part{n}) for a row
// shorter than an F32.
template <class Body>
inline void sweep(int64_t n, Body body) {
    if (n < kWidth) return body(0, Part{int(n)});
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
    if (i < n) body(n - kWidth, Whole{});
}

enum Use { kRead, kWrite };

// Asks memory for the F32 at `from`, which need not exist.
template <Use kUse = kRead, class T>
inline void prefetch(const T* from) {
    constexpr int kLine = 64;
    for (unsigned at = 0; at < kWidth * sizeof(T); at += kLine)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + at, kUse);
}

// Number of the F32 that `sweep` reaches at i.
inline int64_t slot(int64_t i) { return (i + kWidth - 1) / kWidth; }

// combine(...(identity, body(0, ...)), ...): four chains, two in each F32, hide the latency of an addition.  body is
// called as in `sweep`.
template <class Row, class Combine, class Body>
inline float reduce(int64_t n, float identity, Combine combine, Body body) {
    F32 x{splat(identity), splat(identity)}, y = x;
    int64_t i = 0;
    for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
        x = map(combine, x, body(i, Whole{}));
        y = map(combine, y, body(i + kWidth, Whole{}));
    }
    if (i + kWidth <= n) {
        x = map(combine, x, body(i, Whole{}));
        i += kWidth;
    }
    if (n < kWidth)
        y = Row::only(body(0, Part{int(n)}), 0, n, identity);
    else if (i < n)
        y = map(combine, y, Row::only(body(n - kWidth, Whole{}), kWidth - (n - i), kWidth, identity));
    Float all = combine(combine(x.a, x.b), combine(y.a, y.b));
    for (int apart = kLanes / 2; apart > 0; apart /= 2) {
        Int other;
        for (int lane = 0; lane < kLanes; ++lane) other[lane] = lane ^ apart;
        all = combine(all, __builtin_shuffle(all, other));
    }
    return all[0];
}

// Sum of body(i, extent) over a row.
template <class Row, class Body>
inline float sum(int64_t n, Body body) {
    return reduce<Row>(n, 0.0f, [](auto a, auto b) { return a + b; }, body);
}

// Largest element of body(i, extent) over a row; NaN may be left out.
template <class Row, class Body>
inline float largest(int64_t n, Body body) {
    return reduce<Row>(n, -__builtin_inff(), [](auto a, auto b) { return a > b ? a : b; }, body);
}

}  // namespace tilewright
