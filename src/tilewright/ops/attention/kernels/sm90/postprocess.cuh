// After the backward kernel: dQ = scale * dq_acc, rounded, from the layout of the wgmma accumulators to rows.
//
// One block has one query tile.  A thread reads the 64 consecutive bytes that four threads of a warpgroup wrote: 8 columns of
// two rows.
//
// Config: kD (a multiple of 16), kBlockM, kPacked, kByBatch, Element.
#pragma once

#include <tilewright/ptx.cuh>

#include "fmha_backward/schedule.cuh"

namespace tilewright {

constexpr u32 kPostprocessThreads = 256;

// A tensor (B, H, S_q, d) by stride, and the rows of one head of it.
template <typename Element> struct DqTensor {
    Element* data;
    int d;
    i64 batch, head, row;
    __device__ Element* rows(int bh, int heads) const { return data + bh / heads * batch + bh % heads * head; }
};

// kRope: columns of the last box of dq_acc are those of dq_pe.
template <typename Config, bool kRope>
__device__ inline void write_dq(
    const float* dq_acc, const DqTensor<typename Config::Element>& dq, const DqTensor<typename Config::Element>& dq_pe, int s_q, int s_k, int heads, int left, int right, float scale,
    const Interval* intervals) {
    using Element = typename Config::Element;
    using Shape = BackwardShape<Config>;
    constexpr u32 kM = Shape::kM, kColumns = Shape::kDqColumns, kEights = kColumns / 8;
    struct alignas(16) Floats { float x[4]; };
    struct alignas(16) Packed { u32 x[4]; };

    griddepcontrol_wait();
    launch_dependents();
    const BackwardProblemOf<Config> problem{{s_q, s_k, heads, 0, 1, left, right, 1, 0, intervals}};
    const int query_tiles = problem.template query_tile_count<kM>(), bh = int(blockIdx.x) / query_tiles;
    const int m = int(blockIdx.x) - bh * query_tiles;
    // If no key tile meets this query tile, dq_acc is uninitialised and dQ is 0
    const int batch = bh / heads;
    const bool written = problem.template first_key_tile<kM>(batch, m) < problem.template end_key_tile<kM>(batch, m);
    const Floats* const tile_acc =
        reinterpret_cast<const Floats*>(dq_acc + i64(blockIdx.x) * kBackwardWarpgroups * kWarpgroupM * kColumns);
    Element* const dq_rows = dq.rows(bh, heads);
    Element* const dq_pe_rows = kRope ? dq_pe.rows(bh, heads) : nullptr;
#pragma unroll
    for (u32 item = threadIdx.x; item < kBackwardWarpgroups * kEights * 32; item += kPostprocessThreads) {
        const u32 j = item % kEights, quad = item / kEights % 32, group = item / kEights / 32;
        int column = int(Shape::dq_column(group, j)), d = dq.d;
        i64 pitch = dq.row;
        Element* rows = dq_rows;
        if (kRope && column >= int((Shape::kBoxes - 1) * Shape::kBoxColumns)) {
            column -= int((Shape::kBoxes - 1) * Shape::kBoxColumns);
            d = dq_pe.d, pitch = dq_pe.row, rows = dq_pe_rows;
        }
        const int row = m * int(kM) + int(quad / 8 * 16 + quad % 8 + (Shape::kSplitColumns ? 0 : group * kWarpgroupM));

        // Load 8 columns of two rows, from the four threads that held them
        Floats acc[4] = {};
        if (written && row < s_q && column < d) {
#pragma unroll
            for (u32 t = 0; t < 4; ++t) acc[t] = tile_acc[(group * kEights + j) * 128 + quad * 4 + t];
        }

        // Scale, round, store
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            Packed packed;
#pragma unroll
            for (u32 t = 0; t < 4; ++t) packed.x[t] = pack<Element>(acc[t].x[2 * h] * scale, acc[t].x[2 * h + 1] * scale);
            if (row + int(8 * h) < s_q && column < d) {
                *reinterpret_cast<Packed*>(rows + (row + int(8 * h)) * pitch + column) = packed;
            }
        }
    }
}

template <typename Config>
__global__ void __launch_bounds__(kPostprocessThreads) sm90_fmha_postprocess(
    const float* dq_acc, typename Config::Element* dq, int s_q, int s_k, int d, int heads, int left, int right, float scale,
    i64 dq_batch, i64 dq_head, i64 dq_row, const Interval* intervals) {
    const DqTensor<typename Config::Element> to{dq, d, dq_batch, dq_head, dq_row};
    write_dq<Config, false>(dq_acc, to, to, s_q, s_k, heads, left, right, scale, intervals);
}

template <typename Config>
__global__ void __launch_bounds__(kPostprocessThreads) sm90_mla_postprocess(
    const float* dq_acc, typename Config::Element* dq, typename Config::Element* dq_pe, int s_q, int s_k, int d, int d_pe,
    int heads, int left, int right, float scale, i64 dq_batch, i64 dq_head, i64 dq_row, i64 dq_pe_batch, i64 dq_pe_head,
    i64 dq_pe_row, const Interval* intervals) {
    using Tensor = DqTensor<typename Config::Element>;
    const Tensor to{dq, d, dq_batch, dq_head, dq_row}, to_pe{dq_pe, d_pe, dq_pe_batch, dq_pe_head, dq_pe_row};
    write_dq<Config, true>(dq_acc, to, to_pe, s_q, s_k, heads, left, right, scale, intervals);
}

// dK and dV of parts of the query heads, (B * H_kv * parts, S_k, D) dense, added up in fp32 in the order of the parts and
// rounded.  blockIdx.y: 0 for dK, 1 for dV.  A thread has eight columns.
template <typename Config>
__global__ void __launch_bounds__(kPostprocessThreads) sm90_fmha_sum_parts(
    const typename Config::Element* dk_parts, const typename Config::Element* dv_parts, typename Config::Element* dk,
    typename Config::Element* dv, int kv_heads, int all_heads, int s_k, int d, int d_v, int parts, i64 dk_batch, i64 dk_head,
    i64 dk_row, i64 dv_batch, i64 dv_head, i64 dv_row) {
    using Element = typename Config::Element;
    constexpr u32 kVector = 8;
    struct alignas(16) Vector { Element x[kVector]; };
    struct alignas(16) Packed { u32 x[kVector / 2]; };

    griddepcontrol_wait();
    launch_dependents();
    const bool values = blockIdx.y == 1;
    const int vectors = (values ? d_v : d) / int(kVector);
    const i64 per_head = i64(s_k) * vectors, item = i64(blockIdx.x) * kPostprocessThreads + threadIdx.x;
    if (item >= per_head * all_heads) return;
    const int head = int(item / per_head), in_head = int(item - head * per_head);
    const int row = in_head / vectors, vector = in_head - row * vectors;
    const Vector* const from = reinterpret_cast<const Vector*>(values ? dv_parts : dk_parts) + head * parts * per_head + in_head;
    float sum[kVector] = {};
    for (int part = 0; part < parts; ++part) {
        const Vector x = from[part * per_head];
#pragma unroll
        for (u32 i = 0; i < kVector; ++i) sum[i] += to_float(x.x[i]);
    }
    Packed packed;
#pragma unroll
    for (u32 i = 0; i < kVector / 2; ++i) packed.x[i] = pack<Element>(sum[2 * i], sum[2 * i + 1]);
    const i64 to = head / kv_heads * (values ? dv_batch : dk_batch) + head % kv_heads * (values ? dv_head : dk_head) +
                   row * (values ? dv_row : dk_row) + vector * int(kVector);
    *reinterpret_cast<Packed*>((values ? dv : dk) + to) = packed;
}

}  // namespace tilewright
