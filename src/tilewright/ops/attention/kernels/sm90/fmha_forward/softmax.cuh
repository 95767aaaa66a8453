// Online softmax of the two rows in a thread's accumulators.
//
// p = 2^(c s - offset) with offset = c m.  The row maximum m may be stale: it is updated only when a score exceeds it by more
// than kSlack in the exponent.  So p <= 2^kSlack, which costs no accuracy in fp32 nor in the rounding of p; and most tiles
// need no shuffles between the four threads of a row and no rescaling of O.
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
    float renew_above[2];  // a score above it updates the offset; -infinity: no score yet
    float offset[2];       // c m; 0 before the first score
    float l_i[2];          // sum of this thread's p
    float alpha[2];        // the last step's rescaling of O

    __device__ void reset() {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) renew_above[h] = -infinity(), offset[h] = 0, l_i[h] = 0, alpha[h] = 1;
    }

    // Overwrites scores s with p; c > 0.  True, in all lanes of a warp, if O must be multiplied by `alpha` first.
    __device__ bool step(float (&s)[kCount], float c, float slack) {
        // The maximum of this thread's scores, in two chains per row
        float top[2][2];
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            float& t = top[i % 4 / 2][i % 2];
            t = i < 4 ? s[i] : fmaxf(t, s[i]);
        }
        const float row_max[2] = {fmaxf(top[0][0], top[0][1]), fmaxf(top[1][0], top[1][1])};

        // Update the offset, if any row of the warp needs it
        const bool renew = __any_sync(~0u, row_max[0] > renew_above[0] || row_max[1] > renew_above[1]);
        if (renew) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float m = fmaxf(row_max[h], __shfl_xor_sync(~0u, row_max[h], 1));
                m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                const bool higher = m > renew_above[h];
                const float next = higher ? m * c : offset[h];
                alpha[h] = higher && renew_above[h] > -infinity() ? exp2_approximate(offset[h] - next) : 1;
                renew_above[h] = higher ? m + slack : renew_above[h];
                offset[h] = next;
                l_i[h] *= alpha[h];
            }
        }

        // p, and its sum
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            const u32 h = i % 4 / 2;
            s[i] = exp2_approximate(s[i] * c - offset[h]);
            l_i[h] += s[i];
        }
        return renew;
    }

    // After the last step: returns the factor that normalises O in row h, and its lse.  sink: one more score, without a value,
    // in units of log2; -infinity: none.
    __device__ float finish(u32 h, float sink, float& lse) {
        float l = l_i[h] + __shfl_xor_sync(~0u, l_i[h], 1);
        l += __shfl_xor_sync(~0u, l, 2);
        float base = offset[h], scale = 1;
        if (sink > -infinity()) {
            base = l == 0 ? sink : fmaxf(base, sink);
            scale = l == 0 ? 1 : exp2_approximate(offset[h] - base);
            l = l * scale + exp2_approximate(sink - base);
        }
        lse = l == 0 ? -infinity() : kLn2 * (base + log2_approximate(l));
        return l == 0 ? 0 : scale * reciprocal(l);
    }
};

}  // namespace tilewright
