// Walking along a row, and reductions with a fixed order of summation, so that a row's result depends on its elements
// alone.
#pragma once

#include <tilewright/host/vector.h>

namespace tilewright {

// body(i, Whole{} or Part{count}) for i = 0, kWidth, 2 kWidth ... below n.
template <class Body>
inline void sweep(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, Whole{});
    if (i < n) body(i, Part{int(n - i)});
}

// combine(...(identity, body(0, ...)), ...): four chains, two in each F32, hide the latency of an addition.
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
    if (i < n) y = map(combine, y, Row::pad(body(i, Part{int(n - i)}), Part{int(n - i)}, identity));
    const Float all = combine(combine(x.a, x.b), combine(y.a, y.b));
    float result = all[0];
    for (int lane = 1; lane < kLanes; ++lane) result = combine(result, float(all[lane]));
    return result;
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
