// D = act(alpha * A B + bias) + C for A (batches, M, K) and B (batches, K, N) of any majors: a Hopper GEMM that stays on the
// machine.
//
// One block a multiprocessor walks over tiles of kBlockM x kBlockN.  One thread of the last warpgroup, the producer, keeps
// a ring of kStages stages (128 bytes of K each) filled; one or two warpgroups multiply, each its own rows, and write
// their rows of D through shared memory that the ring never touches, so that loads of the next tile and stores of the
// last one go on meanwhile.  The two share nothing but the ring, and drift apart: while one is in its epilogue, the other
// keeps the tensor cores busy.
//
// Two blocks of a cluster share a tile of B (kClusterM = 2: rows side by side) or of A (kClusterN = 2): each loads half and
// multicasts it to both.  A stage is free when the warpgroups of both have read it.  A cluster walks over pairs of tiles, so
// both blocks take the same number of steps; one whose tile lies outside multiplies zeros and writes nothing.
//
// Config: kBlockM, kBlockN, kStages, kClusterM, kClusterN; kMajorA, kMajorB (0: K, 1: M or N); kActivation; kBias;
// kAddend (elements of C a load takes: 0 no C, 1, 2); Element, Out, Bias, Addend (types of A and B, D, bias, C).
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/scheduler.cuh>
#include <tilewright/tma.cuh>
#include <tilewright/wgmma.cuh>

namespace tilewright {

constexpr u32 kSpan = 128;            // bytes of K in a stage, and the swizzle
constexpr u32 kBoxBytes = 64 * kSpan;  // a box of 64 rows, of an operand or of D

// One operand of `kRows` rows (of M or N) in a stage, loaded by kShared blocks.
template <typename Element, Major kMajor, u32 kRows, u32 kShared> struct Operand {
    static constexpr u32 kBlockK = kSpan / sizeof(Element);
    // Along K: kRows rows of 128 bytes.  Along M or N: boxes of 64 elements by kBlockK rows of K.
    static constexpr u32 kBoxes = (kRows * sizeof(Element) + kSpan - 1) / kSpan;
    static constexpr u32 kBytes = kMajor == Major::K ? kRows * kSpan : kBoxes * kBoxBytes;
    static constexpr u32 kPart = kMajor == Major::K ? kRows / kShared : kBlockK / kShared;  // rows of a copy, of 128 bytes
    static constexpr u32 kAdvance = kMajor == Major::K ? kWgmmaKBytes : kWgmmaK<Element> * kSpan;  // to the next wgmma
    static_assert(kPart % 8 == 0, "a block's share is whole atoms of the swizzle");

    // Rows `row` .. and K from `k` on: of a shared operand, the part of the block of this rank in its cluster.
    __device__ static void load(u8* stage, const TensorMap& map, Barrier& full, u32 row, u32 k, u32 batch, u32 rank) {
        const u32 part = kShared == 1 ? 0 : rank;
        stage += part * kPart * kSpan;
        if constexpr (kMajor == Major::K) {
            copy(stage, map, full, k, row + part * kPart, batch);
        } else {
#pragma unroll
            for (u32 i = 0; i < kBoxes; ++i) {
                copy(stage + i * kBoxBytes, map, full, row + i * 64, k + part * kPart, batch);
            }
        }
    }

    // Of 64 rows of A or all of B.
    __device__ static u64 descriptor(const u8* tile) {
        return wgmma_descriptor<kSpan>(tile, 8 * kSpan, kMajor == Major::K ? 0 : kBoxBytes);
    }

  private:
    __device__ static void copy(u8* to, const TensorMap& map, Barrier& full, int x, int y, int z) {
        if constexpr (kShared == 1) {
            tma_load(to, map, full, x, y, z);
        } else {
            tma_multicast(to, map, full, (1 << kShared) - 1, x, y, z);
        }
    }
};

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

template <typename Config> struct GemmShape {
    using Element = typename Config::Element;
    static constexpr u32 kM = Config::kBlockM, kN = Config::kBlockN, kStages = Config::kStages;
    static constexpr u32 kCluster = Config::kClusterM * Config::kClusterN;
    static constexpr Major kMajorA = Major(Config::kMajorA), kMajorB = Major(Config::kMajorB);
    using A = Operand<Element, kMajorA, kM, Config::kClusterN>;
    using B = Operand<Element, kMajorB, kN, Config::kClusterM>;
    static constexpr u32 kGroups = kM > 64 ? 2 : 1;          // warpgroups that multiply
    static constexpr u32 kThreads = 128 * (kGroups + 1);     // and the producer's
    static constexpr u32 kBuffers = 2;                       // of 64 rows x 128 bytes of D, a warpgroup
    static_assert(kM == 64 || kM == 128, "one or two warpgroups of 64 rows");
    static_assert(kN % 16 == 0 && kN <= 256, "128 accumulators a thread");
    static_assert(kCluster == 1 || kCluster == 2, "pairs of blocks share one operand");
};

// What one warpgroup does with its accumulators.
template <typename Config> struct GemmEpilogue {
    using Shape = GemmShape<Config>;
    using Out = typename Config::Out;
    static constexpr Activation kActivation = Activation(Config::kActivation);
    static constexpr bool kGated = kActivation == Activation::Swiglu;
    static constexpr u32 kGroupBytes = (kGated ? 8 : 16) * sizeof(Out);  // of a row of D, of 16 columns of accumulators
    static constexpr u32 kRowBytes = Shape::kN / 16 * kGroupBytes;
    static constexpr u32 kChunk = kSpan / kGroupBytes;  // groups of 16 columns that are staged at once
    static constexpr u32 kStrip = kRowBytes % 128 == 0 ? 128 : kRowBytes % 64 == 0 ? 64 : 32;
    static_assert(kRowBytes % kStrip == 0, "a tile's rows are whole strips; gated tiles of 16-bit D have N % 32 == 0");

    const TensorMap& map;
    const typename Config::Bias* bias;
    const typename Config::Addend* c;
    float alpha;
    i64 c_pitch, c_batch;
    u32 m, n, n_out;
    u8* buffers;  // kBuffers of this warpgroup
    u32 barrier;  // of this warpgroup
    u32 buffer = 0;

    // Registers hold two chunks of C, or of the bias; not of both, nor those of C beside a gated tile's accumulators.
    static constexpr bool kEarly = Config::kBias ? Config::kAddend == 0 : Config::kAddend > 0 && !kGated;

    // What a chunk of D needs from global memory beside its accumulators: of C and of the bias.
    struct Operands {
        float addend[kChunk][Config::kAddend > 0 ? 8 : 1];
        float bias[kChunk][Config::kBias && kEarly ? 4 : 1];
    };

    // Accumulators of rows `row` .. and columns `column` .. of op(B), to D.
    __device__ void write(const float (&sums)[Shape::kN / 2], u32 row, u32 column, u32 batch) {
        const bool leader = threadIdx.x % 128 == 0;
        const u32 column_out = kGated ? column / 2 : column;
        Operands operands[kEarly ? 2 : 1];  // of this chunk and, on its way meanwhile, of the next
        if constexpr (kEarly) read(operands[0], 0, row, column, batch);
#pragma unroll
        for (u32 first = 0; first < Shape::kN / 16; first += kChunk) {
            const Operands& ours = operands[kEarly ? first / kChunk % 2 : 0];
            if constexpr (kEarly) {
                read(operands[(first / kChunk + 1) % 2], first + kChunk, row, column, batch);
            } else {
                read(operands[0], first, row, column, batch);
            }
            u8* const to = buffers + buffer * kBoxBytes;
            if (leader) tma_wait_read<Shape::kBuffers - 1>();  // the last store from this buffer has left it
            sync_threads(barrier, 128);
#pragma unroll
            for (u32 g = 0; g < kChunk && first + g < Shape::kN / 16; ++g) {
                float f[8];
                float b[4] = {};
                if constexpr (Config::kBias && kEarly) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) b[i] = ours.bias[g][i];
                } else if constexpr (Config::kBias) {
                    read_bias(b, column + (first + g) * 16);
                }
                finish(f, sums + 8 * (first + g), ours.addend[g], b);
                stage(f, to, g * kGroupBytes);
            }
            fence_shared_for_async();
            sync_threads(barrier, 128);
            if (leader) {
                const u32 at = first * kGroupBytes;
#pragma unroll
                for (u32 byte = 0; byte < kSpan && at + byte < kRowBytes; byte += kStrip) {
                    tma_store(map, to + byte * 64, column_out + (at + byte) / sizeof(Out), row, batch);
                }
                tma_commit();
            }
            buffer = (buffer + 1) % Shape::kBuffers;
        }
    }

  private:
    // Of the chunk that begins with group `first` of 16 columns; nothing beyond the tile.
    __device__ void read(Operands& to, u32 first, u32 row, u32 column, u32 batch) {
#pragma unroll
        for (u32 g = 0; g < kChunk && first + g < Shape::kN / 16; ++g) {
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
        const auto plus = [&](u32 i) { return Config::kAddend > 0 ? addend[i % kC] : 0.0f; };
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                const float z0 = alpha * sums[4 * j + 2 * h] + bias[2 * j];
                const float z1 = alpha * sums[4 * j + 2 * h + 1] + bias[2 * j + 1];
                if constexpr (kGated) {
                    f[2 * j + h] = activate<kActivation>(z0) * z1 + plus(2 * j + h);
                } else {
                    f[4 * j + 2 * h] = activate<kActivation>(z0) + plus(4 * j + 2 * h);
                    f[4 * j + 2 * h + 1] = activate<kActivation>(z1) + plus(4 * j + 2 * h + 1);
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

    // f of 16 columns to the strips at `to`, from byte `byte` of each row on.
    __device__ void stage(const float (&f)[8], u8* to, u32 byte) {
        if constexpr (!kGated && sizeof(Out) == 2) {
            stage_columns<Out, kStrip>(f, shared_address(to), byte);
        } else {
#pragma unroll
            for (u32 i = 0; i < (kGated ? 4 : 8); i += kGated ? 1 : 2) {
                const u32 j = i / (kGated ? 2 : 4), h = kGated ? i % 2 : i % 4 / 2;
                const u32 at = kGated ? 4 * j + threadIdx.x % 4 : 8 * j + fragment_column();
                u8* const place = to + strip_offset<kStrip>(fragment_row() + 8 * h, byte + at * sizeof(Out));
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

template <typename Config>
__global__ void __launch_bounds__(GemmShape<Config>::kThreads, 1) sm90_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const typename Config::Bias* bias, const typename Config::Addend* c,
    const float* scale, float alpha, i64 c_pitch, i64 c_batch, int m, int n, int k, int batches, int band) {
    using Shape = GemmShape<Config>;
    using Epilogue = GemmEpilogue<Config>;
    using Element = typename Config::Element;
    using A = typename Shape::A;
    using B = typename Shape::B;
    constexpr u32 kStages = Shape::kStages, kGroups = Shape::kGroups, kCluster = Shape::kCluster;

    extern __shared__ __align__(1024) u8 stages_a[];  // kStages of A, then kStages of B, then buffers of D
    u8* const stages_b = stages_a + kStages * A::kBytes;
    u8* const buffers = stages_b + kStages * B::kBytes;
    __shared__ Barrier full[kStages], empty[kStages];

    const u32 group = warp_index() / 4;
    const u32 rank = kCluster == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(4 * kGroups * kCluster);  // one arrival a warp that reads
        }
        fence_barrier_init();
    }
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        sync_cluster();  // nobody may arrive at a barrier that is not there yet
    }
    wait_for_previous_kernel();
    let_next_kernel_start();

    // The tiles of this block: of its cluster's units, the one at its rank.
    const u32 steps = (k + A::kBlockK - 1) / A::kBlockK;  // beyond K the copy engine reads zeros
    const u32 rows = (m + Shape::kM * Config::kClusterM - 1) / (Shape::kM * Config::kClusterM);
    const u32 columns = (n + Shape::kN * Config::kClusterN - 1) / (Shape::kN * Config::kClusterN);
    const u32 units = rows * columns * batches;
    struct Place { u32 row, column, batch; };
    const auto place = [&](u32 unit) -> Place {
        u32 row, column;
        const u32 batch = unit / (rows * columns);
        tile_in_bands(unit - batch * rows * columns, rows, columns, band, row, column);
        row = row * Config::kClusterM + (Config::kClusterM > 1 ? rank : 0);
        column = column * Config::kClusterN + (Config::kClusterN > 1 ? rank : 0);
        return {row * Shape::kM, column * Shape::kN, batch};
    };
    Ring<kStages> ring;

    if (group == kGroups) {
        give_registers<40>();
        if (warp_index() == 4 * kGroups && elect_one()) {
            tma_prefetch(map_a), tma_prefetch(map_b), tma_prefetch(map_d);
            for (u32 unit = blockIdx.x / kCluster; unit < units; unit += gridDim.x / kCluster) {
                const Place tile = place(unit);
                for (u32 step = 0; step < steps; ++step, ring.advance()) {
                    const u32 s = ring.stage;
                    empty[s].wait(ring.parity ^ 1);
                    full[s].expect(A::kBytes + B::kBytes);  // both halves of what is shared
                    A::load(stages_a + s * A::kBytes, map_a, full[s], tile.row, step * A::kBlockK, tile.batch, rank);
                    B::load(stages_b + s * B::kBytes, map_b, full[s], tile.column, step * A::kBlockK, tile.batch, rank);
                }
            }
        }
    } else {
        take_registers<kGroups == 2 ? 232 : 240>();
        const u32 first_row = group * 64;  // in the tile
        const u64 first_a = A::descriptor(stages_a + first_row * kSpan), first_b = B::descriptor(stages_b);
        const auto release = [&](u32 stage) {  // in every block that loads it
            if constexpr (kCluster == 1) {
                if (lane_index() == 0) empty[stage].arrive();
            } else {
                if (lane_index() < kCluster) empty[stage].free_in_cluster(lane_index());
            }
        };
        Epilogue epilogue{map_d,   bias,    c, scale == nullptr ? alpha : alpha * *scale,
                          c_pitch, c_batch, u32(m), u32(n), u32(Epilogue::kGated ? n / 2 : n),
                          buffers + group * Shape::kBuffers * kBoxBytes, 1 + group};

        for (u32 unit = blockIdx.x / kCluster; unit < units; unit += gridDim.x / kCluster) {
            const Place tile = place(unit);
            float sums[Shape::kN / 2];
            u32 last = 0;
            for (u32 step = 0; step < steps; ++step, ring.advance()) {
                full[ring.stage].wait(ring.parity);
                const u64 a = wgmma_advance(first_a, ring.stage * A::kBytes);
                const u64 b = wgmma_advance(first_b, ring.stage * B::kBytes);
                wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < A::kBlockK / kWgmmaK<Element>; ++i) {
                    wgmma<Shape::kN, Element, Shape::kMajorA, Shape::kMajorB>(
                        sums, wgmma_advance(a, i * A::kAdvance), wgmma_advance(b, i * B::kAdvance), step > 0 || i > 0);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the step before this one has read its stage
                if (step > 0) release(last);
                last = ring.stage;
            }
            wgmma_wait<0>(sums);
            release(last);
            epilogue.write(sums, tile.row + first_row, tile.column, tile.batch);
        }
        if (threadIdx.x % 128 == 0) tma_wait_read<0>();  // shared memory must outlive the stores
    }
    if constexpr (kCluster > 1) sync_cluster();  // and this block the arrivals of the other
}

}  // namespace tilewright
