// A key that at least k of a row's logits reach, from maxima alone.
//
// A block divides its logits into groups and takes the j-th largest of their maxima, j = ceil(k / blocks).  At least j logits
// of every block reach the least of these keys over the blocks.  Groups are four times as many as j where there are so
// many, so that few others reach it: some 2 k of random logits.
#pragma once
#include "numbers.cuh"

namespace tilewright {

constexpr u32 kMostGroups = 256, kMostOfBlock = kMostGroups / 2;

// groups: kMostGroups numbers in shared memory; found: one.  key: the largest of this thread.  1 <= j <= kMostOfBlock.
// The result is in `found` after the next barrier of the block.
template <u32 kThreads> __device__ inline void bound_of_block(int key, u32 j, int* groups, int* found) {
    u32 count = kThreads / 32;
    while (count < 4 * j && count < kMostGroups && count < kThreads) count *= 2;
    const u32 width = kThreads / count;
    for (u32 step = 1; step < width; step *= 2) key = max(key, __shfl_xor_sync(~0u, key, step));
    if (threadIdx.x % width == 0) groups[threadIdx.x / width] = key;
    __syncthreads();
    if (threadIdx.x < count) {
        const int mine = groups[threadIdx.x];
        u32 before = 0;
        for (u32 i = 0; i < count; ++i) {
            const int other = groups[i];
            before += other > mine || (other == mine && i < threadIdx.x) ? 1 : 0;
        }
        if (before == j - 1) *found = mine;
    }
}

}  // namespace tilewright
