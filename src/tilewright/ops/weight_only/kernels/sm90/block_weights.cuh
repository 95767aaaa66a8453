// D (M x N) = X (M x K) * W^T + bias for at most 16 rows of X ("tokens") and W (N x K) in 4 or 8 bits, which goes from
// global memory to registers: every byte of it is read by one thread, once.
//
// A chunk is 128 of K of 16 kTiles rows of W.  The warps of a block share these rows and take turns along K; kDepth chunks of a
// warp are on their way at once.  In a chunk a thread holds 32 consecutive elements of rows g and g + 8 (g = lane / 4) and the
// same K of token g: the matrix instruction sums over any order of K that both operands share (mma_sync.cuh).
//
// kFormat 0, integers of 4 bits: products of a chunk are accumulated from zero and promoted with the scale of their group of 128.
// kFormat 1 to 3, MXFP4, NVFP4 and MXFP8: an element times the scale of its block is a bfloat16 number, exactly, and is made
// before the product.  An e2m1 number s e1 e0 m becomes bfloat16 by moving its bits: sign to sign, e1 e0 m to the lowest
// exponent bits and the highest of the mantissa.  Its value is then 2^-126 of what it should be, also where e1 e0 is 0, as both
// formats have subnormal numbers; the scale brings it back.
//
// Config: kFormat, kTokens (8 or 16), kTiles, kWarps, kDepth, kCtas; Element, Scale (of integers), Out, Bias.
#pragma once

#include <tilewright/mma_sync.cuh>
#include <tilewright/ptx.cuh>
#include <tilewright/weight_convert.cuh>

namespace tilewright {

constexpr u32 kInt4 = 0, kMxfp4 = 1, kNvfp4 = 2, kMxfp8 = 3;
constexpr u32 kChunk = 128, kShare = 32;  // elements of K: of a chunk, of one thread in it

struct alignas(16) Quad { u32 words[4]; };

__device__ inline Quad load_once(const void* from) {
    Quad v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
        : "l"(from));
    return v;
}
__device__ inline u32 multiply_pairs(u32 x, u32 y) {
    u32 z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// Eight e2m1 numbers as four pairs (0, 4), (1, 5), (2, 6), (3, 7) of bfloat16, times 2^-126.
__device__ inline void convert_e2m1(u32 word, u32 (&pairs)[4]) {
    constexpr u32 kSign = 0x80008000, kRest = 0x01C001C0;
    pairs[0] = (word << 12 & kSign) | (word << 6 & kRest);
    pairs[1] = (word << 8 & kSign) | (word << 2 & kRest);
    pairs[2] = (word << 4 & kSign) | (word >> 2 & kRest);
    pairs[3] = (word & kSign) | (word >> 6 & kRest);
}

// Two e4m3 numbers as floats.
__device__ inline void convert_e4m3(u16 two, float& low, float& high) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    low = to_float(float16{u16(halves & 0xFFFF)}), high = to_float(float16{u16(halves >> 16)});
}

// 2^(exponent - 127) as a pair of bfloat16; NaN for 255.
__device__ inline u32 power_pair(u32 exponent) {
    const u32 bits = exponent == 255 ? 0x7FC0 : exponent == 0 ? 0x0040 : exponent << 7;
    return bits * 0x00010001;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kWarps * 32, Config::kCtas) block_weights(
    typename Config::Out* d, const typename Config::Element* x, const u8* q, const void* scales, const float* tensor_scale,
    const typename Config::Bias* bias, i64 d_row, i64 x_row, i64 scale_pitch, int m, int n, int k) {
    using Element = typename Config::Element;
    constexpr u32 kFormat = Config::kFormat, kTiles = Config::kTiles, kWarps = Config::kWarps, kDepth = Config::kDepth;
    constexpr u32 kTokenTiles = Config::kTokens / 8, kQuads = kFormat == kMxfp8 ? 2 : 1, kWords = 4 * kQuads;
    constexpr u32 kRows = 16 * kTiles, kTokens = Config::kTokens;
    __shared__ float parts[kWarps][kTokens][kRows];

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const u32 first_row = blockIdx.x * kRows, chunks = k / kChunk;
    const i64 row_bytes = i64(k) * kWords / 8;  // a share has 4 kWords bytes

    // Rows beyond the last are read again and not stored
    i64 rows[kTiles][2];
    const u8* weights[kTiles][2];
#pragma unroll
    for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            rows[tile][half] = min(first_row + 16 * tile + 8 * half + g, u32(n) - 1);
            weights[tile][half] = q + rows[tile][half] * row_bytes + c * 4 * kWords;
        }

    struct Piece {
        Quad quads[kTiles][2][kQuads];
        u32 scales[kTiles][2];
    };
    auto load = [&](Piece& piece, u32 chunk) {
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
#pragma unroll
                for (u32 i = 0; i < kQuads; ++i)
                    piece.quads[tile][half][i] = load_once(weights[tile][half] + chunk * (16 * kWords) + 16 * i);
                const i64 row = rows[tile][half];
                u32& scale = piece.scales[tile][half];
                if constexpr (kFormat == kInt4) {
                    const auto* line = static_cast<const typename Config::Scale*>(scales) + chunk * scale_pitch;
                    scale = __float_as_uint(to_float(line[row]));
                } else if constexpr (kFormat == kNvfp4) {
                    scale = static_cast<const u16*>(scales)[row * (k / 32) + chunk * 4 + c];
                } else {
                    scale = static_cast<const u8*>(scales)[row * (k / 32) + chunk * 4 + c];
                }
            }
    };

    // The weights of the first chunks go to the L2 before the previous kernel ends
#pragma unroll
    for (u32 i = 0; i < kDepth; ++i)
        if (warp + i * kWarps < chunks)
#pragma unroll
            for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
                for (u32 half = 0; half < 2; ++half)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(weights[tile][half] + (warp + i * kWarps) * (16 * kWords)));
    griddepcontrol_wait();
    launch_dependents();

    float acc[kTiles][kTokenTiles][4] = {};
    auto multiply = [&](const Piece& piece, u32 chunk) {
        // Load the tokens, in the order of the pairs
        u32 token_pairs[kTokenTiles][kShare / 2];
#pragma unroll
        for (u32 tile = 0; tile < kTokenTiles; ++tile) {
            const u32 token = 8 * tile + g;
            const auto* from = reinterpret_cast<const Quad*>(x + token * x_row + chunk * kChunk + c * kShare);
#pragma unroll
            for (u32 i = 0; i < kShare / 8; ++i) {
                u32* const pairs = &token_pairs[tile][4 * i];
                const Quad v = token < u32(m) ? __builtin_bit_cast(Quad, from[i]) : Quad{};
                if constexpr (kFormat == kMxfp8) {
                    pairs[0] = v.words[0], pairs[1] = v.words[1], pairs[2] = v.words[2], pairs[3] = v.words[3];
                } else {
                    pairs[0] = pair_low(v.words[0], v.words[2]), pairs[1] = pair_high(v.words[0], v.words[2]);
                    pairs[2] = pair_low(v.words[1], v.words[3]), pairs[3] = pair_high(v.words[1], v.words[3]);
                }
            }
        }
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile) {
            float sum[kTokenTiles][4] = {};
#pragma unroll
            for (u32 i = 0; i < kShare / 8; ++i) {  // eight elements of both rows
                u32 pairs[2][4];
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const Quad* const quads = piece.quads[tile][half];
                    const u32 scale = piece.scales[tile][half];
                    if constexpr (kFormat == kInt4) {
                        convert_4bit<Element, false>(quads[0].words[i], pairs[half]);
                    } else if constexpr (kFormat == kMxfp8) {
                        const u32 factor = power_pair(scale);
#pragma unroll
                        for (u32 j = 0; j < 4; ++j) {
                            float low, high;
                            convert_e4m3(u16(quads[i / 2].words[i % 2 * 2 + j / 2] >> 16 * (j % 2)), low, high);
                            pairs[half][j] = multiply_pairs(pack<bfloat16>(low, high), factor);
                        }
                    } else {
                        convert_e2m1(quads[0].words[i], pairs[half]);
                        u32 factor;
                        if constexpr (kFormat == kMxfp4) {
                            factor = power_pair(min(scale, 128u) + 126);
                        } else {  // 2^118 of the 2^126: a scale has up to 448
                            float low, high;
                            convert_e4m3(u16(scale), low, high);
                            const float of_block = (i < 2 ? low : high) * 0x1p118f;
                            factor = pack<bfloat16>(of_block, of_block);
                        }
#pragma unroll
                        for (u32 j = 0; j < 4; ++j) pairs[half][j] = multiply_pairs(pairs[half][j], factor);
                        if (kFormat == kMxfp4 && scale > 128) {  // beyond the largest power of two
                            const u32 more = power_pair(scale == 255 ? 255 : scale - 1);
#pragma unroll
                            for (u32 j = 0; j < 4; ++j) pairs[half][j] = multiply_pairs(pairs[half][j], more);
                        }
                    }
                }
#pragma unroll
                for (u32 tokens = 0; tokens < kTokenTiles; ++tokens)
#pragma unroll
                    for (u32 j = 0; j < 4; j += 2) {
                        const u32* const other = &token_pairs[tokens][4 * i + j];
                        float(&to)[4] = kFormat == kInt4 ? sum[tokens] : acc[tile][tokens];
                        mma_16x8x16<Element>(
                            to, pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1], other[0], other[1]);
                    }
            }
            if constexpr (kFormat == kInt4) {
#pragma unroll
                for (u32 tokens = 0; tokens < kTokenTiles; ++tokens)
#pragma unroll
                    for (u32 j = 0; j < 4; ++j)
                        acc[tile][tokens][j] += sum[tokens][j] * __uint_as_float(piece.scales[tile][j / 2]);
            }
        }
    };

    Piece ring[kDepth];
#pragma unroll
    for (u32 i = 0; i < kDepth; ++i)
        if (warp + i * kWarps < chunks) load(ring[i], warp + i * kWarps);
    for (u32 base = warp; base < chunks; base += kWarps * kDepth) {
#pragma unroll
        for (u32 i = 0; i < kDepth; ++i) {
            const u32 chunk = base + i * kWarps, next = chunk + kWarps * kDepth;
            if (chunk < chunks) {
                multiply(ring[i], chunk);
                if (next < chunks) load(ring[i], next);
            }
        }
    }

    // Add the sums of the warps, in their order
#pragma unroll
    for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (u32 tokens = 0; tokens < kTokenTiles; ++tokens)
#pragma unroll
            for (u32 j = 0; j < 4; ++j) parts[warp][8 * tokens + 2 * c + j % 2][16 * tile + 8 * (j / 2) + g] = acc[tile][tokens][j];
    __syncthreads();
    for (u32 i = threadIdx.x; i < kTokens * kRows; i += kWarps * 32) {
        const u32 token = i / kRows, row = i % kRows;
        if (token >= u32(m) || first_row + row >= u32(n)) continue;
        float total = 0;
#pragma unroll
        for (u32 w = 0; w < kWarps; ++w) total += parts[w][token][row];
        if constexpr (kFormat == kNvfp4) total *= (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;
        if (bias) total += to_float(bias[first_row + row]);
        d[token * d_row + first_row + row] = from_float<typename Config::Out>(total);
    }
}

}  // namespace tilewright
