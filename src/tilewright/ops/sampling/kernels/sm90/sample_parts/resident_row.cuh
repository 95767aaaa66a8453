// The part of a row that one block of a cluster holds in shared memory.
//
// Rows begin at any element.  A row is divided at multiples of 16 bytes of global memory, so that copies of whole vectors
// move it, vector for vector; the at most two vectors that it shares with its neighbours come element by element, with -inf
// in place of theirs.
#pragma once
#include <tilewright/copies.cuh>

#include "vector.cuh"

namespace tilewright {

template <typename Element_, u32 kThreads_, typename Scalar_ = float> struct ResidentRow {
    using Element = Element_;
    using Scalar = Scalar_;
    using Elements = Vector<Element, Scalar>;
    static constexpr u32 kThreads = kThreads_, kWidth = Elements::kWidth, kStages = 4, kBatch = 4;

    Element* elements;
    Barrier* loaded;
    u32 vectors;      // in this block
    int first_token;  // of the first element; others than 0 .. n - 1 are no tokens, their elements are -inf
    u32 stage_vectors;

    // Takes share `rank` of `part_vectors` vectors of the row at `row`, and starts its copies.  Called by all threads; a barrier
    // of the block follows, then `wait`.
    __device__ ResidentRow(Element* memory, Barrier* barriers, const Element* row, int n, u32 rank, u32 part_vectors)
        : elements(memory), loaded(barriers) {
        const u32 before = u32(reinterpret_cast<u64>(row) % 16) / sizeof(Element);
        const u32 end = before + u32(n), all = (end + kWidth - 1) / kWidth, begin = min(rank * part_vectors, all);
        vectors = min(part_vectors, all - begin);
        first_token = int(begin * kWidth) - int(before);
        stage_vectors = (vectors + kStages - 1) / kStages;
        const Element* from = row - before + u64(begin) * kWidth;
        const u32 whole_begin = begin == 0 && before > 0 ? 1 : 0;
        const u32 whole_end = begin + vectors == all && end % kWidth != 0 ? vectors - 1 : vectors;
        if (threadIdx.x == 0) {
            for (u32 stage = 0; stage < kStages; ++stage) {
                const u32 low = max(stage * stage_vectors, whole_begin), high = min((stage + 1) * stage_vectors, whole_end);
                const u32 bytes = high > low ? 16 * (high - low) : 0;
                loaded[stage].arrive_and_expect_tx(bytes);
                if (bytes > 0) bulk_load(elements + low * kWidth, from + low * kWidth, bytes, loaded[stage]);
            }
        }
        // The shared vectors
        for (u32 i = threadIdx.x; i < 2 * kWidth; i += kThreads) {
            const u32 vector = i < kWidth ? 0 : whole_end;
            const bool is_whole = i < kWidth ? whole_begin == 0 : whole_end == vectors || (whole_end == 0 && whole_begin == 1);
            if (vectors > 0 && !is_whole) {
                const u32 at = vector * kWidth + i % kWidth;
                const int token = first_token + int(at);
                elements[at] = token >= 0 && token < n ? from[at] : minus_infinity<Element>();
            }
        }
    }

    // This thread's largest element, found as they arrive.
    __device__ Scalar largest_on_arrival() const {
        Largest<Element, Scalar> largest;
        for (u32 stage = 0; stage < kStages; ++stage) {
            loaded[stage].wait(0);
            const u32 end = min((stage + 1) * stage_vectors, vectors);
#pragma unroll 1
            for (u32 v = stage * stage_vectors + threadIdx.x; v < end; v += kBatch * kThreads) {
#pragma unroll
                for (u32 i = 0; i < kBatch; ++i) {
                    if (v + i * kThreads < end) largest.take(word(v + i * kThreads));
                }
            }
        }
        return largest.scalar();
    }

    // Calls visit(vector, its index) for those of this thread's vectors that have an element from `lo` on.
    template <typename Visit> __device__ void each_from(Scalar lo, Visit visit) const {
        each_in_range_from(lo, threadIdx.x, vectors, kThreads, visit);
    }

    // The same for the vectors of a warp, from `first` to below `end`.
    template <typename Visit> __device__ void each_of_warp_from(Scalar lo, u32 first, u32 end, Visit visit) const {
        each_in_range_from(lo, first + threadIdx.x % 32, end, 32, visit);
    }

    // The same for vectors first, first + step, ... below end.  Several are tested at once; the visit is compiled once.
    template <typename Visit> __device__ void each_in_range_from(Scalar lo, u32 first, u32 end, u32 step, Visit visit) const {
#pragma unroll 1
        for (u32 v = first; v < end; v += kBatch * step) {
            u32 reached = 0;
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 at = v + i * step;
                if (at < end && Largest<Element, Scalar>(word(at)).scalar() >= lo) reached |= 1u << i;
            }
#pragma unroll 1
            for (u32 at = v; reached != 0; reached /= 2, at += step) {
                if (reached % 2 == 1) visit(Elements::of(word(at)), at);
            }
        }
    }

    __device__ Word4 word(u32 v) const { return reinterpret_cast<const Word4*>(elements)[v]; }
    __device__ Elements at(u32 v) const { return Elements::of(word(v)); }
    __device__ int token(u32 v, u32 i) const { return first_token + int(v * kWidth + i); }
};

}  // namespace tilewright
