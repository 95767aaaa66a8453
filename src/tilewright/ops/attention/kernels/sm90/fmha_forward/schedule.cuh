// The tile scheduler of the forward: which query tile a block takes next, and which key tiles that query tile needs.
//
// The kernel is persistent: block b takes units b, b + gridDim.x, ...  The tiles of one head are in flight together, so its
// K and V stay in the L2.  Where later queries see more keys (causal), a unit is a pair of tiles, the longest left with the
// shortest left, so that all blocks have the same work.  Causal with 16 tiles per head: pairs leave 3 % of the
// multiprocessors idle (7.8 pairs per block round up to 8), single tiles 20 %.
//
// Which keys are visible is one of three cases, chosen by Config::Mask:
// - band (BandOnly): causal, a window, or no mask; the bounds `left` and `right` say it;
// - packed (PackedOnly): packed sequences and nothing else; an interval of keys per query, in memory;
// - program (any other type): a mask program; a table lists the key tiles of each query tile.
#pragma once

#include "mask_program.cuh"
#include "shape.cuh"

namespace tilewright {

// Query i has position i + s_k - s_q: the last query stands at the last key.
struct FmhaProblem {
    int s_q, s_k, heads, batches, heads_per_kv;
    int left, right;  // the band: -right <= position - key <= left; negative: no bound
    bool paired;      // a unit is two tiles

    __device__ int position(int row) const { return row + s_k - s_q; }
};

// A mask that is not a band.
struct FmhaMask {
    const int* data;  // of the mask program
    // Case program: the tile table (mask/tables.py).  For each query tile the key tiles it needs, partial ones first
    const int* counts;  // partial, full
    const void* indices;
    int batch_stride, head_stride;  // in rows of the table; 0 if all batches or heads share them
    int row_stride;                 // in indices
};

// Band and packed: the interval of keys that a query sees; neither of its ends decreases from query to query.
template <typename Mask> struct VisibleKeys {
    const FmhaProblem& problem;

    __device__ VisibleKeys(const FmhaProblem& fmha, const FmhaMask&) : problem(fmha) {}
    __device__ Interval of_row(int row, int) const {
        const int position = problem.position(row), s_k = problem.s_k;
        return {problem.left < 0 ? 0 : max(0, position - problem.left),
                problem.right < 0 ? s_k : max(0, min(s_k, position + problem.right + 1))};
    }
};
template <bool kByBatch> struct VisibleKeys<PackedOnly<kByBatch>> {
    const int *first, *end;
    int last, s_k;

    __device__ VisibleKeys(const FmhaProblem& problem, const FmhaMask& mask)
        : first(mask.data + mask.data[2]), end(first + problem.s_q), last(problem.s_q - 1), s_k(problem.s_k) {}
    __device__ Interval of_row(int row, int batch) const {
        const int query = min(row, last) + (kByBatch ? batch * 3 * (last + 1) : 0);
        return {max(0, first[query]), min(s_k, end[query])};
    }
};

template <typename Mask> struct IsPacked { static constexpr bool value = false; };
template <bool kByBatch> struct IsPacked<PackedOnly<kByBatch>> { static constexpr bool value = true; };

template <typename Config> struct FmhaTile {
    static constexpr bool kPacked = IsPacked<typename Config::Mask>::value;
    static constexpr bool kProgram = !kPacked && !Same<typename Config::Mask, BandOnly>::value;
    using Index = typename Config::Index;

    int row, head, batch;
    int first, end;        // key tiles, visited from the end to the first
    int partial;           // case program: of tiles before it the mask is evaluated; the others are full
    const Index* indices;  // case program: the numbers of the key tiles

    // First key of a key tile.
    __device__ int key(int n) const { return (kProgram ? int(indices[n]) : n) * int(Config::kBlockN); }
    __device__ bool empty() const { return first >= end; }
};

template <typename Config> class FmhaScheduler {
  public:
    __device__ FmhaScheduler(const FmhaProblem& problem, const FmhaMask& mask)
        : problem_(problem), mask_(mask), visible_(problem, mask) {}

    // Takes this block's next tile; false if there is none.
    __device__ bool next(FmhaTile<Config>& tile) {
        // Unit -> head and query tile.  With pairs, a column of units is two heads: a head may have an odd number of tiles
        const u32 tiles = (problem_.s_q + kM - 1) / kM, heads = problem_.heads * problem_.batches;
        u32 head, m;
        do {
            const u32 unit = (problem_.paired ? count_ / 2 : count_) * gridDim.x + blockIdx.x;
            const u32 column = unit / tiles, row = unit - column * tiles;
            if (problem_.paired) {
                if (2 * column >= heads) return false;
                const u32 second = count_ % 2;
                head = 2 * column + (row + second) % 2;
                m = second ? row / 2 : tiles - 1 - row / 2;
            } else {
                if (column >= heads) return false;
                head = column;
                m = tiles - 1 - row;
            }
            ++count_;
        } while (head >= heads);  // the last column may be a single head
        tile.row = m * kM;
        tile.batch = head / problem_.heads;
        tile.head = head - tile.batch * problem_.heads;

        // The key tiles it needs
        if constexpr (FmhaTile<Config>::kProgram) {
            const i64 table_row = i64(tile.batch) * mask_.batch_stride + i64(tile.head) * mask_.head_stride + m;
            tile.first = 0;
            tile.partial = mask_.counts[2 * table_row];
            tile.end = tile.partial + mask_.counts[2 * table_row + 1];
            tile.indices = static_cast<const typename Config::Index*>(mask_.indices) + table_row * mask_.row_stride;
        } else {
            constexpr int kN = Config::kBlockN;
            tile.first = visible_.of_row(tile.row, tile.batch).first / kN;
            const int last = min(tile.row + int(kM), problem_.s_q) - 1;
            tile.end = (visible_.of_row(last, tile.batch).end + kN - 1) / kN;
        }
        return true;
    }

  private:
    static constexpr u32 kM = Config::kWarpgroups * kWarpgroupM;

    const FmhaProblem& problem_;
    const FmhaMask& mask_;
    const VisibleKeys<typename Config::Mask> visible_;
    u32 count_ = 0;  // tiles taken
};

}  // namespace tilewright
