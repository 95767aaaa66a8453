// Which tile of keys comes as which, and which queries see it.
//
// Blocks draw numbers from a counter.  Those that add to one dQ do so in the order of their numbers, so whom a block waits for
// has drawn before it, and works: no number of blocks that fit the machine can lock up.
//
// The order costs time only where two want to add to the same tile at once.  Under a causal mask tile j of keys meets
// queries from j on.  If all tiles of a head begin together and walk forwards, query i meets j = i, i - 1, ... one step after
// another: nobody waits, but the tiles end one after another, the shortest first.  Whoever ends then draws of the next
// heads, the longest first, and walks backwards: tile j, begun j steps later, meets query i one step after tile j - 1.  So
// both the work and the order come out even when sections of heads alternate.
#pragma once

#include "shape.cuh"

namespace tilewright {

// Query i stands at i + s_k - s_q, the last one at the last key.  Allowed keys are those with -right <= position - key <=
// left; a negative bound is none.
struct BackwardProblem {
    int s_q, s_k, heads, batches, sharing;  // sharing: query heads of a kv head
    int left, right;
    int together;  // kv heads that are walked at a time, so that their queries stay in the L2
    bool alternating;  // sections of heads begin with their last keys, the last section and every second before it with
                       // the first; else all with the last

    __device__ int position(int row) const { return row + s_k - s_q; }
    template <u32 kM> __device__ int tiles() const { return (s_q + int(kM) - 1) / int(kM); }  // of queries

    // Tiles of keys that add to dQ of tile `m`: [first_keys, end_keys).
    template <u32 kM> __device__ int first_keys(int m) const {
        return left < 0 ? 0 : max(0, position(m * int(kM)) - left) / int(kBackwardKeys);
    }
    template <u32 kM> __device__ int end_keys(int m) const {
        const int last = position(min(m * int(kM) + int(kM), s_q) - 1);
        const int keys = right < 0 ? s_k : max(0, min(s_k, last + right + 1));
        return (keys + int(kBackwardKeys) - 1) / int(kBackwardKeys);
    }
};

// In shared memory: whoever draws a tile writes it, all others read.
struct BackwardTile {
    int key;          // first of the keys; negative: there is no more
    bool last_first;  // keys of this head come from the last, queries from the first; else the other way about
    int head, batch;  // the kv head
    int first, end;   // tiles of queries that see them
    int heads;        // query heads to meet: 0 if nothing sees them
    int place;        // number of the first of these heads' first tile of queries, over batch and heads

    template <u32 kM> __device__ void find(const BackwardProblem& problem, int number) {
        const int of_keys = (problem.s_k + int(kBackwardKeys) - 1) / int(kBackwardKeys);
        const int kv_heads = problem.heads / problem.sharing, all = kv_heads * problem.batches;
        key = -1;
        if (number >= of_keys * all) return;
        const int of_section = of_keys * problem.together, section = number / of_section;
        const int within = number - section * of_section, begin = section * problem.together;
        const int width = min(problem.together, all - begin), turn = within / width, which = begin + within - turn * width;
        last_first = !problem.alternating || (all - 1) / problem.together % 2 != section % 2;
        key = (last_first ? of_keys - 1 - turn : turn) * int(kBackwardKeys);
        batch = which / kv_heads;
        head = which - batch * kv_heads;
        const int away = problem.s_k - problem.s_q, tiles = problem.tiles<kM>();
        const int top = problem.right < 0 ? 0 : max(0, key - problem.right - away);  // first and last row that see it
        const int bottom = problem.left < 0 ? problem.s_q - 1 : key + int(kBackwardKeys) - 1 + problem.left - away;
        first = top < problem.s_q ? top / int(kM) : tiles;
        end = bottom < 0 ? 0 : min(tiles, bottom / int(kM) + 1);
        heads = first < end ? problem.sharing : 0;
        place = (batch * problem.heads + head * problem.sharing) * tiles;
    }
    // How many add to dQ of tile `m` before this one.
    template <u32 kM> __device__ int rank(const BackwardProblem& problem, int m) const {
        const int n = key / int(kBackwardKeys);
        return last_first ? problem.end_keys<kM>(m) - 1 - n : n - problem.first_keys<kM>(m);
    }
};

// Walks over the query heads of a tile of keys, and for each over its tiles of queries; all roles in the same order.
struct BackwardVisit {
    int head, at;

    __device__ explicit BackwardVisit(const BackwardTile& tile) : head(0), at(tile.first) {}
    __device__ void next(const BackwardTile& tile) {
        if (++at == tile.end) at = tile.first, ++head;
    }
    __device__ int m(const BackwardTile& tile) const { return tile.last_first ? at : tile.first + tile.end - 1 - at; }
};

}  // namespace tilewright
