// RMSNorm of rows, with or without a residual add before it: two passes over a row, the second from the L1 cache.
#include <tilewright/host/parallel.h>
#include <tilewright/host/rows.h>

namespace tilewright {

// T: dtype of x, residual and total.  W: dtype of weight.  Y: dtype of y.
// kAdd: normalise total = x + residual, and write it.  kWeight: there is a weight.  kFp32Weight: round once, after the
// product with it.
template <class Config, class T = typename Config::T, class W = typename Config::W, class Y = typename Config::Y>
void rms_norm(Y* y, T* total, const T* x, const T* residual, const W* weight, int64_t m, int64_t n, int64_t stride_x,
              int64_t stride_r, float eps, float offset, int threads) {
    using Row = RowOf<T, W, Y>;
    parallel(m, m * n, threads, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            // First pass: the sum of squares
            const T* x_row = x + row * stride_x;
            const float sum_squares = sum<Row>(n, [=](int64_t i, auto extent) {
                F32 x_fp32 = Row::load(x_row + i, extent);
                if constexpr (Config::kAdd) {  // the sum is rounded before it is normalised, as in the model
                    x_fp32 = rounded<T>(x_fp32 + Row::load(residual + row * stride_r + i, extent));
                    Row::store(total + row * n + i, x_fp32, extent);
                }
                return x_fp32 * x_fp32;
            });
            // Second pass: normalise and scale
            if (Config::kAdd) x_row = total + row * n;
            const float rstd = 1.0f / __builtin_sqrtf(sum_squares / float(n) + eps);
            sweep(n, [=](int64_t i, auto extent) {
                prefetch(x + (row + 1) * stride_x + i);  // the next row, while this one is computed
                if (Config::kAdd) prefetch(residual + (row + 1) * stride_r + i);
                const F32 x_hat = Row::load(x_row + i, extent) * rstd;
                F32 y_fp32 = x_hat;
                if constexpr (Config::kWeight) {
                    const F32 w = Row::load(weight + i, extent);
                    y_fp32 = Config::kFp32Weight ? x_hat * (w + offset) : rounded<T>(x_hat) * w;
                }
                Row::store(y + row * n + i, y_fp32, extent);
            });
        }
    });
}

}  // namespace tilewright
