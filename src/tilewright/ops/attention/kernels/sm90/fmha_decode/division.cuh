// Who computes what, found on the device from the lengths.
//
// The query rows of a sequence (tokens times heads of a group, the head fastest) are cut into row tiles of kRows, its keys
// into units of kKeys.  Units are numbered through: sequence, row tile, unit of keys, the last one fastest.  A share is a
// range of these numbers:
//
//     Equal    all shares have the same number of units, whatever the lengths are; one may span several sequences
//     Own      a share lies in one row tile, and its length depends on that sequence alone
//     Cluster  the blocks of a cluster divide one row tile
//
// A block computes one share of one key head.  Blocks with neighbouring numbers have the same share of neighbouring heads,
// whose keys are neighbours in memory: read together, they open each page of DRAM once (on an H100 4 % more bytes a second
// than with the heads of a sequence one after another).
//
// Tokens behind the last sequence are one more, without keys; a row tile without keys has one unit.
#pragma once

#include <tilewright/ptx.cuh>

namespace tilewright {

enum class Division : int { Equal = 0, Own = 1, Cluster = 2 };

struct Sequence {
    int first_token, tokens, length, row_tiles;
    u32 first_unit, units;  // of keys that some token sees

    __device__ u32 all_units() const { return row_tiles * units; }
};

// each: new tokens of every sequence, 0 where cu_seqlens says.   left: keys before its position that a token sees, or -1.
template <u32 kRows, u32 kKeys> struct Sequences {
    const int* lengths;
    const int* cu_seqlens;
    int batch, tokens, each, group, capacity, left;

    __device__ int count() const { return each > 0 ? batch : batch + 1; }

    __device__ Sequence operator[](int b) const {
        Sequence s;
        s.length = b < batch ? min(max(lengths[b], 0), capacity) : 0;
        s.first_token = each > 0 ? b * each : min(cu_seqlens[b], tokens);
        s.tokens = each > 0 ? each : max((b < batch ? min(cu_seqlens[b + 1], tokens) : tokens) - s.first_token, 0);
        s.row_tiles = (s.tokens * group + kRows - 1) / kRows;
        const int first_key = left < 0 ? 0 : min(max(s.length - s.tokens - left, 0), s.length);
        s.first_unit = u32(first_key) / kKeys;
        s.units = max((u32(s.length) + kKeys - 1) / kKeys - s.first_unit, 1u);
        return s;
    }
};

__device__ inline u32 warp_inclusive_sum(u32 x) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, x, step);
        if (lane_index() >= step) x += other;
    }
    return x;
}

// Weights in a line, weight(i) for i in 0 .. count; all lanes of a warp together.  Those of at most 32 are read once.
struct Place {
    int index;   // i = count: the line is shorter
    u32 offset;  // into the range of weight i
};
template <typename Weight> struct Line {
    int count;
    const Weight& weight;
    u32 total, own = 0, end = 0;  // of the lane's weight, if there are at most 32

    __device__ Line(int count_, const Weight& weight_) : count(count_), weight(weight_) {
        if (count == 1) {  // the shortest way to the first load
            total = weight(0);
        } else if (count <= 32) {
            own = int(lane_index()) < count ? weight(lane_index()) : 0;
            end = warp_inclusive_sum(own);
            total = __shfl_sync(~0u, end, 31);
        } else {
            total = sum(count);
        }
    }

    // The sum of the first `n` weights.
    __device__ u32 sum(int n) const {
        u32 part = 0;
        for (int i = lane_index(); i < n; i += 32) part += weight(i);
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) part += __shfl_xor_sync(~0u, part, step);
        return part;
    }

    // The i whose range holds `position`.
    __device__ Place locate(u32 position) const {
        if (position >= total) return {count, 0};
        if (count == 1) return {0, position};
        u32 before = 0, of_lane = own, to_lane = end;
        for (int base = 0;; base += 32) {
            if (count > 32) {
                const int i = base + lane_index();
                of_lane = i < count ? weight(i) : 0;
                to_lane = before + warp_inclusive_sum(of_lane);
            }
            const u32 behind = __ballot_sync(~0u, to_lane > position);
            if (behind != 0) {
                const int first = __ffs(behind) - 1;
                return {base + first, position - __shfl_sync(~0u, to_lane - of_lane, first)};
            }
            before = __shfl_sync(~0u, to_lane, 31);
        }
    }
};

// Equal: the first `longer` shares have one unit more than the others.  Only as many have units as get kLeast of them.
template <u32 kLeast> struct EqualShares {
    u32 shares, units, longer;

    __device__ EqualShares(u32 total, u32 most) {
        shares = max(min(most, total / kLeast), 1u);
        units = total / shares;
        longer = total - units * shares;
    }
    __device__ u32 begin(u32 share) const { return share * units + min(share, longer); }
    __device__ u32 of_unit(u32 unit) const {
        const u32 bound = longer * (units + 1);
        return unit < bound ? unit / (units + 1) : longer + (unit - bound) / units;
    }
};

// Own: units of a share, from those of the row tile.
struct OwnShares {
    u32 least, most;

    __device__ u32 units(u32 all) const { return max(least, (all + most - 1) / most); }
    __device__ u32 count(u32 all) const { return (all + units(all) - 1) / units(all); }
};

// A position in the line of units, which moves on.
template <typename All> struct Walk {
    const All& all;
    int b = 0, row_tile = 0;
    u32 unit = 0;  // of the row tile
    Sequence s;

    __device__ explicit Walk(const All& all_) : all(all_) {}

    // offset: in units of sequence `index`
    __device__ void start(int index, u32 offset) {
        b = index;
        s = all[b];
        row_tile = s.row_tiles > 1 ? offset / s.units : 0;
        unit = offset - row_tile * s.units;
    }

    // Goes `units` further; the line does not end before.
    __device__ void advance(u32 units) {
        unit += units;
        while (unit >= s.units) {
            unit -= s.units;
            if (++row_tile < s.row_tiles) continue;
            row_tile = 0;
            do {
                if (++b == all.count()) return;  // behind the last one
                s = all[b];
            } while (s.row_tiles == 0);
        }
    }
};

}  // namespace tilewright
