// The tiles of one block of a persistent GEMM, one after the other.
//
// Config::kWalk:
//   Dense  the products of a batch;
//   Rows   rows [starts[g], ends[g]) of A times B of group g: in one matrix of A and of D, beginning anywhere, or (`apart`)
//          in a matrix of each group;
//   Depth  K in groups [starts[g], ends[g]), a matrix of D for each.
// Only the device knows starts and ends; what lies outside of A is cut off.  Without starts a group begins where the one
// before ends (`apart`: at 0).  Clusters take units of kClusterM x kClusterN tiles of one group; the blocks of a cluster take
// those of a unit by their rank.
//
// Every walker, a thread or a warp, has a TileWalk of its own, and all of a block see the same tiles in the same order:
//
//     __shared__ typename TileWalk<Config>::Table table;
//     wait_for_previous_kernel();
//     TileWalk<Config>::prepare(args, table);                       // the whole block
//     TileWalk<Config> walk(args, table, rank);
//     for (Tile tile; walk.next(tile);) ...
//
// Config: kWalk, kInto, kBlockM, kBlockN, kClusterM, kClusterN; Element.
#pragma once

#include <tilewright/scheduler.cuh>

namespace tilewright {

enum class Walk : int { Dense = 0, Rows = 1, Depth = 2 };

// What a tile is made of.  It may lie outside of D, and steps may be 0 (Depth: a group without K, whose D is zeros or C).
struct Tile {
    u32 row, column;                // of A and D, and of op(B) and D
    u32 batch_a, batch_b, batch_d;  // the matrices these are counted in
    u32 row_end;                    // rows of D from here on are not to be written (Rows; else the end of D)
    u32 k, steps;                   // K begins here, and takes so many stages
    u32 tail;                       // elements of K in the last stage that belong to the group (Depth; else all of it)
};

struct WalkArgs {
    u32 m, n, k;        // of one matrix of A, and of op(B)
    u32 batches;        // products, or groups
    u32 band;           // rows of units that are walked together
    const int* starts;  // of groups, or nullptr; the dense walk reads neither
    const int* ends;
    bool apart;  // Rows: a matrix of A and of D for each group
};

template <typename Config> class TileWalk {
    static constexpr Walk kWalk = Walk(Config::kWalk);
    static constexpr u32 kCluster = Config::kClusterM * Config::kClusterN;
    static constexpr u32 kBlockK = 128 / sizeof(typename Config::Element);  // elements of a stage
    static constexpr u32 kEntries = 128, kOfLane = kEntries / 32;

  public:
    // Units before every kEntries-th part of the groups.  Any number of groups will do: the parts grow with it.
    struct Table { u32 before[kWalk == Walk::Rows ? kEntries + 1 : 1]; };

    // Fills the table; `starts` and `ends` must be there.
    __device__ static void prepare(const WalkArgs& args, Table& table) {
        if constexpr (kWalk == Walk::Rows) {
            if (threadIdx.x < 32) {
                const u32 columns = columns_of(args), part = part_of(args);
                u32 units[kOfLane], sum = 0;
#pragma unroll
                for (u32 i = 0; i < kOfLane; ++i) {
                    const u32 first = (threadIdx.x * kOfLane + i) * part;
                    units[i] = 0;
                    for (u32 g = first; g < min(first + part, args.batches); ++g) {
                        units[i] += Span::of(args, g).units() * columns;
                    }
                    sum += units[i];
                }
                u32 before = sum;  // inclusive so far
#pragma unroll
                for (u32 offset = 1; offset < 32; offset *= 2) {
                    const u32 other = __shfl_up_sync(~0u, before, offset);
                    if (threadIdx.x >= offset) before += other;
                }
                before -= sum;
#pragma unroll
                for (u32 i = 0; i < kOfLane; ++i) {
                    table.before[threadIdx.x * kOfLane + i] = before;
                    before += units[i];
                }
                if (threadIdx.x == 31) table.before[kEntries] = before;
            }
            __syncthreads();
        }
    }

    __device__ TileWalk(const WalkArgs& args, const Table& table, u32 rank)
        : args_(args), table_(table), rows_((args.m + kUnitRows - 1) / kUnitRows), columns_(columns_of(args)),
          units_(kWalk == Walk::Rows ? table.before[kEntries] : rows_ * columns_ * args.batches), rank_(rank),
          unit_(blockIdx.x / kCluster) {}

    // The next tile of this block; false when there is none.
    __device__ bool next(Tile& tile) {
        if constexpr (kWalk == Walk::Depth && Config::kInto) {
            while (unit_ < units_ && Span::of(args_, unit_ / (rows_ * columns_)).empty()) {
                unit_ += gridDim.x / kCluster;  // nothing to add
            }
        }
        if (unit_ >= units_) return false;
        if constexpr (kWalk == Walk::Rows) {
            in_rows(tile);
        } else {
            const u32 batch = unit_ / (rows_ * columns_);
            place(tile, unit_ - batch * rows_ * columns_, rows_, 0);
            tile.batch_a = tile.batch_b = kWalk == Walk::Depth ? 0 : batch;
            tile.batch_d = batch;
            tile.row_end = args_.m;
            const Span span = kWalk == Walk::Depth ? Span::of(args_, batch) : Span{0, args_.k};
            set_depth(tile, span.first, span.end - span.first);
        }
        unit_ += gridDim.x / kCluster;
        return true;
    }

  private:
    static constexpr u32 kUnitRows = Config::kBlockM * Config::kClusterM, kUnitColumns = Config::kBlockN * Config::kClusterN;

    // What a group has of A's rows or of K.
    struct Span {
        u32 first, end;

        __device__ static Span of(const WalkArgs& args, u32 group) {
            const int limit = kWalk == Walk::Rows ? args.m : args.k;
            int from = group == 0 || args.apart ? 0 : args.ends[group - 1];
            if (args.starts != nullptr) from = args.starts[group];
            from = min(max(from, 0), limit);
            return {u32(from), u32(min(max(args.ends[group], from), limit))};
        }
        __device__ bool empty() const { return first == end; }
        __device__ u32 units() const { return (end - first + kUnitRows - 1) / kUnitRows; }
    };

    const WalkArgs& args_;
    const Table& table_;
    u32 rows_, columns_, units_, rank_, unit_;
    u32 group_ = 0, first_ = 0;  // Rows: the group of the last tile, and its first unit
    Span span_ = {0, 0};

    __device__ static u32 columns_of(const WalkArgs& args) { return (args.n + kUnitColumns - 1) / kUnitColumns; }
    __device__ static u32 part_of(const WalkArgs& args) { return (args.batches + kEntries - 1) / kEntries; }

    // Row and column of unit `index` of `rows` x columns_ that begin with row `first` of A.
    __device__ void place(Tile& tile, u32 index, u32 rows, u32 first) {
        u32 row, column;
        grouped_raster(index, rows, columns_, args_.band, row, column);
        row = row * Config::kClusterM + (Config::kClusterM > 1 ? rank_ : 0);
        column = column * Config::kClusterN + (Config::kClusterN > 1 ? rank_ : 0);
        tile.row = first + row * Config::kBlockM, tile.column = column * Config::kBlockN;
    }

    __device__ void set_depth(Tile& tile, u32 first, u32 depth) {
        tile.k = first;
        tile.steps = (depth + kBlockK - 1) / kBlockK;
        tile.tail = depth - (tile.steps - 1) * kBlockK;
    }

    __device__ void in_rows(Tile& tile) {
        if (unit_ - first_ >= span_.units() * columns_) find();
        place(tile, unit_ - first_, span_.units(), span_.first);
        tile.batch_a = tile.batch_d = args_.apart ? group_ : 0;
        tile.batch_b = group_;
        tile.row_end = span_.end;
        set_depth(tile, 0, args_.k);
    }

    // The group of unit_, a later one than group_.
    __device__ void find() {
        u32 entry = 0;  // the last that begins with unit_ or before: those of empty groups precede it
#pragma unroll
        for (u32 half = kEntries / 2; half > 0; half /= 2) {
            if (table_.before[entry + half] <= unit_) entry += half;
        }
        group_ = entry * part_of(args_);
        first_ = table_.before[entry];
        for (;; ++group_) {
            span_ = Span::of(args_, group_);
            const u32 count = span_.units() * columns_;
            if (unit_ - first_ < count || group_ + 1 == args_.batches) return;
            first_ += count;
        }
    }
};

}  // namespace tilewright
