// Sums and maxima of a block, and their exchange between the blocks of a cluster, which share one row.
#pragma once
#include <tilewright/cluster.cuh>

namespace tilewright {

constexpr u32 kMostBlocks = 16;

// The sum over a warp of each of eight numbers; lane i of every eight gets that of number i.  Halves of the numbers change
// lanes, so this takes 9 exchanges instead of 40.
template <typename T> __device__ inline T warp_sum_8(const T (&numbers)[8], u32 lane) {
    T four[4], two[2];
    const bool high_4 = lane & 4, high_2 = lane & 2, high_1 = lane & 1;
    for (u32 i = 0; i < 4; ++i) {
        const T other = __shfl_xor_sync(~0u, high_4 ? numbers[i] : numbers[i + 4], 4);
        four[i] = (high_4 ? numbers[i + 4] : numbers[i]) + other;
    }
    for (u32 i = 0; i < 2; ++i) {
        const T other = __shfl_xor_sync(~0u, high_2 ? four[i] : four[i + 2], 2);
        two[i] = (high_2 ? four[i + 2] : four[i]) + other;
    }
    const T other = __shfl_xor_sync(~0u, high_1 ? two[0] : two[1], 1);
    T one = (high_1 ? two[1] : two[0]) + other;
    one += __shfl_xor_sync(~0u, one, 8);
    return one + __shfl_xor_sync(~0u, one, 16);
}

__device__ inline u64 warp_sum(u64 number) {
    for (u32 step = 16; step > 0; step /= 2) number += __shfl_xor_sync(~0u, number, step);
    return number;
}

// All blocks send up to kMost numbers to all, again and again.  A round costs a store through the cluster's network and a wait,
// no barrier of the cluster: numbers count at the receiver's mbarrier.  A block alone is launched without a cluster, where
// stores through the network are illegal instructions.  Rounds take two sets of slots in turn: who sends round
// r + 2 has received r + 1, which a block sends when it has read what it received in r.
template <u32 kMost> struct Exchange {
    struct Memory {
        Barrier received[2];
        u64 slots[2][kMostBlocks * kMost];
    };
    Memory& memory;
    const u32 rank, blocks;
    u32 round = 0;

    // A round: begin, every number posted, wait.  A barrier of the block stands between the reads of one round and the posts of
    // the next.
    __device__ void begin(u32 count) {
        if (threadIdx.x == 0 && blocks > 1) memory.received[round & 1].arrive_and_expect_tx(8 * count * blocks);
    }

    // Sends the j-th number of this block to all blocks.  Called by one whole warp.
    __device__ void post(u32 j, u64 number) {
        const u32 to = threadIdx.x % 32;
        Barrier& received = memory.received[round & 1];
        u64* slot = memory.slots[round & 1] + j * kMostBlocks + rank;
        if (blocks == 1) {
            if (to == 0) *slot = number;
        } else if (to < blocks) {
            store_shared_remote(map_shared_rank(shared_address(slot), to), map_shared_rank(received.address(), to), number);
        }
    }

    // Called by all threads; ends with a barrier of the block.  Returns number j of block b at [j * kMostBlocks + b].
    __device__ const u64* wait() {
        if (blocks > 1 && threadIdx.x < 32) wait_acquire_cluster(memory.received[round & 1], (round >> 1) & 1);
        __syncthreads();  // one warp has waited: the acquire at cluster scope clears the L1
        return memory.slots[round++ & 1];
    }
};

// Numbers that all blocks send to the first one, once in a launch: each to its own place, counted at `received`.
struct Delivery {
    Barrier& received;
    const u32 blocks;

    // Called by one thread of the first block.
    __device__ void expect(u32 count) {
        if (blocks > 1) received.arrive_and_expect_tx(8 * count);
    }
    // at: the place, as an address of this block.
    __device__ void send(u64* at, u64 number) {
        if (blocks == 1) {
            *at = number;
        } else {
            store_shared_remote(map_shared_rank(shared_address(at), 0), map_shared_rank(received.address(), 0), number);
        }
    }
    // Called by all threads of the first block.
    __device__ void wait() {
        if (blocks > 1 && threadIdx.x < 32) wait_acquire_cluster(received, 0);
        __syncthreads();
    }
};

}  // namespace tilewright
