// D[rows of expert e] = gate(A[rows of expert e] W[e]^T): products of experts whose rows are few hundred and ragged, for Hopper.
//
// A tile is 128 columns of D by all rows of one expert, up to kBlockM: so every weight goes from memory to one block once, however
// many rows an expert has.  The weights lie along the 64 rows of wgmma and the rows of A along its N, which takes any multiple of
// 16: an expert with 270 rows costs 272, where tiles of 128 rows cost 320 and read its weights three times.  More than 256 rows are
// a second wgmma of the rest.  Each of two math warpgroups multiplies 64 of the 128 columns.
//
// The accumulators have D transposed; stmatrix transposes them back in shared memory.  Gated, the tile's rows of weights are eight
// of the gates, eight of the ups and so on, so that a thread has a gate and its up, and D has half as many columns.
//
// Config: kBlockM (rows of A a tile has room for), kBlockN (128), kStages; kMajorW (0: W is (N, K), 1: (K, N)); kGated; kActivation;
// kOnce (weights are read once: they leave the L2 first); Element (of A, W and D).  The rest is what tile_scheduler.cuh asks for.
#pragma once

#include <tilewright/activation.cuh>
#include <tilewright/epilogue.cuh>
#include <tilewright/tile_operand.cuh>
#include <tilewright/tile_scheduler.cuh>

namespace tilewright {

template <typename Config> struct ExpertShape {
    using Element = typename Config::Element;
    static constexpr u32 kRows = Config::kBlockM, kColumns = Config::kBlockN, kStages = Config::kStages;
    static constexpr Major kMajorW = Major(Config::kMajorW);
    using W = Operand<Element, kMajorW, kColumns, 1>;
    using A = Operand<Element, Major::K, kRows, 1>;
    static constexpr u32 kMost = 256;  // rows of one wgmma
    static constexpr u32 kBox = 32;    // rows of A a copy loads
    static constexpr u32 kOutColumns = Config::kGated ? 32 : 64;  // of D, from a warpgroup
    static constexpr u32 kOutBytes = kOutColumns * sizeof(Element);
    static constexpr u32 kStaged = kBoxBytes / kOutBytes;  // rows of D a warpgroup stages at once
    static_assert(kColumns == 128, "two warpgroups of 64 columns");
    static_assert(kRows % kBox == 0 && kRows <= 320, "whole boxes; the accumulators fit registers");
    static_assert(!Config::kGated || kMajorW == Major::K, "gates and ups are rows of W");
};

// Stores four 8x8 matrices of 16-bit elements transposed; see stmatrix_x4.
__device__ inline void stmatrix_x4_transposed(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// The tiles of a block.  In the last round there are fewer tiles than blocks: then up to kMostParts blocks share the rows of one.
template <typename Config> class ExpertTiles {
    static constexpr u32 kMostParts = 4;

  public:
    __device__ ExpertTiles(const SchedulerArgs& args, const typename TileScheduler<Config>::Table& table)
        : tiles_(args, table, 0), rounds_(tiles_.units() / gridDim.x) {}

    __device__ bool next(Tile& tile) {
        if (round_ > rounds_) return false;
        if (round_++ < rounds_) return tiles_.next(tile);
        const u32 first = rounds_ * gridDim.x, left = tiles_.units() - first;
        if (left == 0) return false;
        const u32 parts = min(gridDim.x / left, kMostParts), part = blockIdx.x / left;
        if (part >= parts) return false;
        tiles_.seek(first + blockIdx.x % left);
        tiles_.next(tile);
        const u32 end = min(tile.row_end, tile.row + Config::kBlockM);
        const u32 share = (end - tile.row + 16 * parts - 1) / (16 * parts) * 16;
        tile.row += part * share;
        tile.row_end = min(tile.row + share, end);
        return tile.row < end;
    }

  private:
    TileScheduler<Config> tiles_;
    u32 rounds_, round_ = 0;
};

// The main loop of one warpgroup for a tile of kN1 + kN2 rows of A.
template <typename Config, u32 kN1, u32 kN2, typename Full, typename Release, typename ThisRing>
__device__ inline void multiply_rows(float* sums, u32 k_blocks, u64 first_w, u64 first_a, Full& full,
                                     const Release& release, ThisRing& ring) {
    using Shape = ExpertShape<Config>;
    using Element = typename Config::Element;
    using W = typename Shape::W;
    using A = typename Shape::A;
    float(&acc)[kN1 / 2] = *reinterpret_cast<float(*)[kN1 / 2]>(sums);
    u32 last_stage = 0;
    for (u32 k_block = 0; k_block < k_blocks; ++k_block, ring.advance()) {
        full[ring.stage].wait(ring.parity);
        const u64 desc_w = wgmma_advance(first_w, ring.stage * W::kBytes);
        const u64 desc_a = wgmma_advance(first_a, ring.stage * A::kBytes);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < A::kBlockK / kWgmmaK<Element>; ++i) {
            const u64 w = wgmma_advance(desc_w, i * W::kAdvance), a = wgmma_advance(desc_a, i * A::kAdvance);
            wgmma<kN1, Element, Shape::kMajorW, Major::K>(acc, w, a, k_block > 0 || i > 0);
            if constexpr (kN2 > 0) {
                float(&rest)[kN2 / 2] = *reinterpret_cast<float(*)[kN2 / 2]>(sums + kN1 / 2);
                wgmma<kN2, Element, Shape::kMajorW, Major::K>(rest, w, wgmma_advance(a, kN1 * kSpan), k_block > 0 || i > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k_block > 0) release(last_stage);
        last_stage = ring.stage;
    }
    wgmma_wait<0>();
    release(last_stage);
}

template <typename Config>
__global__ void __launch_bounds__(384, 1) sm90_expert_rows(
    const __grid_constant__ TensorMap map_w, const __grid_constant__ TensorMap map_a, typename Config::Element* d, i64 d_pitch,
    const int* starts, const int* ends, int m, int n, int k, int experts) {
    using Shape = ExpertShape<Config>;
    using Element = typename Config::Element;
    using W = typename Shape::W;
    using A = typename Shape::A;
    constexpr u32 kStages = Shape::kStages, kRows = Shape::kRows;
    constexpr CacheHint kHint = Config::kOnce ? CacheHint::EvictFirst : CacheHint::EvictNormal;

    extern __shared__ __align__(1024) u8 stages_w[];  // kStages of W, then kStages of A, then a staged box a warpgroup
    u8* const stages_a = stages_w + kStages * W::kBytes;
    u8* const buffers = stages_a + kStages * A::kBytes;
    __shared__ Barrier full[kStages], empty[kStages];
    __shared__ typename TileScheduler<Config>::Table table;

    // Initialize the barriers
    const u32 warpgroup = warp_index() / 4;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(8);  // one arrival a warp that reads
        }
        fence_barrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();
    launch_dependents();

    // Each warp schedules the same tiles for itself
    const SchedulerArgs args{u32(m), u32(n), u32(k), u32(experts), 1u << 16, starts, ends, false};
    TileScheduler<Config>::prepare(args, table);
    ExpertTiles<Config> scheduler(args, table);
    Ring<kStages> ring;

    const auto load_weights = [&](u32 stage, const Tile& tile, u32 k_idx) {
        u8* const to = stages_w + stage * W::kBytes;
        if constexpr (Config::kGated) {
            tma_load(to, map_w, full[stage], k_idx, 0, 0, tile.column / 16, tile.batch_b, kHint);
        } else if constexpr (Shape::kMajorW == Major::K) {
            tma_load(to, map_w, full[stage], k_idx, tile.column, tile.batch_b, kHint);
        } else {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                tma_load(to + i * kBoxBytes, map_w, full[stage], tile.column + i * 64, k_idx, tile.batch_b, kHint);
            }
        }
    };

    if (warpgroup == 2) {
        warpgroup_reg_dealloc<40>();
        if (warp_index() == 8 && elect_one()) {
            tma_prefetch_descriptor(map_w), tma_prefetch_descriptor(map_a);
            for (Tile tile; scheduler.next(tile);) {
                const u32 bytes = W::kBytes + A::bytes_of_rows(tile.row, tile.row_end, Shape::kBox);
                for (u32 k_block = 0; k_block < tile.k_blocks; ++k_block, ring.advance()) {
                    // Wait until the consumers have released the stage
                    const u32 stage = ring.stage, k_idx = k_block * A::kBlockK;  // beyond K come zeros
                    empty[stage].wait(ring.parity ^ 1);

                    // Issue the TMA loads of W and A
                    full[stage].arrive_and_expect_tx(bytes);
                    load_weights(stage, tile, k_idx);
                    A::load_rows(stages_a + stage * A::kBytes, map_a, full[stage], tile.row, tile.row_end, Shape::kBox, k_idx, 0, 0);
                }
            }
        }
    } else {
        warpgroup_reg_alloc<232>();
        const u64 first_w = W::descriptor(stages_w + warpgroup * 64 * kSpan);  // 64 rows, or a box of 64 columns
        const u64 first_a = A::descriptor(stages_a);
        const auto release = [&](u32 stage) {
            if (lane_index() == 0) empty[stage].arrive();
        };
        const u32 n_out = Config::kGated ? u32(n) / 2 : u32(n);
        u8* const buffer = buffers + warpgroup * kBoxBytes;
        const u32 lane = lane_index(), warp = warp_index() % 4;

        for (Tile tile; scheduler.next(tile);) {
            const u32 rows = min(tile.row_end - tile.row, kRows);
            float acc[kRows / 2];

            // Multiply as many columns as there are rows, in 16s
            switch ((rows - 1) / 16) {
#define TILEWRIGHT_ROWS(I)                                                                                             \
    case I:                                                                                                            \
        if constexpr ((I + 1) * 16 <= kRows) {                                                                         \
            constexpr u32 kN = (I + 1) * 16, kN1 = kN <= Shape::kMost ? kN : Shape::kMost;                              \
            multiply_rows<Config, kN1, kN - kN1>(acc, tile.k_blocks, first_w, first_a, full, release, ring);           \
        }                                                                                                              \
        break;
                TILEWRIGHT_ROWS(0) TILEWRIGHT_ROWS(1) TILEWRIGHT_ROWS(2) TILEWRIGHT_ROWS(3) TILEWRIGHT_ROWS(4)
                TILEWRIGHT_ROWS(5) TILEWRIGHT_ROWS(6) TILEWRIGHT_ROWS(7) TILEWRIGHT_ROWS(8) TILEWRIGHT_ROWS(9)
                TILEWRIGHT_ROWS(10) TILEWRIGHT_ROWS(11) TILEWRIGHT_ROWS(12) TILEWRIGHT_ROWS(13) TILEWRIGHT_ROWS(14)
                TILEWRIGHT_ROWS(15) TILEWRIGHT_ROWS(16) TILEWRIGHT_ROWS(17) TILEWRIGHT_ROWS(18) TILEWRIGHT_ROWS(19)
#undef TILEWRIGHT_ROWS
            }
#pragma unroll
            for (u32 i = 0; i < kRows / 2; ++i) asm volatile("" : "+f"(acc[i])::"memory");

            // Epilogue: kStaged rows at a time through shared memory
            const u32 column = (Config::kGated ? tile.column / 2 : tile.column) + warpgroup * Shape::kOutColumns;
#pragma unroll
            for (u32 begin = 0; begin < kRows; begin += Shape::kStaged) {
                if (begin < rows) {
                    named_barrier_sync(1 + warpgroup, 128);  // all have read what was staged before
#pragma unroll
                    for (u32 part = 0; part < Shape::kStaged; part += Config::kGated ? 32 : 16) {
                        if (begin + part < kRows && begin + part < rows) {
                            const u32 r = begin + part;
                            const float* const f = acc + r / 2;
                            if constexpr (Config::kGated) {
                                u32 packed[4];
#pragma unroll
                                for (u32 j = 0; j < 4; ++j) {
                                    const float* const g = f + 4 * j;
                                    packed[j] = pack<Element>(activate<Activation(Config::kActivation)>(g[0]) * g[2],
                                                              activate<Activation(Config::kActivation)>(g[1]) * g[3]);
                                }
                                const u32 to = swizzle<Shape::kOutBytes>((part + lane) * Shape::kOutBytes + warp * 16);
                                stmatrix_x4_transposed(shared_address(buffer) + to, packed[0], packed[1], packed[2], packed[3]);
                            } else {
                                const u32 to = swizzle<Shape::kOutBytes>((part + lane / 16 * 8 + lane % 8) * Shape::kOutBytes +
                                                                         warp * 32 + lane / 8 % 2 * 16);
                                stmatrix_x4_transposed(shared_address(buffer) + to, pack<Element>(f[0], f[1]),
                                                       pack<Element>(f[2], f[3]), pack<Element>(f[4], f[5]),
                                                       pack<Element>(f[6], f[7]));
                            }
                        }
                    }
                    named_barrier_sync(1 + warpgroup, 128);

                    // Store whole vectors of rows of this expert
                    struct alignas(16) Vector { u32 words[4]; };
                    constexpr u32 kVectors = Shape::kOutBytes / sizeof(Vector);
                    const u32 thread = threadIdx.x % 128, v = thread % kVectors;
                    const u32 c = column + v * (sizeof(Vector) / sizeof(Element));
                    const u32 staged = min(Shape::kStaged, rows - begin);
                    if (c < n_out) {
                        Element* const out = d + (i64(tile.row) + begin) * d_pitch + c;
                        for (u32 r = thread / kVectors; r < staged; r += 128 / kVectors) {
                            const u32 from = swizzle<Shape::kOutBytes>(r * Shape::kOutBytes + v * sizeof(Vector));
                            *reinterpret_cast<Vector*>(out + r * d_pitch) = *reinterpret_cast<const Vector*>(buffer + from);
                        }
                    }
                }
            }
        }
    }
}

}  // namespace tilewright
