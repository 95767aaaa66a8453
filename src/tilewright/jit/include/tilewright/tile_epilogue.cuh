// D = act(alpha * sums + bias) + C of a tile, from a warpgroup's accumulators through shared memory to D.
//
// Config: kWalk (tile_walk.cuh); kBlockN, kActivation, kBias, kAddend (elements of C a load takes: 0 no C, 1, 2); kInto (C
// is D in float32: the copy engine adds, and no register ever holds C); Out, Bias, Addend.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_walk.cuh>

namespace tilewright {

constexpr u32 kTileBuffers = 2;  // of 64 rows x 128 bytes of D, a warpgroup

// Two neighbours of a row, in one load if kPair.
template <bool kPair, typename T> __device__ inline void load_two(const T* from, float& first, float& second) {
    struct alignas(2 * sizeof(T)) Pair { T first, second; };
    if constexpr (kPair) {
        const Pair pair = *reinterpret_cast<const Pair*>(from);
        first = to_float(pair.first), second = to_float(pair.second);
    } else {
        first = to_float(from[0]), second = to_float(from[1]);
    }
}

// What one warpgroup does with its accumulators: kTogether boxes of 128 bytes a row are staged between two barriers, while
// the copy engine reads those of kTurns - 1 times before.
template <typename Config, u32 kTogether = 1, u32 kTurns = kTileBuffers> struct TileEpilogue {
    using Out = typename Config::Out;
    static constexpr Activation kActivation = Activation(Config::kActivation);
    static constexpr u32 kN = Config::kBlockN;
    static constexpr bool kGated = kActivation == Activation::Swiglu;
    static constexpr u32 kGroupBytes = (kGated ? 8 : 16) * sizeof(Out);  // of a row of D, of 16 columns of accumulators
    static constexpr u32 kRowBytes = kN / 16 * kGroupBytes;
    static constexpr u32 kChunk = kSpan / kGroupBytes;  // groups of 16 columns that are staged at once
    static constexpr u32 kStrip = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
    static constexpr bool kMatrices = !kGated && sizeof(Out) == 2;  // stmatrix stages them
    static constexpr bool kCutRows = Walk(Config::kWalk) == Walk::Rows;  // the tile below may begin within ours
    static_assert(kRowBytes % kStrip == 0, "a tile's rows are whole strips; gated tiles of 16-bit D have N % 32 == 0");
    static_assert(!Config::kInto || (Same<Out, float>::value && Config::kAddend == 0), "D in float32 takes C's place");
    static_assert(!Config::kInto || !kCutRows, "rows of a cut strip are stored, not added");

    const TensorMap& map;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    float alpha;
    i64 c_pitch, c_batch;
    u32 m, n, n_out;
    u8* buffers;  // kTogether * kTurns of this warpgroup
    u32 barrier;  // of this warpgroup
    Out* d = nullptr;  // kCutRows: what `map` describes
    i64 d_pitch = 0, d_batch = 0;
    u32 turn = 0;

    // Registers hold two chunks of C, or of the bias; not of both, nor those of C beside a gated tile's accumulators.
    static constexpr bool kEarly = Config::kBias ? Config::kAddend == 0 : Config::kAddend > 0 && !kGated;

    // What a chunk of D needs from global memory beside its accumulators: of C and of the bias.
    struct Operands {
        float addend[kChunk][Config::kAddend > 0 ? 8 : 1];
        float bias[kChunk][Config::kBias && kEarly ? 4 : 1];
    };

    // Accumulators of rows `row` .. and columns `column` .. of op(B), to D; with kCutRows only those before `row_end`.
    __device__ void write(const float (&sums)[kN / 2], u32 row, u32 column, u32 batch, u32 row_end) {
        if (kCutRows && row >= row_end) return;
        const bool whole = !kCutRows || row_end - row >= 64;
        const bool leader = threadIdx.x % 128 == 0;
        const u32 column_out = kGated ? column / 2 : column;
        u32 own_row = fragment_row();
        // Else the places of `stage` are computed before the main loop, and fill its registers
        if constexpr (!kMatrices) asm volatile("" : "+r"(own_row));
        Operands operands[kEarly ? 2 : 1];  // of this chunk and, on its way meanwhile, of the next
        if constexpr (kEarly) read(operands[0], 0, row, column, batch);
#pragma unroll
        for (u32 first = 0; first < kN / 16; first += kChunk) {
            const Operands& ours = operands[kEarly ? first / kChunk % 2 : 0];
            if constexpr (kEarly) {
                read(operands[(first / kChunk + 1) % 2], first + kChunk, row, column, batch);
            } else {
                read(operands[0], first, row, column, batch);
            }
            const u32 box = first / kChunk % kTogether;
            u8* const to = buffers + (turn * kTogether + box) * kBoxBytes;
            if (box == 0) {
                if (leader) tma_wait_read<kTurns - 1>();  // the last stores from these buffers have left them
                sync_threads(barrier, 128);
            }
#pragma unroll
            for (u32 g = 0; g < kChunk && first + g < kN / 16; ++g) {
                float f[8];
                float b[4] = {};
                if constexpr (Config::kBias && kEarly) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) b[i] = ours.bias[g][i];
                } else if constexpr (Config::kBias) {
                    read_bias(b, column + (first + g) * 16);
                }
                finish(f, sums + 8 * (first + g), ours.addend[g], b);
                stage(f, to, own_row, g * kGroupBytes);
            }
            if (box + 1 == kTogether || first + kChunk >= kN / 16) {
                fence_shared_for_async();
                sync_threads(barrier, 128);
#pragma unroll
                for (u32 i = 0; i <= box; ++i) {
                    leave(to - (box - i) * kBoxBytes, (first / kChunk - box + i) * kSpan, row, column_out, batch, row_end, whole);
                }
                if (leader) tma_commit();  // of nothing too: the wait above counts turns
                turn = (turn + 1) % kTurns;
            }
        }
    }

  private:
    // The staged rows of a box, which begins with byte `at` of the tile's rows of D, by one thread or, unless `whole`, by all.
    __device__ void leave(const u8* staged, u32 at, u32 row, u32 column_out, u32 batch, u32 row_end, bool whole) {
        if (!whole) {
            store_rows(staged, row, row_end - row, column_out + at / sizeof(Out), min(kSpan, kRowBytes - at), batch);
        } else if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (u32 byte = 0; byte < kSpan && at + byte < kRowBytes; byte += kStrip) {
                const int x = column_out + (at + byte) / sizeof(Out);
                if constexpr (Config::kInto) {
                    tma_add(map, staged + byte * 64, x, row, batch);
                } else {
                    tma_store(map, staged + byte * 64, x, row, batch);
                }
            }
        }
    }

    // The first `rows` of the 64 staged rows of `bytes` bytes, each by ordinary stores of 16 bytes.
    __device__ void store_rows(const u8* staged, u32 row, u32 rows, u32 column, u32 bytes, u32 batch) {
        struct alignas(16) Piece { u32 words[4]; };
        constexpr u32 kPieces = kSpan / sizeof(Piece);  // of a row; eight threads write the 128 bytes of one
        const u32 byte = threadIdx.x % kPieces * sizeof(Piece), at = column + byte / sizeof(Out);
        if (byte >= bytes || at >= n_out) return;  // rows of D are multiples of 16 bytes
        Out* const to = d + batch * d_batch + at;
        for (u32 r = threadIdx.x % 128 / kPieces; r < rows; r += 128 / kPieces) {
            const Piece piece = *reinterpret_cast<const Piece*>(staged + strip_offset<kStrip>(r, byte));
            *reinterpret_cast<Piece*>(to + (row + r) * d_pitch) = piece;
        }
    }

    // Of the chunk that begins with group `first` of 16 columns; nothing beyond the tile.
    __device__ void read(Operands& to, u32 first, u32 row, u32 column, u32 batch) {
#pragma unroll
        for (u32 g = 0; g < kChunk && first + g < kN / 16; ++g) {
            const u32 group = column + (first + g) * 16;
            if constexpr (Config::kAddend > 0) read_addend(to.addend[g], row, kGated ? group / 2 : group, batch);
            if constexpr (Config::kBias && kEarly) read_bias(to.bias[g], group);
        }
    }

    // b[2 j + e] of column 8 j + fragment_column() + e; zeros outside.
    __device__ void read_bias(float (&b)[4], u32 column) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            b[2 * j] = b[2 * j + 1] = 0;
            const u32 at = column + 8 * j + fragment_column();  // N is even: tiles of D are aligned
            if (at < n) load_two<false>(bias + at, b[2 * j], b[2 * j + 1]);
        }
    }

    // f[4 j + 2 h + e] for column 8 j + fragment_column() + e; gated f[2 j + h], for column 4 j + threadIdx.x % 4 of D.
    template <u32 kC>
    __device__ void finish(float (&f)[8], const float* sums, const float (&addend)[kC], const float (&bias)[4]) {
        const auto plus = [&](float z, u32 i) {
            if constexpr (Config::kAddend > 0) z += addend[i % kC];
            return z;
        };
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const float z0 = alpha * sums[4 * j + 2 * h] + bias[2 * j];
                const float z1 = alpha * sums[4 * j + 2 * h + 1] + bias[2 * j + 1];
                if constexpr (kGated) {
                    f[2 * j + h] = plus(activate<kActivation>(z0) * z1, 2 * j + h);
                } else {
                    f[4 * j + 2 * h] = plus(activate<kActivation>(z0), 4 * j + 2 * h);
                    f[4 * j + 2 * h + 1] = plus(activate<kActivation>(z1), 4 * j + 2 * h + 1);
                }
            }
        }
    }

    // The elements of C that belong to f of `finish`; zeros outside.
    __device__ void read_addend(float (&f)[8], u32 row, u32 column, u32 batch) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) f[kGated ? 2 * (j / 2) + h : 4 * (j / 2) + 2 * h + j % 2] = 0;
            const u32 r = row + fragment_row() + 8 * h;
            if (r >= m) continue;
            const typename Config::Addend* const from = c + batch * c_batch + r * c_pitch;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) {
                const u32 at = column + (kGated ? 4 * j + threadIdx.x % 4 : 8 * j + fragment_column());
                if (at >= n_out) continue;
                if constexpr (kGated) {
                    f[2 * j + h] = to_float(from[at]);
                } else {
                    load_two<Config::kAddend == 2>(from + at, f[4 * j + 2 * h], f[4 * j + 2 * h + 1]);
                }
            }
        }
    }

    // f of 16 columns to the strips at `to`, from byte `byte` of each row on; own_row: fragment_row().
    __device__ void stage(const float (&f)[8], u8* to, u32 own_row, u32 byte) {
        if constexpr (kMatrices) {
            stage_columns<Out, kStrip>(f, shared_address(to), byte);
        } else {
#pragma unroll
            for (u32 i = 0; i < (kGated ? 4 : 8); i += kGated ? 1 : 2) {
                const u32 j = i / (kGated ? 2 : 4), h = kGated ? i % 2 : i % 4 / 2;
                const u32 at = kGated ? 4 * j + threadIdx.x % 4 : 8 * j + fragment_column();
                u8* const place = to + strip_offset<kStrip>(own_row + 8 * h, byte + at * sizeof(Out));
                if constexpr (kGated) {
                    *reinterpret_cast<Out*>(place) = from_float<Out>(f[i]);
                } else {
                    struct alignas(8) Pair { float first, second; };
                    *reinterpret_cast<Pair*>(place) = {f[i], f[i + 1]};
                }
            }
        }
    }
};

}  // namespace tilewright
