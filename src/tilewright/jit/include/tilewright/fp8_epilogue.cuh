// Epilogue of an FP8 GEMM whose accumulators come in several passes over columns: D in bf16, fp16 or float32
// (tile_epilogue.cuh), or D in e4m3 with one scale per 128 elements of a row.
//
// For e4m3, Z = act(alpha * acc + bias) stays in registers, the amax of a row is a reduction over four lanes, and
//
//     scale = max(amax, 1e-4) * fl(1 / 448),  q = e4m3(Z * (1 / scale))
//
// which equals tilewright.ops.quant of Z in float32 bit for bit.  One pass has the 128 columns of one scale; a gated tile has
// them in two passes, 128 columns of op(B) each.
#pragma once

#include <tilewright/tile_epilogue.cuh>

namespace tilewright {

template <typename Config, typename Stored> struct EpilogueArgs {
    const TensorMap& map;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    i64 c_pitch, c_batch;
    Stored* stored;  // written by ordinary stores: D, for tiles whose rows are cut, or the scales of D
    i64 stored_pitch, stored_batch;  // of scales: the pitch between blocks of 128 columns
    u32 m, n;
    u8* buffers;  // this warpgroup's staging buffers
    u32 barrier;  // this warpgroup's named barrier
};

// The maximum; NaN if one argument is NaN.
__device__ inline float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Shape: kPasses over columns of kColumns each; kWaves times 64 rows and kBuffers staging buffers of kBoxBytes per warpgroup.
template <typename Config, typename Shape, bool kQuantises> struct Fp8Epilogue {
    using Args = EpilogueArgs<Config, typename Config::Out>;
    static constexpr u32 kBoxes = (TileEpilogue<Config>::kRowBytes + kSpan - 1) / kSpan;  // per 64 rows
    // Stage all boxes at once if the buffers suffice, else use half of them per stage
    static constexpr bool kAllFit = Shape::kWaves * kBoxes <= Shape::kBuffers;
    static constexpr u32 kBoxesPerStage = kAllFit ? kBoxes : Shape::kBuffers > 1 ? Shape::kBuffers / 2 : 1;
    using Epilogue = TileEpilogue<Config, kBoxesPerStage, Shape::kBuffers / kBoxesPerStage>;
    Epilogue epilogue;

    __device__ explicit Fp8Epilogue(const Args& a)
        : epilogue{a.map, a.bias, a.c, 0.0f, a.c_pitch, a.c_batch, a.m, a.n, Epilogue::kGated ? a.n / 2 : a.n,
               a.buffers, a.barrier, a.stored, a.stored_pitch, a.stored_batch} {}

    // Writes the accumulators of 64 rows from `row` on and of op(B)'s columns from `column` on; see TileEpilogue.
    template <u32 kCount>
    __device__ void write(float (&acc)[Shape::kPasses][kCount], float alpha, u32 row, u32 column, u32 batch, u32 row_end) {
        epilogue.alpha = alpha;
        constexpr u32 kTotal = Shape::kPasses * kCount;
        epilogue.write(*reinterpret_cast<const float (*)[kTotal]>(acc), row, column, batch, row_end);
    }
};

template <typename Config, typename Shape> struct Fp8Epilogue<Config, Shape, true> {
    using Args = EpilogueArgs<Config, float>;
    static constexpr Activation kActivation = Activation(Config::kActivation);
    static constexpr bool kGated = kActivation == Activation::Swiglu;
    static constexpr u32 kPassesPerScale = kGated ? 2 : 1;
    static_assert(Shape::kColumns == 128, "a pass has the columns of one scale, or half of them (gated)");
    static_assert(!kGated || Shape::kPasses == 2, "gated: two passes have the columns of one scale");
    static_assert(GemmType(Config::kGemmType) == GemmType::Dense, "e4m3 output is for dense products");
    static_assert(Config::kAddend == 0 && !Config::kAccumulate, "e4m3 output has no C");

    Args args;
    u32 buffer = 0;

    __device__ explicit Fp8Epilogue(const Args& a) : args(a) {}

    template <u32 kCount>
    __device__ void write(float (&acc)[Shape::kPasses][kCount], float alpha, u32 row, u32 column, u32 batch, u32) {
#pragma unroll
        for (u32 pass = 0; pass < Shape::kPasses; pass += kPassesPerScale) {
            // Compute Z and its scales
            float scale[2], inverse[2];
            apply(acc, pass, alpha, column + pass * Shape::kColumns, scale);
#pragma unroll
            for (u32 h = 0; h < 2; ++h) inverse[h] = 1.0f / scale[h];

            // Quantise into the staging buffer
            u8* const staging = args.buffers + buffer * kBoxBytes;
            const bool leader = threadIdx.x % 128 == 0;
            if (leader) tma_wait_read<Shape::kBuffers - 1>();  // the TMA has read this buffer's last store
            named_barrier_sync(args.barrier, 128);
            stage(acc, pass, inverse, staging);
            fence_proxy_async_shared();
            named_barrier_sync(args.barrier, 128);

            // Store q and the scales
            const u32 column_out = (column + pass * Shape::kColumns) / kPassesPerScale;
            if (leader) {
                tma_store(args.map, staging, column_out, row, batch);
                tma_commit();
            }
            buffer = (buffer + 1) % Shape::kBuffers;
            if (threadIdx.x % 4 == 0 && column_out < args.n / kPassesPerScale) {
                float* const scales = args.stored + batch * args.stored_batch + column_out / 128 * args.stored_pitch;
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const u32 r = row + fragment_row() + 8 * h;
                    if (r < args.m) scales[r] = scale[h];
                }
            }
        }
    }

  private:
    // Overwrites acc with Z (gated: the gate's half) and sets scale[h], of this thread's row + 8 h.  Outside of D, Z is 0.
    template <u32 kCount>
    __device__ void apply(float (&acc)[Shape::kPasses][kCount], u32 pass, float alpha, u32 column, float (&scale)[2]) {
        float amax[2] = {0, 0};
        const u32 first = column + fragment_column();
        const typename Config::Bias* const biases = args.bias + first;
#pragma unroll
        for (u32 i = 0; i < kPassesPerScale * kCount / 4; ++i) {
            float* const fragment = acc[pass + i / (kCount / 4)] + i % (kCount / 4) * 4;
            float bias[2] = {0, 0};
            if constexpr (Config::kBias) {
                if (first + 8 * i < args.n) load_two<false>(biases + 8 * i, bias[0], bias[1]);
            }
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float* const pair = fragment + 2 * h;
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
        constexpr float kMinAmax = 1e-4f, kInverseMax = 9586981.0f / 4294967296.0f;  // fl(1 / 448)
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {  // reduce over the four lanes of a row
            amax[h] = max_or_nan(amax[h], __shfl_xor_sync(~0u, amax[h], 1));
            amax[h] = max_or_nan(amax[h], __shfl_xor_sync(~0u, amax[h], 2));
            scale[h] = max_or_nan(amax[h], kMinAmax) * kInverseMax;
        }
    }

    // Quantises 64 rows of 128 elements to `staging`, in the layout of the map's 128-byte swizzle.
    template <u32 kCount>
    __device__ void stage(const float (&acc)[Shape::kPasses][kCount], u32 pass, const float (&inverse)[2], u8* staging) {
        u32 thread_row = fragment_row();
        asm volatile("" : "+r"(thread_row));  // or ptxas computes addresses before the main loop and keeps them in registers
#pragma unroll
        for (u32 i = 0; i < kPassesPerScale * kCount / 4; ++i) {
            const float* const fragment = acc[pass + i / (kCount / 4)] + i % (kCount / 4) * 4;
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const u32 row = thread_row + 8 * h;
                if constexpr (kGated) {
                    u8* const address = staging + strip_offset<kSpan>(row, 4 * i + threadIdx.x % 4);
                    *address = u8(pack_e4m3(fragment[2 * h] * inverse[h], 0.0f));
                } else {
                    u8* const address = staging + strip_offset<kSpan>(row, 8 * i + fragment_column());
                    *reinterpret_cast<u16*>(address) =
                        pack_e4m3(fragment[2 * h] * inverse[h], fragment[2 * h + 1] * inverse[h]);
                }
            }
        }
    }
};

}  // namespace tilewright
