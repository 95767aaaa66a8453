// RMSNorm of rows, with or without a residual add before it: two walks along a row, the second from the L1 cache.
#include <tilewright/host/parallel.h>
#include <tilewright/host/rows.h>

namespace tilewright {

// T: of x, residual and total.  W: of weight.  Y: of y.  kAdd: normalise total = x + residual, and write it.
// kFp32Weight: one rounding, after the weight.
template <class Config, class T = typename Config::T, class W = typename Config::W, class Y = typename Config::Y>
void rms_norm(Y* y, T* total, const T* x, const T* residual, const W* weight, int64_t m, int64_t n, int64_t stride_x,
              int64_t stride_r, float eps, float offset, int threads) {
    using Row = RowOf<T, W, Y>;
    parallel(m, m * n, threads, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const T* from = x + row * stride_x;
            const float squares = sum<Row>(n, [=](int64_t i, auto extent) {
                F32 v = Row::load(from + i, extent);
                if constexpr (Config::kAdd) {  // the sum is rounded before it is normalised, as in the model
                    v = rounded<T>(v + Row::load(residual + row * stride_r + i, extent));
                    Row::store(total + row * n + i, v, extent);
                }
                return v * v;
            });
            if (Config::kAdd) from = total + row * n;
            const float rstd = 1.0f / __builtin_sqrtf(squares / float(n) + eps);
            sweep(n, [=](int64_t i, auto extent) {
                prefetch(x + (row + 1) * stride_x + i);  // memory works while we compute
                if (Config::kAdd) prefetch(residual + (row + 1) * stride_r + i);
                const F32 normed = Row::load(from + i, extent) * rstd;
                const F32 w = Row::load(weight + i, extent);
                const F32 result = Config::kFp32Weight ? normed * (w + offset) : rounded<T>(normed) * w;
                Row::store(y + row * n + i, result, extent);
            });
        }
    });
}

}  // namespace tilewright
