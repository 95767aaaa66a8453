// GEMM epilogue: D = act(alpha * acc + bias) + C of one tile, from a warpgroup's accumulators through shared memory to D.
//
// Config: kGemmType (tile_scheduler.cuh); kBlockN, kActivation, kBias, kAddend (elements of C per load: 0 no C, 1, 2); kAccumulate
// (C is D in float32: the TMA adds in global memory, and C is never loaded); Out, Bias, Addend.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

namespace tilewright {

constexpr u32 kTileBuffers = 2;  // staging buffers per warpgroup, 64 rows x 128 bytes of D each

// Loads two adjacent elements of a row, with one load if kPair.
template <bool kPair, typename T> __device__ inline void load_two(const T* from, float& first, float& second) {
    struct alignas(2 * sizeof(T)) Pair { T first, second; };
    if constexpr (kPair) {
        const Pair pair = *reinterpret_cast<const Pair*>(from);
        first = to_float(pair.first), second = to_float(pair.second);
    } else {
        first = to_float(from[0]), second = to_float(from[1]);
    }
}

// The epilogue of one warpgroup.  It stages kBoxesPerStage boxes (64 rows of 128 bytes) between two barriers, while the TMA
// still stores those of the kStages - 1 previous rounds.
template <typename Config, u32 kBoxesPerStage = 1, u32 kStages = kTileBuffers> struct TileEpilogue {
    using Out = typename Config::Out;
    static constexpr Activation kActivation = Activation(Config::kActivation);
    static constexpr u32 kN = Config::kBlockN;
    static constexpr bool kGated = kActivation == Activation::Swiglu;
    static constexpr u32 kGroupBytes = (kGated ? 8 : 16) * sizeof(Out);  // of D, from 16 columns of accumulators
    static constexpr u32 kRowBytes = kN / 16 * kGroupBytes;
    static constexpr u32 kChunk = kSpan / kGroupBytes;  // groups of 16 columns in a box
    static constexpr u32 kStrip = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
    static constexpr bool kStmatrix = !kGated && sizeof(Out) == 2;  // stage with stmatrix
    static constexpr bool kCutRows = GemmType(Config::kGemmType) == GemmType::GroupedM;  // the group may end within the tile
    static_assert(kRowBytes % kStrip == 0, "a tile's rows are whole strips; gated tiles of 16-bit D have N % 32 == 0");
    static_assert(!Config::kAccumulate || (Same<Out, float>::value && Config::kAddend == 0), "kAccumulate adds to D in float32");
    static_assert(!Config::kAccumulate || !kCutRows, "rows of a cut tile are stored, not added");

    const TensorMap& map;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    float alpha;
    i64 c_pitch, c_batch;
    u32 m, n, n_out;
    u8* buffers;  // this warpgroup's kBoxesPerStage * kStages boxes
    u32 barrier;  // this warpgroup's named barrier
    Out* d = nullptr;  // kCutRows: the tensor of `map`
    i64 d_pitch = 0, d_batch = 0;
    u32 stage = 0;

    // Prefetch the next chunk of C or of the bias.  Registers hold two chunks of either one, not of both, and not of C in
    // addition to a gated tile's accumulators.
    static constexpr bool kPrefetch = Config::kBias ? Config::kAddend == 0 : Config::kAddend > 0 && !kGated;

    // C and bias of one chunk.
    struct Operands {
        float addend[kChunk][Config::kAddend > 0 ? 8 : 1];
        float bias[kChunk][Config::kBias && kPrefetch ? 4 : 1];
    };

    // Writes the accumulators of 64 rows from `row` on, and of op(B)'s columns from `column` on, to D; with kCutRows only
    // rows before `row_end`.
    __device__ void write(const float (&acc)[kN / 2], u32 row, u32 column, u32 batch, u32 row_end) {
        if (kCutRows && row >= row_end) return;
        const bool full = !kCutRows || row_end - row >= 64;
        const bool leader = threadIdx.x % 128 == 0;
        const u32 column_out = kGated ? column / 2 : column;
        u32 thread_row = fragment_row();
        // Opaque, or ptxas computes the addresses of stage_chunk before the main loop and keeps them in registers
        if constexpr (!kStmatrix) asm volatile("" : "+r"(thread_row));
        Operands operands[kPrefetch ? 2 : 1];  // of this chunk, and loads of the next in flight
        if constexpr (kPrefetch) load_operands(operands[0], 0, row, column, batch);
#pragma unroll
        for (u32 first = 0; first < kN / 16; first += kChunk) {
            // Load C and bias
            const Operands& current = operands[kPrefetch ? first / kChunk % 2 : 0];
            if constexpr (kPrefetch) {
                load_operands(operands[(first / kChunk + 1) % 2], first + kChunk, row, column, batch);
            } else {
                load_operands(operands[0], first, row, column, batch);
            }

            // Wait until the TMA has read the buffers of this stage
            const u32 box = first / kChunk % kBoxesPerStage;
            u8* const buffer = buffers + (stage * kBoxesPerStage + box) * kBoxBytes;
            if (box == 0) {
                if (leader) tma_wait_read<kStages - 1>();
                named_barrier_sync(barrier, 128);
            }

            // Apply the epilogue and stage the result
#pragma unroll
            for (u32 g = 0; g < kChunk && first + g < kN / 16; ++g) {
                float f[8];
                float b[4] = {};
                if constexpr (Config::kBias && kPrefetch) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) b[i] = current.bias[g][i];
                } else if constexpr (Config::kBias) {
                    load_bias(b, column + (first + g) * 16);
                }
                apply(f, acc + 8 * (first + g), current.addend[g], b);
                stage_chunk(f, buffer, thread_row, g * kGroupBytes);
            }

            // Store the staged boxes
            if (box + 1 == kBoxesPerStage || first + kChunk >= kN / 16) {
                fence_proxy_async_shared();
                named_barrier_sync(barrier, 128);
#pragma unroll
                for (u32 i = 0; i <= box; ++i) {
                    const u32 first_byte = (first / kChunk - box + i) * kSpan;
                    store_box(buffer - (box - i) * kBoxBytes, first_byte, row, column_out, batch, row_end, full);
                }
                if (leader) tma_commit();  // also an empty group: tma_wait_read counts one group per round
                stage = (stage + 1) % kStages;
            }
        }
    }

  private:
    // Stores a staged box, which holds the tile's rows of D from byte `first_byte` on: a `full` one by TMA, a cut one by all
    // threads.
    __device__ void store_box(const u8* staged, u32 first_byte, u32 row, u32 column_out, u32 batch, u32 row_end, bool full) {
        if (!full) {
            store_rows(staged, row, row_end - row, column_out + first_byte / sizeof(Out), min(kSpan, kRowBytes - first_byte),
                       batch);
        } else if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (u32 byte = 0; byte < kSpan && first_byte + byte < kRowBytes; byte += kStrip) {
                const int x = column_out + (first_byte + byte) / sizeof(Out);
                if constexpr (Config::kAccumulate) {
                    tma_reduce_add(map, staged + byte * 64, x, row, batch);
                } else {
                    tma_store(map, staged + byte * 64, x, row, batch);
                }
            }
        }
    }

    // Stores the first `rows` of the 64 staged rows, `bytes` bytes each, with 16-byte stores.
    __device__ void store_rows(const u8* staged, u32 row, u32 rows, u32 column, u32 bytes, u32 batch) {
        struct alignas(16) Vector { u32 words[4]; };
        constexpr u32 kVectors = kSpan / sizeof(Vector);  // per row; eight threads write the 128 bytes of one
        const u32 byte = threadIdx.x % kVectors * sizeof(Vector), first_column = column + byte / sizeof(Out);
        if (byte >= bytes || first_column >= n_out) return;  // rows of D are multiples of 16 bytes
        Out* const out = d + batch * d_batch + first_column;
        for (u32 r = threadIdx.x % 128 / kVectors; r < rows; r += 128 / kVectors) {
            const Vector vector = *reinterpret_cast<const Vector*>(staged + strip_offset<kStrip>(r, byte));
            *reinterpret_cast<Vector*>(out + (row + r) * d_pitch) = vector;
        }
    }

    // Loads C and bias of the chunk that begins with group `first` of 16 columns; nothing beyond the tile.
    __device__ void load_operands(Operands& operands, u32 first, u32 row, u32 column, u32 batch) {
#pragma unroll
        for (u32 g = 0; g < kChunk && first + g < kN / 16; ++g) {
            const u32 group = column + (first + g) * 16;
            if constexpr (Config::kAddend > 0) load_addend(operands.addend[g], row, kGated ? group / 2 : group, batch);
            if constexpr (Config::kBias && kPrefetch) load_bias(operands.bias[g], group);
        }
    }

    // Loads b[2 j + e] for column 8 j + fragment_column() + e; zeros outside.
    __device__ void load_bias(float (&b)[4], u32 column) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            b[2 * j] = b[2 * j + 1] = 0;
            const u32 c = column + 8 * j + fragment_column();  // the pair is inside or outside: n is even
            if (c < n) load_two<false>(bias + c, b[2 * j], b[2 * j + 1]);
        }
    }

    // Computes act(alpha * acc + bias) + C: f[4 j + 2 h + e] for column 8 j + fragment_column() + e, or, gated, f[2 j + h]
    // for column 4 j + threadIdx.x % 4 of D.
    template <u32 kC>
    __device__ void apply(float (&f)[8], const float* acc, const float (&addend)[kC], const float (&bias)[4]) {
        const auto add_c = [&](float z, u32 i) {
            if constexpr (Config::kAddend > 0) z += addend[i % kC];
            return z;
        };
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const float z0 = alpha * acc[4 * j + 2 * h] + bias[2 * j];
                const float z1 = alpha * acc[4 * j + 2 * h + 1] + bias[2 * j + 1];
                if constexpr (kGated) {
                    f[2 * j + h] = add_c(activate<kActivation>(z0) * z1, 2 * j + h);
                } else {
                    f[4 * j + 2 * h] = add_c(activate<kActivation>(z0), 4 * j + 2 * h);
                    f[4 * j + 2 * h + 1] = add_c(activate<kActivation>(z1), 4 * j + 2 * h + 1);
                }
            }
        }
    }

    // Loads the elements of C that `apply` adds to f; zeros outside.
    __device__ void load_addend(float (&f)[8], u32 row, u32 column, u32 batch) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) f[kGated ? 2 * (j / 2) + h : 4 * (j / 2) + 2 * h + j % 2] = 0;
            const u32 r = row + fragment_row() + 8 * h;
            if (r >= m) continue;
            const typename Config::Addend* const c_row = c + batch * c_batch + r * c_pitch;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                const u32 c_column = column + (kGated ? 4 * j + threadIdx.x % 4 : 8 * j + fragment_column());
                if (c_column >= n_out) continue;
                if constexpr (kGated) {
                    f[2 * j + h] = to_float(c_row[c_column]);
                } else {
                    load_two<Config::kAddend == 2>(c_row + c_column, f[4 * j + 2 * h], f[4 * j + 2 * h + 1]);
                }
            }
        }
    }

    // Writes f of 16 columns to the strips at `strips`, from byte `byte` of each row on; thread_row: fragment_row().
    __device__ void stage_chunk(const float (&f)[8], u8* strips, u32 thread_row, u32 byte) {
        if constexpr (kStmatrix) {
            stage_columns<Out, kStrip>(f, shared_address(strips), byte);
        } else {
#pragma unroll
            for (u32 i = 0; i < (kGated ? 4 : 8); i += kGated ? 1 : 2) {
                const u32 j = i / (kGated ? 2 : 4), h = kGated ? i % 2 : i % 4 / 2;
                const u32 column = kGated ? 4 * j + threadIdx.x % 4 : 8 * j + fragment_column();
                u8* const address = strips + strip_offset<kStrip>(thread_row + 8 * h, byte + column * sizeof(Out));
                if constexpr (kGated) {
                    *reinterpret_cast<Out*>(address) = from_float<Out>(f[i]);
                } else {
                    struct alignas(8) Pair { float first, second; };
                    *reinterpret_cast<Pair*>(address) = {f[i], f[i + 1]};
                }
            }
        }
    }
};

}  // namespace tilewright
