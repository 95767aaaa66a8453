// O = softmax(scale * Q K^T + mask) V and the log-sum-exp of the scores, of e4m3 operands with scales: forward for Hopper.
//
// The blocks, roles and masks are those of the forward in 16 bits (forward.cuh).  What float8 changes:
// - Its wgmma reads operands along K only, and K of P V is the sequence: V comes transposed.
// - Accumulators of S hold other columns than the A operand of e4m3 wants.  P V is a sum over keys, so their order is free: the
//   transposed V has the keys of each group of 16 in the order in which threads hold their scores, and P needs no shuffle.
// - The tensor cores keep 14 bits of a sum of float8 products.  P V of each key tile starts at zero, in `t`, and is added to O
//   in float32; the rescaling of O is the factor in that addition and costs nothing.
// - A scale of K (and of Q) is a factor of the scores of a tile, one of V a factor of its t, or of O at the end.
//
// - P V of one tile and S of the next share registers, one after another.  Those that are free hold a third warpgroup up to
//   D = 128, and 256 columns of O beyond; the other warpgroups keep the tensor cores busy while one computes its softmax.
//
// Config: kD (multiple of 32), kDv (of 16): D and D_v rounded up; kWarpgroups; kBlockN, at most kScaleBlock and a divisor of it
// if scales are those of blocks; kStages (of K and V); kQStages; kTurns; kParts of the columns of V; kScaleV (scales of V are
// those of blocks); kModify (scores are scaled to units of log2 before the softmax: required for kSoftcap and scale <= 0);
// kSoftcap; Out; Mask, Index as in forward.cuh.
#pragma once

#include "fp8_forward/attend.cuh"

namespace tilewright {

template <typename Config>
__global__ void __launch_bounds__(Fp8Shape<Config>::kThreads, 1) sm90_fmha_fp8(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, void* o, float* lse, const float* q_scale, const float* k_scale,
    const float* v_scale, const float* sinks, const int* mask_data, const int* counts, const void* indices, int s_q, int s_k,
    int d_v, int heads, int batches, int heads_per_kv, int left, int right, bool paired, int batch_stride, int head_stride,
    int row_stride, i64 o_batch, i64 o_head, i64 o_row, int q_scale_batch, int q_scale_head, int q_scale_block,
    int k_scale_batch, int k_scale_head, int k_scale_block, int v_scale_batch, int v_scale_head, int v_scale_block,
    float scale, float softcap) {
    using Out = typename Config::Out;
    const FmhaProblem problem{s_q, s_k, heads, batches, heads_per_kv, left, right, paired};
    const FmhaMask mask{mask_data, counts, indices, batch_stride, head_stride, row_stride};
    const Fp8Operands operands{{q_scale, q_scale_batch, q_scale_head, q_scale_block},
                               {k_scale, k_scale_batch, k_scale_head, k_scale_block},
                               {v_scale, v_scale_batch, v_scale_head, v_scale_block},
                               sinks, lse, scale, softcap};
    const Fp8Result<Out> result{static_cast<Out*>(o), o_batch, o_head, o_row, d_v, s_q};
    attend_fp8<Config>(Fp8Maps{map_q, map_k, map_v}, operands, result, problem, mask);
}

}  // namespace tilewright
