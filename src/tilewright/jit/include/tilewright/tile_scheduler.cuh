// Tile scheduler of a persistent GEMM, dense or grouped.
//
// Config::kGemmType:
//   Dense     a batch of products;
//   GroupedM  rows [starts[g], ends[g]) of A times B of group g.  All groups lie in one matrix of A and of D and begin at any
//             row, or (`masked`, the masked layout) each group has its own matrix;
//   GroupedK  K in [starts[g], ends[g]) of A and B makes matrix g of D.
// starts and ends are device memory, clamped to A.  Without starts a group begins where the previous one ends (`masked`: at
// 0).  A cluster takes units of kClusterM x kClusterN tiles of one group; its blocks take the tiles of a unit by their rank.
//
// Each warp or thread that needs the tiles has its own TileScheduler; all of a block see the same tiles in the same order:
//
//     __shared__ typename TileScheduler<Config>::Table table;
//     griddepcontrol_wait();
//     TileScheduler<Config>::prepare(args, table);  // the whole block
//     TileScheduler<Config> scheduler(args, table, rank);
//     for (Tile tile; scheduler.next(tile);) ...
//
// kSplitK blocks of a cluster take the same tile (Dense), and of its K block rank / (kClusterM * kClusterN) the part of that
// number: at least one stage if K has kSplitK stages.
//
// Config: kGemmType, kAccumulate, kBlockM, kBlockN, kClusterM, kClusterN, kSplitK; Element.
#pragma once

#include <tilewright/raster.cuh>

namespace tilewright {

enum class GemmType : int { Dense = 0, GroupedM = 1, GroupedK = 2 };

// One tile of D.  It may lie outside of D, and `k_blocks` may be 0 (GroupedK: a group with empty K, whose D is zero, or C).
struct Tile {
    u32 row, column;                // first row of A and D, first column of op(B) and D
    u32 batch_a, batch_b, batch_d;  // matrix of A, B and D
    u32 row_end;                    // first row of D not to be written (GroupedM: end of the group or of its share; else of D)
    u32 k, k_blocks;                // first element of K, number of stages
    u32 k_tail;                     // elements of K in the last stage that belong to the group (GroupedK; else all of it)
};

struct SchedulerArgs {
    u32 m, n, k;        // of one matrix of A and of op(B)
    u32 batches;        // products, or groups
    u32 group_m;        // of grouped_raster, in units
    const int* starts;  // of groups, or nullptr; Dense reads neither starts nor ends
    const int* ends;
    bool masked;  // GroupedM: each group has its own matrix of A and of D
};

template <typename Config> class TileScheduler {
    static constexpr GemmType kGemmType = GemmType(Config::kGemmType);
    static constexpr u32 kShare = Config::kClusterM * Config::kClusterN, kSplitK = Config::kSplitK;
    static constexpr u32 kCluster = kShare * kSplitK;
    static_assert(kSplitK == 1 || kGemmType == GemmType::Dense, "groups do not split K");
    static constexpr u32 kBlockK = 128 / sizeof(typename Config::Element);  // elements of a stage
    static constexpr u32 kEntries = 128, kLaneEntries = kEntries / 32;

  public:
    // Prefix sums of units: entry i counts the units before group i * groups_per_entry(), so any number of groups fits.
    struct Table { u32 first_unit[kGemmType == GemmType::GroupedM ? kEntries + 1 : 1]; };

    // Fills the table, by the whole block; `starts` and `ends` must have been written.
    __device__ static void prepare(const SchedulerArgs& args, Table& table) {
        if constexpr (kGemmType == GemmType::GroupedM) {
            if (threadIdx.x < 32) {
                const u32 columns = unit_columns(args), groups = groups_per_entry(args);
                u32 units[kLaneEntries], sum = 0;
#pragma unroll
                for (u32 i = 0; i < kLaneEntries; ++i) {
                    const u32 first = (threadIdx.x * kLaneEntries + i) * groups;
                    units[i] = 0;
                    for (u32 g = first; g < min(first + groups, args.batches); ++g) {
                        units[i] += Span::of_group(args, g).units() * columns;
                    }
                    sum += units[i];
                }
                // Scan over the warp: inclusive, then exclusive
                u32 prefix = sum;
#pragma unroll
                for (u32 offset = 1; offset < 32; offset *= 2) {
                    const u32 other = __shfl_up_sync(~0u, prefix, offset);
                    if (threadIdx.x >= offset) prefix += other;
                }
                prefix -= sum;
#pragma unroll
                for (u32 i = 0; i < kLaneEntries; ++i) {
                    table.first_unit[threadIdx.x * kLaneEntries + i] = prefix;
                    prefix += units[i];
                }
                if (threadIdx.x == 31) table.first_unit[kEntries] = prefix;
            }
            __syncthreads();
        }
    }

    __device__ TileScheduler(const SchedulerArgs& args, const Table& table, u32 rank)
        : args_(args), table_(table), rows_((args.m + kUnitRows - 1) / kUnitRows), columns_(unit_columns(args)),
          units_(kGemmType == GemmType::GroupedM ? table.first_unit[kEntries] : rows_ * columns_ * args.batches),
          rank_(kSplitK == 1 ? rank : rank % kShare), split_(kSplitK == 1 ? 0 : rank / kShare), unit_(blockIdx.x / kCluster) {}

    // The next tile of this block; false when there is none.
    __device__ bool next(Tile& tile) {
        if constexpr (kGemmType == GemmType::GroupedK && Config::kAccumulate) {
            while (unit_ < units_ && Span::of_group(args_, unit_ / (rows_ * columns_)).empty()) {
                unit_ += gridDim.x / kCluster;  // skip groups with nothing to add
            }
        }
        if (unit_ >= units_) return false;
        if constexpr (kGemmType == GemmType::GroupedM) {
            set_grouped(tile);
        } else {
            const u32 batch = unit_ / (rows_ * columns_);
            set_position(tile, unit_ - batch * rows_ * columns_, rows_, 0);
            tile.batch_a = tile.batch_b = kGemmType == GemmType::GroupedK ? 0 : batch;
            tile.batch_d = batch;
            tile.row_end = args_.m;
            const Span span = kGemmType == GemmType::GroupedK ? Span::of_group(args_, batch) : Span{0, args_.k};
            set_k(tile, span.first, span.end - span.first);
            if constexpr (kSplitK > 1) take_part(tile);
        }
        unit_ += gridDim.x / kCluster;
        return true;
    }

    // All units; the one that next() takes.
    __device__ u32 units() const { return units_; }
    __device__ void seek(u32 unit) { unit_ = unit; }

  private:
    // Large tiles take equal shares of a group's rows, 192 and 78 of 270 rather than 256 and 14: a tile of a few rows still
    // loads all of B
    static constexpr bool kEqualShares = kGemmType == GemmType::GroupedM && Config::kBlockM > 128 && Config::kClusterM == 1;
    static constexpr u32 kShareRows = Config::kBlockM % 64 == 0 ? 64 : 16;
    static constexpr u32 kUnitRows = Config::kBlockM * Config::kClusterM, kUnitColumns = Config::kBlockN * Config::kClusterN;

    // A group's rows of A, or its part of K.
    struct Span {
        u32 first, end;

        __device__ static Span of_group(const SchedulerArgs& args, u32 group) {
            const int limit = kGemmType == GemmType::GroupedM ? args.m : args.k;
            int from = group == 0 || args.masked ? 0 : args.ends[group - 1];
            if (args.starts != nullptr) from = args.starts[group];
            from = min(max(from, 0), limit);
            return {u32(from), u32(min(max(args.ends[group], from), limit))};
        }
        __device__ bool empty() const { return first == end; }
        __device__ u32 units() const { return (end - first + kUnitRows - 1) / kUnitRows; }
    };

    const SchedulerArgs& args_;
    const Table& table_;
    u32 rows_, columns_, units_, rank_, split_, unit_;
    u32 group_ = 0, first_unit_ = 0;  // GroupedM: the current group and its first unit
    Span span_ = {0, 0};

    __device__ static u32 unit_columns(const SchedulerArgs& args) { return (args.n + kUnitColumns - 1) / kUnitColumns; }
    __device__ static u32 groups_per_entry(const SchedulerArgs& args) { return (args.batches + kEntries - 1) / kEntries; }

    // Sets row and column of this block's tile in unit `index` of rows x columns_ units, which begin at row `first` of A.
    __device__ void set_position(Tile& tile, u32 index, u32 rows, u32 first) {
        u32 row, column;
        grouped_raster(index, rows, columns_, args_.group_m, row, column);
        row = row * Config::kClusterM + (Config::kClusterM > 1 ? rank_ : 0);
        column = column * Config::kClusterN + (Config::kClusterN > 1 ? rank_ : 0);
        tile.row = first + row * Config::kBlockM, tile.column = column * Config::kBlockN;
    }

    __device__ void set_k(Tile& tile, u32 first, u32 length) {
        tile.k = first;
        tile.k_blocks = (length + kBlockK - 1) / kBlockK;
        tile.k_tail = length - (tile.k_blocks - 1) * kBlockK;
    }

    __device__ void take_part(Tile& tile) {
        const u32 begin = tile.k_blocks * split_ / kSplitK, end = tile.k_blocks * (split_ + 1) / kSplitK;
        tile.k += begin * kBlockK;
        tile.k_blocks = end - begin;
    }

    __device__ void set_grouped(Tile& tile) {
        if (unit_ - first_unit_ >= span_.units() * columns_) find_group();
        set_position(tile, unit_ - first_unit_, span_.units(), span_.first);
        tile.batch_a = tile.batch_d = args_.masked ? group_ : 0;
        tile.batch_b = group_;
        tile.row_end = span_.end;
        if constexpr (kEqualShares) {
            const u32 step = kShareRows * span_.units();
            const u32 share = (span_.end - span_.first + step - 1) / step * kShareRows;
            tile.row = span_.first + (tile.row - span_.first) / kUnitRows * share;
            tile.row_end = min(tile.row + share, span_.end);
        }
        set_k(tile, 0, args_.k);
    }

    // Advances group_ to the group of unit_.
    __device__ void find_group() {
        // Binary search for the last entry that begins at or before unit_, then a linear search among its groups
        u32 entry = 0;
#pragma unroll
        for (u32 half = kEntries / 2; half > 0; half /= 2) {
            if (table_.first_unit[entry + half] <= unit_) entry += half;
        }
        group_ = entry * groups_per_entry(args_);
        first_unit_ = table_.first_unit[entry];
        for (;; ++group_) {
            span_ = Span::of_group(args_, group_);
            const u32 count = span_.units() * columns_;
            if (unit_ - first_unit_ < count || group_ + 1 == args_.batches) return;
            first_unit_ += count;
        }
    }
};

}  // namespace tilewright
