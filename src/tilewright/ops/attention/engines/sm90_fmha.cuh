// O = softmax(scale Q K^T) V under a mask, and the log of the sums: attention forward for Hopper.
//
// A block stays on its multiprocessor and walks over tiles of 64 queries a warpgroup.  S = Q K^T of a tile of kBlockN
// keys is multiplied from shared memory; its softmax runs in registers, where P stays as the A of P V.  Two things hide
// the softmax, which the tensor cores cannot do:
// - a warpgroup has S of the next keys and P V of these in flight at once, and computes the softmax of the one while
//   the other still multiplies;
// - warpgroups take turns at issuing, so that while one computes its softmax the others' products run.
// One thread brings K and V through two rings, another Q, and takes O away, which leaves through the memory of Q.  All
// walk over the same tiles (schedule.cuh).  A mask is looked at in those tiles alone that it cuts.  The order of work
// is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608); the offset of the softmax may be stale (softmax.cuh), so
// O is rescaled in few tiles only.
//
// Config: kD, kDv (multiples of 16; D and D_v rounded up), kGroups, kBlockN, kStages, kQStages; kTurns; kModify (scores
// are brought to units of log2 before the softmax: always right; needed for kSoftcap, kSlope, and where scale <= 0);
// Element; Mask (mask_program.cuh; NoProgram: the band left, right; MaskSequences<0>: packed sequences, which have no
// lists) and Index, of its lists of tiles.
#pragma once

#include "sm90_fmha/attend.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(FmhaShape<Config>::kThreads, 1) sm90_fmha(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* lse, const float* sinks,
    const float* slopes, const int* numbers, const int* counts, const void* indices, int s_q, int s_k, int heads,
    int batches, int sharing, int left, int right, bool paired, int lists_of_batch, int lists_of_head, int pitch,
    float scale, float softcap) {
    const FmhaProblem problem{s_q, s_k, heads, batches, sharing, left, right, paired};
    const FmhaMask mask{numbers, counts, indices, lists_of_batch, lists_of_head, pitch};
    attend<Config>(FmhaMaps{map_q, map_k, map_v, map_o}, lse, sinks, slopes, problem, mask, scale, softcap);
}

// Queries and keys of two parts, each in tensors of its own.  Scores are sums over all columns, so nothing differs but
// the copies: boxes of 64 columns of q and k, and behind them one of q_pe and k_pe.  All heads read k_pe, and find it
// in the L2.  kD: D rounded up to whole boxes, and D_pe, at most a box, to a multiple of 16.  What of the last box of q
// and of k lies beyond D is zero in both, and adds nothing.
template <typename Config>
__global__ void __launch_bounds__(FmhaShape<Config>::kThreads, 1) sm90_mla(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_q_pe,
    const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_k_pe,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* lse, const float* sinks,
    const float* slopes, const int* numbers, const int* counts, const void* indices, int s_q, int s_k, int heads,
    int batches, int sharing, int left, int right, bool paired, int lists_of_batch, int lists_of_head, int pitch,
    float scale, float softcap) {
    static_assert(FmhaShape<Config>::kBoxes > 1, "the last box is that of the rotated parts");
    const FmhaProblem problem{s_q, s_k, heads, batches, sharing, left, right, paired};
    const FmhaMask mask{numbers, counts, indices, lists_of_batch, lists_of_head, pitch};
    const MlaMaps maps{map_q, map_q_pe, map_k, map_k_pe, map_v, map_o};
    attend<Config>(maps, lse, sinks, slopes, problem, mask, scale, softcap);
}

}  // namespace tilewright
