// How a warpgroup's sums of several passes become D: in bf16, fp16 or float32 as tile_epilogue.cuh does it, or in e4m3 with
// one scale for 128 elements of a row.
//
// The second: Z = act(alpha * sums + bias) stays in registers, amax of a row is that of four lanes, and
//
//     scale = max(amax, 1e-4) * fl(1 / 448),  q = e4m3(Z * (1 / scale))
//
// to the bit what tilewright.ops.quant makes of Z in float32.  A pass has the 128 columns of one scale; of a gated tile two
// passes over 128 columns of op(B) have them together.
#pragma once

#include <tilewright/tile_epilogue.cuh>

namespace tilewright {

template <typename Config, typename Stored> struct EpilogueArgs {
    const TensorMap& map;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    i64 c_pitch, c_batch;
    Stored* stored;  // what ordinary stores write: rows of D that the map would not cut off, or the scales of D
    i64 stored_pitch, stored_batch;  // of scales, the pitch from one 128 columns to the next
    u32 m, n;
    u8* buffers;  // of this warpgroup
    u32 barrier;  // of this warpgroup
};

// Max that a NaN wins.
__device__ inline float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Two floats as neighbouring e4m3, `low` at the lower address.
__device__ inline u16 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Shape: 64 rows have kPasses, over columns, of kColumns each; a warpgroup kWaves times 64 rows and kBuffers of kBoxBytes.
template <typename Config, typename Shape, bool kQuantises> struct Fp8Epilogue {
    using Args = EpilogueArgs<Config, typename Config::Out>;
    using One = TileEpilogue<Config>;
    static constexpr u32 kBoxes = (One::kRowBytes + kSpan - 1) / kSpan;  // of 64 rows
    // All at once if there is room, else half of what there is room for
    static constexpr bool kRoom = Shape::kWaves * kBoxes <= Shape::kBuffers;
    static constexpr u32 kTogether = kRoom ? kBoxes : Shape::kBuffers > 1 ? Shape::kBuffers / 2 : 1;
    using Write = TileEpilogue<Config, kTogether, Shape::kBuffers / kTogether>;
    Write tile;

    __device__ explicit Fp8Epilogue(const Args& a)
        : tile{a.map, a.bias, a.c, 0.0f, a.c_pitch, a.c_batch, a.m, a.n, Write::kGated ? a.n / 2 : a.n,
               a.buffers, a.barrier, a.stored, a.stored_pitch, a.stored_batch} {}

    // Sums of 64 rows from `row` on and columns of op(B) from `column` on; see TileEpilogue.
    template <u32 kCount>
    __device__ void write(float (&sums)[Shape::kPasses][kCount], float alpha, u32 row, u32 column, u32 batch, u32 row_end) {
        tile.alpha = alpha;
        constexpr u32 kAll = Shape::kPasses * kCount;
        tile.write(*reinterpret_cast<const float (*)[kAll]>(sums), row, column, batch, row_end);
    }
};

template <typename Config, typename Shape> struct Fp8Epilogue<Config, Shape, true> {
    using Args = EpilogueArgs<Config, float>;
    static constexpr Activation kActivation = Activation(Config::kActivation);
    static constexpr bool kGated = kActivation == Activation::Swiglu;
    static constexpr u32 kJoined = kGated ? 2 : 1;  // passes that share scales
    static_assert(Shape::kColumns == 128, "a pass has the columns of one scale, or half of them");
    static_assert(!kGated || Shape::kPasses == 2, "two passes have the columns of one scale");
    static_assert(Walk(Config::kWalk) == Walk::Dense && Config::kAddend == 0 && !Config::kInto, "products of a batch, no C");

    Args args;
    u32 buffer = 0;

    __device__ explicit Fp8Epilogue(const Args& a) : args(a) {}

    template <u32 kCount>
    __device__ void write(float (&sums)[Shape::kPasses][kCount], float alpha, u32 row, u32 column, u32 batch, u32) {
#pragma unroll
        for (u32 pass = 0; pass < Shape::kPasses; pass += kJoined) {
            float scale[2], inverse[2];
            finish(sums, pass, alpha, column + pass * Shape::kColumns, scale);
#pragma unroll
            for (u32 h = 0; h < 2; ++h) inverse[h] = 1.0f / scale[h];

            u8* const to = args.buffers + buffer * kBoxBytes;
            const bool leader = threadIdx.x % 128 == 0;
            if (leader) tma_wait_read<Shape::kBuffers - 1>();  // the last store from this buffer has left it
            sync_threads(args.barrier, 128);
            stage(sums, pass, inverse, to);
            fence_shared_for_async();
            sync_threads(args.barrier, 128);

            const u32 at = (column + pass * Shape::kColumns) / kJoined;
            if (leader) {
                tma_store(args.map, to, at, row, batch);
                tma_commit();
            }
            buffer = (buffer + 1) % Shape::kBuffers;
            if (threadIdx.x % 4 == 0 && at < args.n / kJoined) {
                float* const scales = args.stored + batch * args.stored_batch + at / 128 * args.stored_pitch;
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const u32 r = row + fragment_row() + 8 * h;
                    if (r < args.m) scales[r] = scale[h];
                }
            }
        }
    }

  private:
    // Sums become Z (gated, in place of the gate), and scale[h] that of row 8 h of this thread.  Outside of D, Z is 0.
    template <u32 kCount>
    __device__ void finish(float (&sums)[Shape::kPasses][kCount], u32 pass, float alpha, u32 column, float (&scale)[2]) {
        float amax[2] = {0, 0};
        const u32 first = column + fragment_column();
        const typename Config::Bias* const biases = args.bias + first;
#pragma unroll
        for (u32 i = 0; i < kJoined * kCount / 4; ++i) {
            float* const of = sums[pass + i / (kCount / 4)] + i % (kCount / 4) * 4;
            float bias[2] = {0, 0};
            if constexpr (Config::kBias) {
                if (first + 8 * i < args.n) load_two<false>(biases + 8 * i, bias[0], bias[1]);
            }
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float* const pair = of + 2 * h;
                const float z0 = alpha * pair[0] + bias[0], z1 = alpha * pair[1] + bias[1];
                if constexpr (kGated) {
                    pair[0] = activate<kActivation>(z0) * z1;
                } else {
                    pair[0] = activate<kActivation>(z0), pair[1] = activate<kActivation>(z1);
                    amax[h] = max_or_nan(amax[h], fabsf(pair[1]));
                }
                amax[h] = max_or_nan(amax[h], fabsf(pair[0]));
            }
        }
        constexpr float kLeast = 1e-4f, kInverseMax = 9586981.0f / 4294967296.0f;  // 1 / 448 rounded
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {  // the four lanes of a row
            amax[h] = max_or_nan(amax[h], __shfl_xor_sync(~0u, amax[h], 1));
            amax[h] = max_or_nan(amax[h], __shfl_xor_sync(~0u, amax[h], 2));
            scale[h] = max_or_nan(amax[h], kLeast) * kInverseMax;
        }
    }

    // 64 rows of 128 elements to `to`, as the map's 128-byte swizzle wants them.
    template <u32 kCount>
    __device__ void stage(const float (&sums)[Shape::kPasses][kCount], u32 pass, const float (&inverse)[2], u8* to) {
        u32 first_row = fragment_row();
        asm volatile("" : "+r"(first_row));  // else addresses are computed before the main loop, and fill its registers
#pragma unroll
        for (u32 i = 0; i < kJoined * kCount / 4; ++i) {
            const float* const of = sums[pass + i / (kCount / 4)] + i % (kCount / 4) * 4;
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const u32 row = first_row + 8 * h;
                if constexpr (kGated) {
                    u8* const place = to + strip_offset<kSpan>(row, 4 * i + threadIdx.x % 4);
                    *place = u8(pack_e4m3(of[2 * h] * inverse[h], 0.0f));
                } else {
                    u8* const place = to + strip_offset<kSpan>(row, 8 * i + fragment_column());
                    *reinterpret_cast<u16*>(place) = pack_e4m3(of[2 * h] * inverse[h], of[2 * h + 1] * inverse[h]);
                }
            }
        }
    }
};

}  // namespace tilewright
