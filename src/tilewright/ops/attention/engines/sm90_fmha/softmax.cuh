// Softmax while the scores come, tile by tile, of the two rows that a thread's accumulators belong to.
//
// p = 2^(c s - offset), offset = c m, m a maximum of the row that is allowed to be stale: it is renewed only when a
// score is more than kSlack above it in the exponent.  So p is at most 2^kSlack, nothing is lost in float32 nor in the
// rounding of p, and in most tiles the four threads of a row need not speak to each other, nor O be rescaled.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kSlack = 8;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

__device__ inline float exp2_approximate(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_approximate(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <u32 kCount> struct OnlineSoftmax {
    float highest[2];  // scores above it renew the offset; -infinity: there was no score yet
    float offset[2];   // 0 before the first score
    float sum[2];      // of this thread's p
    float factor[2];   // what the sums before the last step must be multiplied by

    __device__ void reset() {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) highest[h] = -infinity(), offset[h] = 0, sum[h] = 0, factor[h] = 1;
    }

    // Scores s become p.  c > 0.  True, in all lanes of a warp alike, if O must be multiplied by `factor` first.
    __device__ bool step(float (&s)[kCount], float c, float slack_over_c) {
        float top[2][2];
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            float& t = top[i % 4 / 2][i % 2];
            t = i < 4 ? s[i] : fmaxf(t, s[i]);
        }
        const float mine[2] = {fmaxf(top[0][0], top[0][1]), fmaxf(top[1][0], top[1][1])};
        const bool renew = __any_sync(~0u, mine[0] > highest[0] || mine[1] > highest[1]);
        if (renew) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float m = fmaxf(mine[h], __shfl_xor_sync(~0u, mine[h], 1));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                const bool higher = m > highest[h];
                const float next = higher ? m * c : offset[h];
                factor[h] = higher && highest[h] > -infinity() ? exp2_approximate(offset[h] - next) : 1;
                highest[h] = higher ? m + slack_over_c : highest[h];
                offset[h] = next;
                sum[h] *= factor[h];
            }
        }
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            const u32 h = i % 4 / 2;
            s[i] = exp2_approximate(s[i] * c - offset[h]);
            sum[h] += s[i];
        }
        return renew;
    }

    // After the last step: what O must be multiplied by, and the log of the sum, of row h.  sink: a score of its own,
    // in units of log2; -infinity: none.
    __device__ float finish(u32 h, float sink, float& lse) {
        float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
        all += __shfl_xor_sync(~0u, all, 2);
        float base = offset[h], scale = 1;
        if (sink > -infinity()) {
            base = all == 0 ? sink : fmaxf(base, sink);
            scale = all == 0 ? 1 : exp2_approximate(offset[h] - base);
            all = all * scale + exp2_approximate(sink - base);
        }
        lse = all == 0 ? -infinity() : kLn2 * (base + log2_approximate(all));
        return all == 0 ? 0 : scale * reciprocal(all);
    }
};

}  // namespace tilewright
