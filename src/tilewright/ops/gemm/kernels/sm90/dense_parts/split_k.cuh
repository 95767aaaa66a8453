// Split K inside a cluster: kSplit blocks multiply consecutive ranges of K for the same tile of D, and add what they have in
// the same order every time: the same bits in every run, one launch, no workspace.
//
// Each block owns some of the tile's columns, eight at a time.  A warpgroup's accumulators of 64 rows and eight columns are a
// parcel, 16 bytes a thread.  All blocks send the owner their parcels (st.async into its shared memory), and the owner adds
// them by rank, applies the epilogue and stores its columns.  Warps whose rows lie outside of D send nothing.
//
// Parcels lie in the ring, which holds nothing else between two tiles of a block:
//
//     drained  the WGMMAs of all warps of all kSplit blocks have read the ring: parcels may be sent.
//     full     one a warpgroup: the parcels of its rows have arrived, as many bytes as announce() said.
//     read     the warps of all blocks that share an operand with this one have read their parcels: the producer of this
//              block, whose copies also fill the rings of those blocks, may load the next tile.
//
// `drained` and `read` complete one phase a tile.  `full` completes none for a tile of which the warpgroup receives nothing: a
// phase without bytes would end as it is announced, before slow warps have seen the end of the last one.
//
// A block that shares no operand may leave after its last tile: it has waited for all that others send it, parcels and arrivals.
#pragma once

#include <tilewright/cluster.cuh>
#include <tilewright/epilogue.cuh>

#include "few_rows_parts/finish.cuh"

namespace tilewright {

// What exists of a tile: parcels of its columns, warps of this warpgroup's rows; and the bytes that this warpgroup receives.
struct TilePart { u32 parcels, warps, bytes; };

// kShare blocks of the cluster share an operand: block `rank` has share rank % kShare and range rank / kShare of K.
// kColumns of a tile.
template <u32 kSplit, u32 kShare, u32 kWarpgroups, u32 kColumns> struct SplitK {
    static constexpr u32 kParcels = kColumns / 8, kOwned = (kParcels + kSplit - 1) / kSplit;  // of a block
    static constexpr u32 kParcelBytes = 128 * 16, kWarpBytes = kParcelBytes / 4;
    static constexpr u32 kBytes = kSplit * kOwned * kWarpgroups * kParcelBytes;  // [from block][parcel][warpgroup]
    static_assert(kSplit * kShare <= 8, "a portable cluster");

    struct Barriers {
        Barrier drained, read, full[kWarpgroups];

        // Called by one thread.
        __device__ void init() {
            drained.init(kSplit * 4 * kWarpgroups);
            read.init(kShare * 4 * kWarpgroups);
            for (u32 i = 0; i < kWarpgroups; ++i) full[i].init(1);
        }
    };

    // A barrier of all threads of the cluster that orders no memory but the initialisation of barriers, by a thread that has
    // called fence_barrier_init: an arrival with release would cost a fence of 500 cycles.
    __device__ static void meet() {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    }

    Barriers& barriers;
    u8* parcels;  // kBytes of shared memory
    u32 rank;     // in the cluster
    u32 warpgroup;
    u32 parity = 0, full_parity = 0;

    __device__ u32 range() const { return rank / kShare; }
    __device__ u8* slot(u32 from, u32 index) const {
        return parcels + ((from * kOwned + index) * kWarpgroups + warpgroup) * kParcelBytes + threadIdx.x % 128 * 16;
    }

    // The part of a tile of D (m x n) that exists; this warpgroup's rows begin at `row`.  Announces what it will receive, before
    // its arrival at `drained` for this tile.
    __device__ TilePart announce(u32 row, u32 column, u32 m, u32 n) {
        TilePart part{column < n ? min((n - column + 7) / 8, kParcels) : 0, row < m ? min((m - row + 15) / 16, 4u) : 0, 0};
        const u32 first = range() * kOwned, owned = part.parcels > first ? min(part.parcels - first, kOwned) : 0;
        part.bytes = kSplit * owned * part.warps * kWarpBytes;
        if (part.bytes > 0 && threadIdx.x % 128 == 0) barriers.full[warpgroup].arrive_and_expect_tx(part.bytes);
        return part;
    }

    // Adds the accumulators of all blocks.  finish(sum, row, column) gets four neighbouring columns of a row of the tile that
    // this block owns, from `column` on; `row` counts from the first of this warpgroup.
    template <typename Finish>
    __device__ void reduce(const float (&acc)[kColumns / 2], const TilePart& part, const Finish& finish) {
        const bool rows_exist = threadIdx.x % 128 / 32 < part.warps;
        __syncwarp();
        if (lane_index() < kSplit) {
            barriers.drained.arrive_remote_after_reads(lane_index() * kShare + rank % kShare);
        }
        wait_acquire_cluster(barriers.drained, parity);
        if (rows_exist) send(acc, part.parcels);
        if (part.bytes > 0) {
            wait_acquire_cluster(barriers.full[warpgroup], full_parity);
            full_parity ^= 1;
        }
        if (rows_exist) {
            const bool odd = threadIdx.x % 2 != 0;
            const u32 row = fragment_row() + (odd ? 8 : 0), column = threadIdx.x % 4 / 2 * 4;
#pragma unroll 4
            for (u32 i = 0; i < kOwned; ++i) {
                const u32 parcel = range() * kOwned + i;
                if (parcel >= part.parcels) break;
                float sum[4];
                receive(sum, i);
                // Lanes 2 i and 2 i + 1 exchange, so that each has four columns of one row
                const float give0 = odd ? sum[0] : sum[2], give1 = odd ? sum[1] : sum[3];
                const float take0 = __shfl_xor_sync(~0u, give0, 1), take1 = __shfl_xor_sync(~0u, give1, 1);
                const float four[4] = {odd ? take0 : sum[0], odd ? take1 : sum[1], odd ? sum[2] : take0,
                                       odd ? sum[3] : take1};
                finish(four, row, parcel * 8 + column);
            }
        }
        fence_proxy_async_shared();  // parcels were written and read here, and the TMA writes here next
        __syncwarp();
        if constexpr (kShare == 1) {
            if (lane_index() == 0) barriers.read.arrive();
        } else {
            if (lane_index() < kShare) barriers.read.arrive_remote_after_reads(range() * kShare + lane_index());
        }
        parity ^= 1;
    }

  private:
    // Sends the first `count` parcels to their owners.
    __device__ void send(const float (&acc)[kColumns / 2], u32 count) {
#pragma unroll
        for (u32 owner = 0; owner < kSplit; ++owner) {
            const u32 to = owner * kShare + rank % kShare;
            const u32 first = map_shared_rank(shared_address(slot(range(), 0)), to);
            const u32 full = map_shared_rank(barriers.full[warpgroup].address(), to);
#pragma unroll
            for (u32 i = 0; i < kOwned && owner * kOwned + i < kParcels; ++i) {
                const u32 parcel = owner * kOwned + i;
                if (parcel >= count) return;
                const float* const f = acc + 4 * parcel;
                store_shared_remote(first + i * kWarpgroups * kParcelBytes, full, f[0], f[1], f[2], f[3]);
            }
        }
    }

    // sum = parcel `index` of those that this block owns from range 0, 1, ... of K, added in this order.
    __device__ void receive(float (&sum)[4], u32 index) const {
        struct alignas(16) Vector { float values[4]; } from[kSplit];
#pragma unroll
        for (u32 s = 0; s < kSplit; ++s) from[s] = *reinterpret_cast<const Vector*>(slot(s, index));
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[i] = from[0].values[i];
#pragma unroll
            for (u32 s = 1; s < kSplit; ++s) sum[i] += from[s].values[i];
        }
    }
};

// finish() of a split product: sum times `factor`, bias, activation and C, into rows of D before m.
template <typename Config> struct SplitOutput {
    Output<Config> out;
    u32 m;

    __device__ void write(const float (&sum)[4], float factor, u32 batch, u32 row, u32 column) const {
        if (row >= m || column >= u32(out.columns)) return;
        float bias[4] = {};
        if constexpr (Config::kBias) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) bias[i] = column + i < u32(out.columns) ? to_float(out.bias[column + i]) : 0;
        }
        apply_epilogue(sum, bias, factor, out, batch, row, column);
    }
};

}  // namespace tilewright
