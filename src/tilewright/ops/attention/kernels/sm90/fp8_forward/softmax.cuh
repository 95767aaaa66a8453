// Online softmax of the two rows in a thread's accumulators, of probabilities that are rounded to e4m3.
//
// p = 2^(c s - m + kShift), m the largest c s of the row so far: the largest p is 2^kShift, which e4m3 holds exactly.  c, which
// contains the scales of Q and K, may change from tile to tile, so m is kept in units of log2.
#pragma once

#include "fmha_forward/softmax.cuh"

namespace tilewright {

constexpr float kShift = 8;  // as in fmha_fp8/rounding.py
constexpr float kLeastScale = 1e-37f;  // -infinity times a scale that is too small for float32 must stay -infinity

template <u32 kCount> struct Fp8Softmax {
    float m[2];      // the largest score so far, times c; -infinity: none
    float l[2];      // sum of this thread's p
    float alpha[2];  // the last step's rescaling of what was summed before

    __device__ void reset() {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) m[h] = -infinity(), l[h] = 0, alpha[h] = 1;
    }

    __device__ static float offset(float m) { return m == -infinity() ? 0 : m - kShift; }

    // Overwrites scores s with p; c > 0.
    __device__ void step(float (&s)[kCount], float c) {
        // The maximum of this thread's scores, in two chains per row
        float top[2][2];
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            float& t = top[i % 4 / 2][i % 2];
            t = i < 4 ? s[i] : fmaxf(t, s[i]);
        }
        const float row_max[2] = {c * fmaxf(top[0][0], top[0][1]), c * fmaxf(top[1][0], top[1][1])};

        // Later tiles seldom have a larger score: then the four threads of a row have nothing to exchange
        alpha[0] = 1, alpha[1] = 1;
        if (__any_sync(~0u, row_max[0] > m[0] || row_max[1] > m[1])) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float next = fmaxf(row_max[h], __shfl_xor_sync(~0u, row_max[h], 1));
                next = fmaxf(next, __shfl_xor_sync(~0u, next, 2));
                if (next > m[h]) {
                    alpha[h] = exp2_approximate(m[h] - next);
                    m[h] = next;
                    l[h] *= alpha[h];
                }
            }
        }

        // p, and its sum
        const float offsets[2] = {offset(m[0]), offset(m[1])};
#pragma unroll
        for (u32 i = 0; i < kCount; ++i) {
            const u32 h = i % 4 / 2;
            s[i] = exp2_approximate(s[i] * c - offsets[h]);
            l[h] += s[i];
        }
    }

    // After the last step: returns the factor that normalises O in row h, and its lse.  sink: one more score, without a value,
    // in units of log2; -infinity: none.  The factor of a row without keys is 0.
    __device__ float finish(u32 h, float sink, float& lse) {
        float sum = l[h] + __shfl_xor_sync(~0u, l[h], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool empty = sum == 0;
        float base = offset(m[h]), scale = 1;
        if (sink > -infinity()) {
            base = empty ? sink : fmaxf(base, sink);
            scale = empty ? 1 : exp2_approximate(offset(m[h]) - base);
            sum = sum * scale + exp2_approximate(sink - base);
        }
        lse = sum == 0 ? -infinity() : kLn2 * (base + log2_approximate(sum));
        return empty ? 0 : scale * reciprocal(sum);
    }
};

// Rounds p to e4m3, as A of a wgmma (wgmma_rs.cuh): registers 4 i to 4 i + 3 are keys 32 i to 32 i + 31, in the order that the
// transposed V has.
template <u32 kCount> __device__ inline void round_to_e4m3(const float (&s)[kCount], u32 (&p)[kCount / 4]) {
#pragma unroll
    for (u32 i = 0; i < kCount / 4; ++i) {
        const float* const f = s + i / 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(f[0], f[1], f[4], f[5]);
    }
}

}  // namespace tilewright
