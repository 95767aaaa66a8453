// The producer warpgroup: one thread loads K, V and their scales through two rings, another loads Q.
#pragma once

#include "fmha_forward/schedule.cuh"
#include "shape.cuh"

namespace tilewright {

// Scales of one operand: (B, H, blocks of kScaleBlock tokens); a stride of 0 along blocks if one serves all tokens of a head.
struct Fp8Scales {
    const float* data;
    int batch_stride, head_stride, block_stride;

    __device__ const float* of_head(int batch, int head) const {
        return data + i64(batch) * batch_stride + i64(head) * head_stride;
    }
    __device__ int block(int token) const { return token / int(kScaleBlock) * block_stride; }
};

struct Fp8Maps {
    const TensorMap &q, &k, &v;  // v: transposed, (B, H_kv, D_v, S_k)
};

// Loads K and V from the last key tile to the first, in the order of the wgmma: K is one tile ahead of V.
template <typename Config>
__device__ inline void load_kv_fp8(
    const FmhaProblem& problem, const FmhaMask& mask, Fp8Barriers<Config>& barriers, const Fp8Maps& maps,
    const Fp8Scales& of_k, const Fp8Scales& of_v, u8* stages_k, u8* stages_v) {
    using Shape = Fp8Shape<Config>;
    Ring<Shape::kStages> ring_k, ring_v;
    FmhaScheduler<Config> scheduler(problem, mask);
    for (FmhaTile<Config> tile; scheduler.next(tile);) {
        const int head = tile.head / problem.heads_per_kv;
        const float* const k_scales = of_k.of_head(tile.batch, head);
        const float* const v_scales = of_v.of_head(tile.batch, head);
        // A scale is read before the wait, which hides its latency, and written before the arrival that publishes it
        const auto load_k = [&](int n) {
            const int key = tile.key(n);
            const float scale = k_scales[of_k.block(key)];
            Barrier& full = barriers.k_full[ring_k.stage];
            barriers.k_empty[ring_k.stage].wait(ring_k.parity ^ 1);
            barriers.k_scale[ring_k.stage] = scale;
            full.arrive_and_expect_tx(Shape::kKBytes);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxes; ++i) {
                u8* const smem = stages_k + ring_k.stage * Shape::kKBytes + i * Shape::kN * Shape::kSpan;
                tma_load(smem, maps.k, full, i * Shape::kSpan, key, head, tile.batch);
            }
            ring_k.advance();
        };
        const auto load_v = [&](int n) {
            const int key = tile.key(n);
            const float scale = Config::kScaleV ? v_scales[of_v.block(key)] : 1;
            Barrier& full = barriers.v_full[ring_v.stage];
            barriers.v_empty[ring_v.stage].wait(ring_v.parity ^ 1);
            if constexpr (Config::kScaleV) barriers.v_scale[ring_v.stage] = scale;
            full.arrive_and_expect_tx(Shape::kVBytes);
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxesV; ++i) {
                u8* const smem = stages_v + ring_v.stage * Shape::kVBytes + i * Shape::kDv * Shape::kSpanV;
                tma_load(smem, maps.v, full, key + int(i * Shape::kSpanV), 0, head, tile.batch);
            }
            ring_v.advance();
        };
        for (int n = tile.end - 1; n >= tile.first; --n) {
            load_k(n);
            if (n + 1 < tile.end) load_v(n + 1);
        }
        if (!tile.empty()) load_v(tile.first);
    }
}

// Loads Q of each tile into its stage, once the warpgroup has read what was there.
template <typename Config>
__device__ inline void load_q_fp8(
    const FmhaProblem& problem, const FmhaMask& mask, Fp8Barriers<Config>& barriers, const Fp8Maps& maps, u8* stages_q) {
    using Shape = Fp8Shape<Config>;
    Ring<Shape::kQStages> ring;
    FmhaScheduler<Config> scheduler(problem, mask);
    for (FmhaTile<Config> tile; scheduler.next(tile); ring.advance()) {
        for (u32 group = 0; group < Shape::kWarpgroups; ++group) {
            Barrier& full = barriers.q_full[ring.stage][group];
            barriers.q_empty[ring.stage][group].wait(ring.parity ^ 1);
            full.arrive_and_expect_tx(Shape::kQBytes);
            const int row = tile.row + int(group * kWarpgroupM);
            u8* const smem = stages_q + (ring.stage * Shape::kWarpgroups + group) * Shape::kQBytes;
#pragma unroll
            for (u32 i = 0; i < Shape::kBoxes; ++i) {
                tma_load(smem + i * kWarpgroupM * Shape::kSpan, maps.q, full, i * Shape::kSpan, row, tile.head, tile.batch,
                         CacheHint::EvictFirst);
            }
        }
    }
}

}  // namespace tilewright
