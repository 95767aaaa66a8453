// Which key tiles of which rows a block attends to, computed on the device from the lengths.
//
// A row tile is 64 query rows (tokens times heads, the head fastest).  Work is counted in units, one
// key tile of one row tile, numbered row tile by row tile.  Either blocks take whole row tiles in turns, or, where
// that would leave many of them idle at the end, each takes an equal share of consecutive units: then a row tile may be cut
// into parts, which leave partial results in slots that the combine kernel reads.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

struct DecodeProblem {
    const int* lengths;  // of sequences; nullptr: all have the capacity
    int batches, tiles;  // row tiles of a sequence
    int rows;            // query rows of a sequence: s_q * heads
    int heads, s_q, capacity;
    int each;            // entries of `batches` that share a length: the tokens of a sequence, if each has its own keys
    bool causal;
    int blocks;        // that share the work
    int least, cost;     // units of a share at least; units that splitting costs.  least = 0: whole row tiles always

    __device__ int length(int b) const { return lengths == nullptr ? capacity : min(max(lengths[b / each], 0), capacity); }
    // A sequence of length 0 has one key tile, of which it sees nothing.
    __device__ int key_tiles(int b) const { return max((length(b) + 63) / 64, 1); }
};

// All lanes of a warp compute it together.
struct DecodePlan {
    int share;  // units of a block; 0: whole row tiles

    __device__ explicit DecodePlan(const DecodeProblem& problem) {
        int total = 0, most = 0;
        for (int b = int(threadIdx.x % 32); b < problem.batches; b += 32) {
            const int n = problem.key_tiles(b);
            total += n, most = max(most, n);
        }
        total = int(__reduce_add_sync(~0u, u32(total))) * problem.tiles;
        most = int(__reduce_max_sync(~0u, u32(most)));
        const int row_tiles = problem.batches * problem.tiles;
        const int turns = (row_tiles + problem.blocks - 1) / problem.blocks;
        const int even = max((total + problem.blocks - 1) / problem.blocks, problem.least);
        share = problem.least == 0 || turns * most <= even + problem.cost ? 0 : even;
    }
};

// The sequence and row tile that unit `unit` belongs to.  All lanes compute it together.
struct UnitPlace {
    int batch, tile;
    int first;  // unit of the row tile's first key tile

    __device__ UnitPlace(const DecodeProblem& problem, int unit) {
        const int lane = int(threadIdx.x % 32);
        int before = 0;
        batch = problem.batches, tile = 0, first = 0;
        for (int base = 0; base < problem.batches; base += 32) {
            const int n = base + lane < problem.batches ? problem.key_tiles(base + lane) * problem.tiles : 0;
            int end = n;  // inclusive prefix sum
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(~0u, end, step);
                if (lane >= step) end += other;
            }
            const u32 behind = __ballot_sync(~0u, before + end > unit);
            if (behind != 0) {
                const int at = __ffs(int(behind)) - 1;
                const int start = before + __shfl_sync(~0u, end - n, at), each = __shfl_sync(~0u, n, at) / problem.tiles;
                batch = base + at;
                tile = (unit - start) / each;
                first = start + tile * each;
                return;
            }
            before += __shfl_sync(~0u, end, 31);
        }
    }
};

// Consecutive key tiles of one row tile: [begin, end).
struct DecodeSegment {
    int batch, tile, length;
    int begin, end;
    int slot;  // of the partial result; -1: the row tile is whole
};

// A warp's place in the work, in shared memory: it is needed once in many key tiles, and registers are scarce.
struct DecodePlace {
    int share, batch, tile, unit, first, end;  // of the next segment: its unit, its row tile's first unit, the share's end
    DecodeSegment segment;
};

// All lanes of a warp call its functions together.
struct DecodeSchedule {
    const DecodeProblem& problem;
    DecodePlace& place;
    int block;

    __device__ DecodeSchedule(const DecodeProblem& problem, DecodePlace& place, int block)
        : problem(problem), place(place), block(block) {
        DecodePlace start;
        start.share = DecodePlan(problem).share;
        if (start.share > 0) {
            const UnitPlace at(problem, block * start.share);
            start.batch = at.batch, start.tile = at.tile, start.first = at.first;
            start.unit = block * start.share, start.end = start.unit + start.share;
        } else {
            start.batch = block / problem.tiles, start.tile = block % problem.tiles;
            start.unit = start.first = start.end = 0;
        }
        keep(start);
    }

    __device__ void keep(const DecodePlace& next) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) place = next;
        __syncwarp();
    }

    __device__ const DecodeSegment& segment() const { return place.segment; }

    // Takes the next segment; false if there is none.
    __device__ bool next() {
        DecodePlace at = place;
        if (at.batch >= problem.batches || (at.share > 0 && at.unit >= at.end)) return false;
        DecodeSegment& segment = at.segment;
        segment.batch = at.batch, segment.tile = at.tile;
        segment.length = problem.length(at.batch);
        const int n = max((segment.length + 63) / 64, 1);
        if (at.share > 0) {
            segment.begin = at.unit - at.first, segment.end = min(n, at.end - at.first);
            const bool whole = segment.begin == 0 && segment.end == n;
            segment.slot = whole ? -1 : 2 * block + (at.unit == block * at.share ? 0 : 1);
            at.unit = at.first + segment.end;
            if (segment.end == n) {
                at.first += n;
                if (++at.tile == problem.tiles) at.tile = 0, ++at.batch;
            }
        } else {
            segment.begin = 0, segment.end = n, segment.slot = -1;
            at.tile += problem.blocks;
            at.batch += at.tile / problem.tiles, at.tile %= problem.tiles;
        }
        keep(at);
        return true;
    }
};

}  // namespace tilewright
