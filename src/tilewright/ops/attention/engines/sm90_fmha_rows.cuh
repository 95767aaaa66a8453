// Before the backward kernel: two floats a query, and everything at its start.
//
// rows[tile][0] = log2 of the sum of a query's exponentials, +infinity where it sees nothing or is not there, so that P is 0;
// rows[tile][1] = delta = sum of dO * O, less the gradient of the log.  A block has a tile of kBlockM queries, whose flag it
// lowers, 16 threads a row.  Of packed sequences: also which tiles of keys meet a tile of queries.
//
// Config: kBlockM, kSpans, Element.
#pragma once

#include <tilewright/ptx.cuh>

#include "sm90_fmha/softmax.cuh"
#include "sm90_fmha_backward/schedule.cuh"

namespace tilewright {

constexpr u32 kRowsThreads = 256, kSpansThreads = 128;

template <typename Config>
__global__ void __launch_bounds__(kRowsThreads) sm90_fmha_rows(
    const typename Config::Element* d_o, const typename Config::Element* o, const float* lse, const float* dlse, float* rows,
    int* flags, int s_q, int d_v, int heads, i64 do_batch, i64 do_head, i64 do_row, i64 o_batch, i64 o_head, i64 o_row,
    Interval* spans, int s_k) {
    using Element = typename Config::Element;
    constexpr u32 kM = Config::kBlockM, kLanes = 16, kWide = 8;
    struct alignas(16) Chunk { Element of[kWide]; };

    griddepcontrol_wait();
    launch_dependents();
    const int tiles = (s_q + int(kM) - 1) / int(kM), line = int(blockIdx.x) / tiles;
    const int first = (int(blockIdx.x) - line * tiles) * int(kM), lane = int(threadIdx.x % kLanes);
    const Element* const from_do = d_o + line / heads * do_batch + line % heads * do_head;
    const Element* const from_o = o + line / heads * o_batch + line % heads * o_head;
    for (u32 r = threadIdx.x / kLanes; r < kM; r += kRowsThreads / kLanes) {
        const int row = first + int(r);
        const bool there = row < s_q;
        float delta = 0;
        if (there) {
            for (int c = lane * int(kWide); c < d_v; c += int(kLanes * kWide)) {
                const Chunk a = *reinterpret_cast<const Chunk*>(from_do + row * do_row + c);
                const Chunk b = *reinterpret_cast<const Chunk*>(from_o + row * o_row + c);
#pragma unroll
                for (u32 i = 0; i < kWide; ++i) delta += to_float(a.of[i]) * to_float(b.of[i]);
            }
        }
#pragma unroll
        for (u32 other = kLanes / 2; other > 0; other /= 2) delta += __shfl_xor_sync(~0u, delta, other);
        if (lane != 0) continue;
        const i64 at = i64(line) * s_q + row;
        const float log = there ? lse[at] : -infinity();
        if (there && dlse != nullptr) delta -= dlse[at];
        float* const to = rows + i64(blockIdx.x) * (2 * kM) + r;
        to[0] = log == -infinity() ? infinity() : log * kLog2E;
        to[kM] = delta;
    }
    if (threadIdx.x == 0) flags[blockIdx.x] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) flags[gridDim.x] = 0;  // the counter of tiles
    if constexpr (Config::kSpans) {
        const BackwardProblem<true> problem{{s_q, s_k, heads, 0, 1, -1, -1, 1, false, spans}};
        if (line == 0 && threadIdx.x == 0) spans[s_k + int(blockIdx.x)] = problem.meeting<kM>(int(blockIdx.x));
    }
}

// Of packed sequences, before that: which queries see a key.
//
// Every query sees an interval of keys, none of whose ends ever decreases; so the queries that see key j are those between
// the first one whose interval ends behind j and the first one whose interval begins behind j, which binary search finds.
// Whatever the numbers, what it finds never decreases from key to key: the order of sums rests on that alone.
//
// numbers: the program `seq:0` of mask/program.py.
template <typename Config>
__global__ void __launch_bounds__(kSpansThreads) sm90_fmha_spans(const int* numbers, Interval* spans, int s_q, int s_k) {
    griddepcontrol_wait();
    launch_dependents();
    const int* const first = numbers + numbers[2];
    const int* const end = first + s_q;
    const int key = int(blockIdx.x * kSpansThreads + threadIdx.x);
    if (key >= s_k) return;
    const auto until = [&](const int* ends) { return count_first(s_q, [&](int query) { return ends[query] <= key; }); };
    spans[key] = {until(end), until(first)};
}

}  // namespace tilewright
