// Attention backward for Hopper: dK, dV and dQ in fp32.  A persistent block holds tiles of 128 keys, one after another, and
// iterates over the query tiles that see them.
//
//     P = exp(scale * S - lse)      S = Q K^T
//     dV = P^T dO
//     dP = dO V^T
//     dS = P * (dP - delta)         delta = rowsum(dO * O) - dlse, computed by sm90_fmha_preprocess
//     dQ = scale * dS K             sm90_fmha_postprocess applies the scale and rounds
//     dK = scale * dS^T Q
//
// Each of two warpgroups has 64 keys, and dK and dV of them in registers.  For a tile of kBlockM queries it computes
// S^T = K Q^T and dP^T = V dO^T: their accumulators, rounded, are in the layout of A in registers for dV += P^T dO and
// dK += dS^T Q.  dQ = dS K needs dS of both warpgroups, which goes through shared memory.
// Overlap offset one step: exp runs during dP^T, dS is computed during dV, the barrier of the warpgroups is waited for during
// dK, and dQ is stored during S^T of the next step.
//
// With more than 128 columns of Q (kWide) dK and dV of 64 keys take 160 of 240 registers.  What else lives at once is at most
// 64: S^T and P rounded; dP^T and P; two parts of dQ.  dS is computed from P rounded, goes to shared memory alone, and dK reads
// it from there.  So dK needs no register beside its own, and runs behind S^T of the next step, during the exponentials:
//
//     dQ | dQ, second part; store the first | S^T of the next, dK; store the second | exp, during dK | dP^T, dV | dS
//
// Several blocks add to one dQ tile.  cp.reduce.async.bulk adds it to dq_acc in global memory, in the layout of the
// accumulators; a flag per tile puts the blocks in an order, so that results repeat bit for bit (schedule.cuh).
// The five products are FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608), in another order.
//
// Config: kD, kDv (multiples of 16; D and D_v rounded up), kBlockM, kStages (of Q and dO), kDsStages, kOutStages,
// kSoftcap, kSlope (ALiBi), kPacked (packed sequences; else a band), kByBatch (other sequences in each batch), Element.
#pragma once

#include "fmha_backward/gradients.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(BackwardShape<Config>::kThreads, 1) sm90_fmha_backward(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_do,
    const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
    const __grid_constant__ TensorMap map_stats, float* dq_acc, int* flags, const float* slopes, int s_q, int s_k, int heads,
    int batches, int heads_per_kv, int left, int right, int section_heads, bool alternate, float scale, float softcap,
    const Interval* intervals) {
    const BackwardProblemOf<Config> problem{
        {s_q, s_k, heads, batches, heads_per_kv, left, right, section_heads, alternate, intervals}};
    const FmhaBackwardMaps maps{map_q, map_k, map_v, map_do, map_dk, map_dv, map_stats};
    compute_gradients<Config>(maps, problem, dq_acc, flags, slopes, scale, softcap);
}

// The same for few key tiles of grouped heads: an item is a key tile of one part of the query heads that share it, so that there
// are `parts` times as many.  heads_per_kv: query heads of a part.  dk and dv of each part are rounded, and added up by
// sm90_fmha_sum_parts.
template <typename Config>
__global__ void __launch_bounds__(BackwardShape<Config>::kThreads, 1) sm90_fmha_backward_parts(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_do,
    const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
    const __grid_constant__ TensorMap map_stats, float* dq_acc, int* flags, const float* slopes, int s_q, int s_k, int heads,
    int batches, int heads_per_kv, int left, int right, int section_heads, bool alternate, float scale, float softcap,
    const Interval* intervals, int parts) {
    const BackwardProblemOf<Config> problem{
        {s_q, s_k, heads, batches, heads_per_kv, left, right, section_heads, alternate, intervals}};
    const PartsBackwardMaps maps{{map_q, map_k, map_v, map_do, map_dk, map_dv, map_stats}, parts};
    compute_gradients<Config>(maps, problem, dq_acc, flags, slopes, scale, softcap);
}

// MLA: q and k have a rope part in separate tensors, the last box of Q and of K.  A score sums over all columns, so only
// loads and results differ.  All heads read the same k_pe; dk_pe of each head goes to `dk_pe` (B, H, S_k, D_pe) in fp32, to be
// added up by another kernel.  kD: D rounded up to whole boxes, plus D_pe (at most one box) rounded up to a multiple of 16.
template <typename Config>
__global__ void __launch_bounds__(BackwardShape<Config>::kThreads, 1) sm90_mla_backward(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_q_pe,
    const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_k_pe,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_do,
    const __grid_constant__ TensorMap map_dk, const __grid_constant__ TensorMap map_dv,
    const __grid_constant__ TensorMap map_stats, float* dk_pe, float* dq_acc, int* flags, int s_q, int s_k, int heads,
    int batches, int d_pe, int left, int right, int section_heads, bool alternate, float scale, const Interval* intervals) {
    static_assert(BackwardShape<Config>::kBoxes > 1, "the last box is the rope part");
    static_assert(!Config::kSoftcap && !Config::kSlope, "mla modifies no scores");
    const BackwardProblemOf<Config> problem{
        {s_q, s_k, heads, batches, 1, left, right, section_heads, alternate, intervals}};
    const MlaBackwardMaps maps{map_q, map_q_pe, map_k, map_k_pe, map_v, map_do, map_dk, map_dv, map_stats, dk_pe, d_pe};
    compute_gradients<Config>(maps, problem, dq_acc, flags, nullptr, scale, 0);
}

}  // namespace tilewright
