// What a warp computes of one unit: S^T = K Q^T, the softmax, O^T += V^T P^T, for kRows query rows.
//
// Keys are the M of both products and query rows their N, of which the matrix instruction takes 8: one token of 8 query
// heads fills it, where queries as M would leave half of 16 rows empty.  Of S^T lane (g, c) = (lane / 4, lane % 4) holds the
// keys g and g + 8 of rows 2 c and 2 c + 1, and of O^T columns of the same rows: so the factors of a softmax are at hand.
// P^T is S^T transposed eight by eight (movmatrix).
//
// e4m3: a byte pair becomes an fp16 pair in one instruction.  A row of 32 bytes read as 16 pairs gives a lane four
// neighbouring columns; which column is which K of the instruction does not matter where Q agrees.  Transposed, a pair is two
// columns of one key: a byte permutation gives each column its two keys, and O^T has columns 2 g and 2 g + 1 where it has
// g and g + 8 else.  Queries are scaled by a power of two for each row, so that fp16 holds those of bf16; scales of tokens
// multiply S and P, the latter in units of the largest one so far.
#pragma once

#include <tilewright/mma_sync.cuh>

#include "division.cuh"
#include "layout.cuh"

namespace tilewright {

constexpr float kLog2e = 1.44269504089f, kLn2 = 0.69314718056f;
__device__ inline float minus_infinity() { return __uint_as_float(0xFF800000); }

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two e4m3 numbers, the low byte first, as fp16.
__device__ inline u32 widen_e4m3(u32 pair) {
    u32 wide;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n" : "=r"(wide) : "r"(pair));
    return wide;
}

// The largest over the lanes that have the same rows.
__device__ inline float max_over_keys(float x) {
#pragma unroll
    for (u32 step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ inline float sum_over_keys(float x) {
#pragma unroll
    for (u32 step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Which keys a row sees: begin <= key < end.
struct Band {
    int group, row_begin, rows;  // of this row tile; rows of the sequence
    int length, tokens, left;
    bool causal;

    __device__ int position(int row) const { return length - tokens + min(row_begin + row, rows - 1) / group; }
    __device__ int begin(int position) const { return left < 0 ? 0 : position - left; }
    __device__ int end(int position) const { return causal ? min(position + 1, length) : length; }
};

struct Scores {
    float scale, softcap;  // both in units of log2: s = scale * q k; softcap 0: none
};

template <bool kFirst, typename A, typename B> struct Choose { using Type = A; };
template <typename A, typename B> struct Choose<false, A, B> { using Type = B; };

template <typename Config> struct Attend {
    using Shape = Layout<Config>;
    static constexpr bool kWidened = Shape::kWidened;
    using Element = typename Config::Element;
    static constexpr u32 kNs = Shape::kRows / 8, kMs = Shape::kKeys / 16, kKs = Shape::kD / 16;

    static constexpr u32 kChains = kNs == 1 ? 2 : 1;  // of products of one row group that do not wait for each other

    u32 q[kNs][kKs][2];
    float row_scale[kNs][2];  // e4m3: what the queries were divided by
    float acc[kNs][kKs][4];
    float m[kNs][2], l[kNs][2];  // l: of this lane's keys
    float value_scale;           // the largest scale of a value so far, by which P was divided

    // q: row r of the tile at q + token * token_stride + head * head_stride, with row = token * group + head.
    __device__ void load_queries(const Element* q_tile, const Band& band, i64 token_stride, i64 head_stride) {
        const u32 g = lane_index() / 4, c = lane_index() % 4;
#pragma unroll
        for (u32 n = 0; n < kNs; ++n) {
            const int row = band.row_begin + int(8 * n + g);
            const bool in_range = row < band.rows;
            const int token = row / band.group, head = row - token * band.group;
            const Element* const from = q_tile + token * token_stride + head * head_stride;
            u32 raw[kKs][2];
#pragma unroll
            for (u32 k = 0; k < kKs; ++k) {
                raw[k][0] = raw[k][1] = 0;
                if (!in_range) continue;
                if constexpr (kWidened) {
                    const uint2 four = *reinterpret_cast<const uint2*>(from + 16 * k + 4 * c);
                    raw[k][0] = four.x, raw[k][1] = four.y;
                } else {
                    raw[k][0] = *reinterpret_cast<const u32*>(from + 16 * k + 2 * c);
                    raw[k][1] = *reinterpret_cast<const u32*>(from + 16 * k + 2 * c + 8);
                }
            }
            if constexpr (kWidened) to_fp16(raw, row_scale[n]);
#pragma unroll
            for (u32 k = 0; k < kKs; ++k) q[n][k][0] = raw[k][0], q[n][k][1] = raw[k][1];
        }
    }

    // Scales row g by a power of two, below 2 in magnitude, and rounds it to fp16.  scale: of rows 2 c and 2 c + 1.
    __device__ static void to_fp16(u32 (&raw)[kKs][2], float (&scale)[2]) {
        float most = 0;
        float2 values[kKs][2];
#pragma unroll
        for (u32 k = 0; k < kKs; ++k) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                values[k][i] = {to_float(Element{u16(raw[k][i])}), to_float(Element{u16(raw[k][i] >> 16)})};
                most = fmaxf(most, fmaxf(fabsf(values[k][i].x), fabsf(values[k][i].y)));
            }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // 2^e of the largest; the smallest normal number for zeros, 2^126 at most so that its inverse is normal too
        const u32 exponent = min(max(__float_as_uint(most) >> 23, 1u), 253u);
        const float down = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (u32 k = 0; k < kKs; ++k) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) raw[k][i] = pack<float16>(values[k][i].x * down, values[k][i].y * down);
        }
        const float own = __uint_as_float(exponent << 23);
        const u32 c = lane_index() % 4;
        scale[0] = __shfl_sync(~0u, own, 8 * c);
        scale[1] = __shfl_sync(~0u, own, 8 * c + 4);
    }

    __device__ void clear() {
#pragma unroll
        for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) m[n][e] = minus_infinity(), l[n][e] = 0;
#pragma unroll
            for (u32 k = 0; k < kKs; ++k) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) acc[n][k][i] = 0;
            }
        }
        value_scale = 0;
    }

    // One unit, whose first key is `first`.   masked: some row does not see some key.
    __device__ void add(const u8* unit, int first, bool masked, const Band& band, const Scores& scores) {
        const u32 keys_at = shared_address(unit), values_at = keys_at + Shape::kTileBytes;
        const u32 lane = lane_index(), g = lane / 4, c = lane % 4;
        const float* const k_scale = reinterpret_cast<const float*>(unit + Shape::kScalesOffset);
        const float* const v_scale = k_scale + Shape::kKeys;

        // S^T = K Q^T; of eight rows in two sums of alternate K, so that one product does not wait for the one before
        float s[kMs][kNs][4];
#pragma unroll
        for (u32 i = 0; i < kMs; ++i) {
            float sums[kChains][kNs][4] = {};
            const u32 row = 16 * i + lane % 16;
            if constexpr (kWidened) {
#pragma unroll
                for (u32 k = 0; k < kKs; k += 2) {
                    u32 pairs[4];
                    ldmatrix_x4(pairs, keys_at + Shape::offset(row, k + lane / 16));
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        const u32 a0 = widen_e4m3(pairs[2 * j]), a2 = widen_e4m3(pairs[2 * j] >> 16);
                        const u32 a1 = widen_e4m3(pairs[2 * j + 1]), a3 = widen_e4m3(pairs[2 * j + 1] >> 16);
#pragma unroll
                        for (u32 n = 0; n < kNs; ++n) {
                            mma_16x8x16<float16>(sums[j % kChains][n], a0, a1, a2, a3, q[n][k + j][0], q[n][k + j][1]);
                        }
                    }
                }
            } else {
#pragma unroll
                for (u32 k = 0; k < kKs; ++k) {
                    u32 a[4];
                    ldmatrix_x4(a, keys_at + Shape::offset(row, 2 * k + lane / 16));
#pragma unroll
                    for (u32 n = 0; n < kNs; ++n) {
                        mma_16x8x16<Element>(sums[k % kChains][n], a[0], a[1], a[2], a[3], q[n][k][0], q[n][k][1]);
                    }
                }
            }
#pragma unroll
            for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    s[i][n][e] = sums[0][n][e];
                    if constexpr (kChains == 2) s[i][n][e] += sums[1][n][e];
                }
            }
        }

        // Scores in units of log2
        float ratio[kMs][2] = {};  // scales of the values of keys g and g + 8
        float rescale = 1;
        if constexpr (Config::kTokenScales) {
            float most = 0;
#pragma unroll
            for (u32 i = 0; i < kMs; ++i) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    ratio[i][h] = v_scale[16 * i + 8 * h + g];
                    most = fmaxf(most, fabsf(ratio[i][h]));
                }
            }
            most = fmaxf(max_over_keys(most), value_scale);
            if (most > value_scale) rescale = value_scale / most;
            value_scale = most;
            const float inverse = most > 0 ? 1.0f / most : 0.0f;
#pragma unroll
            for (u32 i = 0; i < kMs; ++i) ratio[i][0] *= inverse, ratio[i][1] *= inverse;
        }
#pragma unroll
        for (u32 i = 0; i < kMs; ++i) {
            float of_key[2] = {scores.scale, scores.scale};
            if constexpr (Config::kTokenScales) of_key[0] *= k_scale[16 * i + g], of_key[1] *= k_scale[16 * i + 8 + g];
#pragma unroll
            for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    if constexpr (kWidened) s[i][n][e] *= row_scale[n][e % 2];
                    s[i][n][e] *= of_key[e / 2];
                }
            }
        }
        if (scores.softcap > 0) {  // tanh(x) = 1 - 2 / (1 + e^2x)
#pragma unroll
            for (u32 i = 0; i < kMs; ++i) {
#pragma unroll
                for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) {
                        const float x = s[i][n][e] * (2 * kLog2e / scores.softcap);
                        s[i][n][e] = scores.softcap * (1 - 2 / (1 + exp2_fast(x)));
                    }
                }
            }
        }
        if (masked) {
#pragma unroll
            for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
                for (u32 e = 0; e < 2; ++e) {
                    const int position = band.position(8 * n + 2 * c + e);
                    const int begin = band.begin(position) - first, end = band.end(position) - first;
#pragma unroll
                    for (u32 i = 0; i < kMs; ++i) {
#pragma unroll
                        for (u32 h = 0; h < 2; ++h) {
                            const int key = 16 * i + 8 * h + g;
                            if (key < begin || key >= end) s[i][n][2 * h + e] = minus_infinity();
                        }
                    }
                }
            }
        }

        // Online softmax
        float factor[kNs][2];
        bool changed = rescale != 1;
#pragma unroll
        for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                float most = fmaxf(s[0][n][e], s[0][n][2 + e]);
#pragma unroll
                for (u32 i = 1; i < kMs; ++i) most = fmaxf(most, fmaxf(s[i][n][e], s[i][n][2 + e]));
                const float next = fmaxf(m[n][e], max_over_keys(most));
                const float base = next == minus_infinity() ? 0 : next;
                const float of_sum = exp2_fast(m[n][e] - base);
                changed |= next > m[n][e];
                m[n][e] = next;
                l[n][e] *= of_sum;
                factor[n][e] = of_sum * rescale;
#pragma unroll
                for (u32 i = 0; i < kMs; ++i) {
#pragma unroll
                    for (u32 h = 0; h < 2; ++h) {
                        float& p = s[i][n][2 * h + e];
                        p = exp2_fast(p - base);
                        l[n][e] += p;
                        if constexpr (Config::kTokenScales) p *= ratio[i][h];
                    }
                }
            }
        }
        if (__any_sync(~0u, changed)) {
#pragma unroll
            for (u32 n = 0; n < kNs; ++n) {
#pragma unroll
                for (u32 k = 0; k < kKs; ++k) {
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) acc[n][k][e] *= factor[n][e % 2];
                }
            }
        }

        // O^T += V^T P^T
        using Product = typename Choose<kWidened, float16, Element>::Type;
#pragma unroll
        for (u32 i = 0; i < kMs; ++i) {
            u32 p[kNs][2];
#pragma unroll
            for (u32 n = 0; n < kNs; ++n) {
                p[n][0] = transpose_8x8(pack<Product>(s[i][n][0], s[i][n][1]));
                p[n][1] = transpose_8x8(pack<Product>(s[i][n][2], s[i][n][3]));
            }
            if constexpr (kWidened) {
                const u32 row = 16 * i + lane % 16;
#pragma unroll
                for (u32 k = 0; k < kKs; k += 2) {
                    u32 pairs[4];
                    ldmatrix_x4_trans(pairs, values_at + Shape::offset(row, k + lane / 16));
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        // Bytes of key 2 c, columns 2 g and 2 g + 1, then of key 2 c + 1: each column's pair of keys
                        const u32 low = __byte_perm(pairs[2 * j], 0, 0x3120), high = __byte_perm(pairs[2 * j + 1], 0, 0x3120);
                        const u32 a0 = widen_e4m3(low), a1 = widen_e4m3(low >> 16);
                        const u32 a2 = widen_e4m3(high), a3 = widen_e4m3(high >> 16);
#pragma unroll
                        for (u32 n = 0; n < kNs; ++n) mma_16x8x16<Product>(acc[n][k + j], a0, a1, a2, a3, p[n][0], p[n][1]);
                    }
                }
            } else {
                const u32 row = 16 * i + lane % 8 + lane / 16 * 8;
#pragma unroll
                for (u32 k = 0; k < kKs; ++k) {
                    u32 a[4];
                    ldmatrix_x4_trans(a, values_at + Shape::offset(row, 2 * k + lane / 8 % 2));
#pragma unroll
                    for (u32 n = 0; n < kNs; ++n) mma_16x8x16<Product>(acc[n][k], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
                }
            }
        }
    }

    // The column of O that acc[n][k][2 h + e] of this lane belongs to; its row is 8 n + 2 c + e.
    __device__ static u32 column(u32 k, u32 h) {
        const u32 g = lane_index() / 4;
        return 16 * k + (kWidened ? 2 * g + h : g + 8 * h);
    }
};

}  // namespace tilewright
