// Which queries a block works on next, and which tiles of keys they see.
//
// A block stays on its multiprocessor and takes every gridDim.x-th tile.  The tiles of a head are worked on at the same
// time, so its keys and values stay in the L2.  Where late queries see more keys than early ones, tiles come in pairs,
// the longest with the shortest, so that all blocks have the same work: causal with 16 tiles a head leaves 3 % of the
// multiprocessors idle, all of it because 7.8 pairs a block are eight, and 20 % with every 132nd tile.
#pragma once

#include "mask_program.cuh"
#include "shape.cuh"

namespace tilewright {

// Query i stands at i + s_k - s_q, the last one at the last key.  Allowed keys are those with -right <= position - key
// <= left; a negative bound is none.
struct FmhaProblem {
    int s_q, s_k, heads, batches, sharing;  // sharing: query heads of a kv head
    int left, right;
    bool paired;

    __device__ int position(int row) const { return row + s_k - s_q; }
};

// A mask that is no band.
struct FmhaMask {
    const int* numbers;  // of its program
    // The tiles of keys that each tile of queries needs, partial ones first (mask/tables.py); not of packed sequences
    const int* counts;  // partial, full
    const void* indices;
    int of_batch, of_head, pitch;  // from one to the next: rows, rows, indices
};

// Which keys a query sees where they are an interval, neither of whose ends decreases from query to query: of a band
// and of packed sequences.
template <typename Mask> struct FmhaKeys {
    const FmhaProblem& problem;

    __device__ FmhaKeys(const FmhaProblem& of, const FmhaMask&) : problem(of) {}
    __device__ Interval of(int row) const {
        const int at = problem.position(row), s_k = problem.s_k;
        return {problem.left < 0 ? 0 : max(0, at - problem.left),
                problem.right < 0 ? s_k : max(0, min(s_k, at + problem.right + 1))};
    }
};
template <> struct FmhaKeys<MaskSequences<0>> {
    const int *first, *end;
    int last, s_k;

    __device__ FmhaKeys(const FmhaProblem& problem, const FmhaMask& mask)
        : first(mask.numbers + mask.numbers[2]), end(first + problem.s_q), last(problem.s_q - 1), s_k(problem.s_k) {}
    __device__ Interval of(int row) const {
        const int query = min(row, last);
        return {max(0, first[query]), min(s_k, end[query])};
    }
};

template <typename Config> struct FmhaTile {
    static constexpr bool kPacked = Same<typename Config::Mask, MaskSequences<0>>::value;
    static constexpr bool kListed = !kPacked && !Same<typename Config::Mask, NoProgram>::value;
    using Index = typename Config::Index;

    int row, head, batch;
    int first, end;     // of the tiles of keys, which are walked from the end
    int partial;        // if they are listed: those before it need the mask
    const Index* list;  // their numbers

    // First key of a tile.
    __device__ int key(int at) const { return (kListed ? int(list[at]) : at) * int(Config::kBlockN); }
    __device__ bool empty() const { return first >= end; }
};

template <typename Config> class FmhaSchedule {
  public:
    __device__ FmhaSchedule(const FmhaProblem& problem, const FmhaMask& mask)
        : problem_(problem), mask_(mask), keys_(problem, mask) {}

    // The next tile of this block; false when there is none.
    __device__ bool next(FmhaTile<Config>& tile) {
        const u32 tiles = (problem_.s_q + kM - 1) / kM, heads = problem_.heads * problem_.batches;
        u32 head, number;
        do {
            const u32 unit = (problem_.paired ? turn_ / 2 : turn_) * gridDim.x + blockIdx.x;
            const u32 column = unit / tiles, within = unit - column * tiles;
            if (problem_.paired) {  // a column is two heads, for tiles may be odd in number
                if (2 * column >= heads) return false;
                const u32 second = turn_ % 2;
                head = 2 * column + (within + second) % 2;
                number = second ? within / 2 : tiles - 1 - within / 2;
            } else {
                if (column >= heads) return false;
                head = column;
                number = tiles - 1 - within;
            }
            ++turn_;
        } while (head >= heads);  // the last column may be one head
        tile.row = number * kM;
        tile.batch = head / problem_.heads;
        tile.head = head - tile.batch * problem_.heads;
        if constexpr (FmhaTile<Config>::kListed) {
            const i64 line = i64(tile.batch) * mask_.of_batch + i64(tile.head) * mask_.of_head + number;
            tile.first = 0;
            tile.partial = mask_.counts[2 * line];
            tile.end = tile.partial + mask_.counts[2 * line + 1];
            tile.list = static_cast<const typename Config::Index*>(mask_.indices) + line * mask_.pitch;
        } else {
            constexpr int kN = Config::kBlockN;
            tile.first = keys_.of(tile.row).first / kN;
            tile.end = (keys_.of(min(tile.row + int(kM), problem_.s_q) - 1).end + kN - 1) / kN;
        }
        return true;
    }

  private:
    static constexpr u32 kM = FmhaShape<Config>::kM;

    const FmhaProblem& problem_;
    const FmhaMask& mask_;
    const FmhaKeys<typename Config::Mask> keys_;
    u32 turn_ = 0;
};

}  // namespace tilewright
