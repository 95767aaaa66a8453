// O = softmax(scale * Q K^T + mask) V and the log-sum-exp of the scores: attention forward for Hopper.
//
// A persistent block takes tiles of 64 queries per warpgroup (schedule.cuh).  S = Q K^T of kBlockN keys is computed from shared
// memory; the softmax runs in registers, and P stays there as the A operand of P V.  Two overlaps hide the softmax, which the
// tensor cores cannot compute:
// - within a warpgroup: S of the next key tile and P V of this one are in flight at once, and the softmax of one is computed
//   while the other still runs;
// - between warpgroups: they issue in turns (ping-pong), so that one computes its softmax while the wgmmas of the others run.
// One producer thread loads K and V through two rings, another loads Q and stores O, which is staged in Q's buffer.  All roles
// iterate over the same tiles.  The mask is evaluated only in key tiles that are partly visible.  The order of work is
// FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608); the softmax offset may be stale (softmax.cuh), so that few key
// tiles rescale O.
//
// Config: kD, kDv (multiples of 16; D and D_v rounded up); kWarpgroups; kBlockN; kStages (of K and V); kQStages; kTurns;
// kModify (scores are scaled to units of log2 before the softmax: always correct; required for kSoftcap, kSlope and
// scale <= 0); kSoftcap; kSlope (ALiBi); Element; Mask (BandOnly, PackedOnly or a mask program: mask_program.cuh); Index (of
// the tile table).
#pragma once

#include "fmha_forward/attend.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(FmhaShape<Config>::kThreads, 1) sm90_fmha(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* lse, const float* sinks,
    const float* slopes, const int* mask_data, const int* counts, const void* indices, int s_q, int s_k, int heads,
    int batches, int heads_per_kv, int left, int right, bool paired, int batch_stride, int head_stride, int row_stride,
    float scale, float softcap) {
    const FmhaProblem problem{s_q, s_k, heads, batches, heads_per_kv, left, right, paired};
    const FmhaMask mask{mask_data, counts, indices, batch_stride, head_stride, row_stride};
    attend<Config>(FmhaMaps{map_q, map_k, map_v, map_o}, lse, sinks, slopes, problem, mask, scale, softcap);
}

// MLA: q and k have a rope part in separate tensors.  A score sums over all columns, so only the loads differ: boxes of 64
// columns of q and k, then one box of q_pe and k_pe.  All heads read the same k_pe, from the L2.  kD: D rounded up to whole
// boxes, plus D_pe (at most one box) rounded up to a multiple of 16.  TMA fills the columns between D and the next whole box
// with zeros in q and k, so they add nothing.
template <typename Config>
__global__ void __launch_bounds__(FmhaShape<Config>::kThreads, 1) sm90_mla(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_q_pe,
    const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_k_pe,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o, float* lse, const float* sinks,
    const float* slopes, const int* mask_data, const int* counts, const void* indices, int s_q, int s_k, int heads,
    int batches, int heads_per_kv, int left, int right, bool paired, int batch_stride, int head_stride, int row_stride,
    float scale, float softcap) {
    static_assert(FmhaShape<Config>::kBoxes > 1, "the last box is the rope part");
    const FmhaProblem problem{s_q, s_k, heads, batches, heads_per_kv, left, right, paired};
    const FmhaMask mask{mask_data, counts, indices, batch_stride, head_stride, row_stride};
    const MlaMaps maps{map_q, map_q_pe, map_k, map_k_pe, map_v, map_o};
    attend<Config>(maps, lse, sinks, slopes, problem, mask, scale, softcap);
}

}  // namespace tilewright
