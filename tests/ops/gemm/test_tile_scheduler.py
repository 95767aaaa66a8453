"""`tile_scheduler.cuh` compiled for the host: every element of every group is in exactly one tile, the blocks of a
cluster share a group, and every thread of a block sees the same tiles.
"""

import ctypes
import shutil
import subprocess

import pytest

from tilewright.jit.compilers import INCLUDE

ROWS = {(1, 1): 0, (1, 2): 1, (2, 1): 2}  # by cluster
DEPTH = {False: 3, True: 4}  # by `into`
SPLIT = {1: 5, 2: 6}  # by blocks that share an operand: rows of B

HOST = r"""
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define asm(...)
struct Index { unsigned x; };
thread_local Index threadIdx, blockIdx, gridDim;
using std::max;
using std::min;
static float __uint_as_float(unsigned) { return 0; }

// A warp of threads that exchange through `lanes`, all of them at every shuffle
static std::mutex mutex;
static std::condition_variable all;
static unsigned arrived, round_, lanes[32];
static void meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const unsigned mine = round_;
    if (++arrived == 32) arrived = 0, ++round_, all.notify_all();
    else all.wait(lock, [&] { return round_ != mine; });
}
static unsigned __shfl_up_sync(unsigned, unsigned value, unsigned offset) {
    lanes[threadIdx.x] = value;
    meet();
    const unsigned other = threadIdx.x < offset ? value : lanes[threadIdx.x - offset];
    meet();
    return other;
}
static void __syncthreads() {}
#include <tilewright/tile_scheduler.cuh>

using namespace tilewright;
template <int kOf, int kM, int kN, bool kAdds, int kParts = 1> struct Config {
    static constexpr int kGemmType = kOf, kBlockM = 64, kBlockN = 32, kClusterM = kM, kClusterN = kN;
    static constexpr bool kAccumulate = kAdds;
    static constexpr int kSplitK = kParts;
    using Element = bfloat16;
};

// Tiles of all blocks, nine numbers each and the block's index; returns how many.
template <typename Config> int list_tiles(const SchedulerArgs& args, unsigned grid, unsigned* tiles, int room) {
    typename TileScheduler<Config>::Table table;
    std::vector<std::thread> warp;
    for (unsigned lane = 0; lane < 32; ++lane) {
        warp.emplace_back([&, lane] { threadIdx.x = lane, TileScheduler<Config>::prepare(args, table); });
    }
    for (auto& thread : warp) thread.join();
    const unsigned cluster = Config::kClusterM * Config::kClusterN * Config::kSplitK;
    int count = 0;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        TileScheduler<Config> scheduler(args, table, blockIdx.x % cluster);
        for (Tile t; scheduler.next(t) && count < room; ++count) {
            const unsigned found[] = {t.row,     t.column, t.batch_a, t.batch_b, t.batch_d,
                                      t.row_end, t.k,      t.k_blocks,   t.k_tail,    blockIdx.x};
            std::copy(found, found + 10, tiles + 10 * count);
        }
    }
    return count;
}

using u = unsigned;
extern "C" int tiles_of(int kind, u m, u n, u k, u groups, u group_m, const int* starts, const int* ends, int masked,
                        u grid, u* tiles, int room) {
    const SchedulerArgs args{m, n, k, groups, group_m, starts, ends, masked != 0};
    if (kind == 0) return list_tiles<Config<1, 1, 1, false>>(args, grid, tiles, room);
    if (kind == 1) return list_tiles<Config<1, 1, 2, false>>(args, grid, tiles, room);
    if (kind == 2) return list_tiles<Config<1, 2, 1, false>>(args, grid, tiles, room);
    if (kind == 3) return list_tiles<Config<2, 1, 1, false>>(args, grid, tiles, room);
    if (kind == 4) return list_tiles<Config<2, 1, 1, true>>(args, grid, tiles, room);
    if (kind == 5) return list_tiles<Config<0, 1, 1, false, 3>>(args, grid, tiles, room);
    return list_tiles<Config<0, 2, 1, false, 3>>(args, grid, tiles, room);
}
"""
BLOCK_M, BLOCK_N, BLOCK_K = 64, 32, 64

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def tiles_of(tmp_path_factory):
    """tiles_of(kind, m, n, k, ends, ...): tuples as `list_tiles` writes them."""
    folder = tmp_path_factory.mktemp("tiles")
    source, library = folder / "tiles.cpp", folder / "tiles.so"
    source.write_text(HOST)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{INCLUDE}", source, "-o", library]
    subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).tiles_of

    def numbers(values):
        return None if values is None else (ctypes.c_int * len(values))(*values)

    def tiles(kind, m, n, k, ends, starts=None, masked=False, grid=6, group_m=4, room=50000):
        found = (ctypes.c_uint * (10 * room))()
        count = run(kind, m, n, k, len(ends), group_m, numbers(starts), numbers(ends), masked, grid, found, room)
        assert count < room
        return [tuple(found[10 * i : 10 * i + 10]) for i in range(count)]

    return tiles


def spans(ends, limit, starts=None, masked=False):
    """[(first, end)] of the groups, as the kernels' documentation has it."""
    starts = starts or ([0] * len(ends) if masked else [0, *ends[:-1]])
    firsts = [min(max(start, 0), limit) for start in starts]
    return [(first, min(max(end, first), limit)) for first, end in zip(firsts, ends, strict=True)]


GROUPS = [
    pytest.param([500], id="one"),
    pytest.param([1, 64, 65, 129, 129, 400, 500], id="tight and ragged"),
    pytest.param([0, 0, 500, 500, 500], id="all in one of several"),
    pytest.param([0, 0], id="all empty"),
    pytest.param(sorted(i * 37 % 501 for i in range(127)), id="127"),
    pytest.param(sorted(i * 37 % 501 for i in range(129)), id="129: two groups an entry of the table"),
    pytest.param(sorted(i * 37 % 501 for i in range(1000)), id="1000"),
    pytest.param([0] * 300 + [500] * 300, id="a step amid 600"),
    pytest.param([300, 100, 900, -7, 500], id="disorder"),
]


@pytest.mark.parametrize("ends", GROUPS)
@pytest.mark.parametrize("cluster", ROWS)
@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_groups(tiles_of, ends, cluster, masked):
    rows, columns = 500, 100
    tiles = tiles_of(ROWS[cluster], rows, columns, 200, ends, masked=masked)
    groups = spans(ends, rows, masked=masked)
    covered = set()
    for row, column, a, b, d, row_end, k, steps, _, block in tiles:
        first, end = groups[b]
        assert a == d == (b if masked else 0)
        assert (row_end, k, steps) == (end, 0, 4)
        assert row >= first and (row - first) % BLOCK_M == 0 and column % BLOCK_N == 0
        assert cluster[0] == 1 or (row - first) // BLOCK_M % 2 == block % 2
        assert cluster[1] == 1 or column // BLOCK_N % 2 == block % 2
        if row < row_end and column < columns:
            assert (b, row, column) not in covered
            covered.add((b, row, column))
    wanted = {
        (g, row, column)
        for g, (first, end) in enumerate(groups)
        for row in range(first, end, BLOCK_M)
        for column in range(0, columns, BLOCK_N)
    }
    assert covered == wanted


def test_starts_may_leave_gaps(tiles_of):
    starts, ends = [300, 3, -5, 450], [390, 200, 2, 700]
    tiles = tiles_of(ROWS[1, 1], 500, 32, 64, ends, starts)
    assert sorted((t[3], t[0], t[5]) for t in tiles) == [
        *((0, row, 390) for row in (300, 364)),
        *((1, row, 200) for row in (3, 67, 131, 195)),
        (2, 0, 2),
        (3, 450, 500),
    ]


@pytest.mark.parametrize("cluster", ROWS)
def test_the_blocks_of_a_cluster_take_tiles_together(tiles_of, cluster):
    """They share a stage: same group, same K, as many tiles."""
    tiles = tiles_of(ROWS[cluster], 500, 100, 200, [77, 78, 300, 500])
    size = cluster[0] * cluster[1]
    of_block = {}
    for tile in tiles:
        of_block.setdefault(tile[9], []).append(tile)
    for block, own in of_block.items():
        leader = of_block[block - block % size]
        assert [(t[3], t[6], t[7]) for t in own] == [(t[3], t[6], t[7]) for t in leader]


@pytest.mark.parametrize("ends", GROUPS)
@pytest.mark.parametrize("into", [False, True])
def test_groups_along_k(tiles_of, ends, into):
    """What is added to needs no tile of an empty group; what is written does."""
    rows, columns, depth = 130, 70, 500
    tiles = tiles_of(DEPTH[into], rows, columns, depth, ends)
    groups = spans(ends, depth)
    seen = set()
    for row, column, a, b, d, row_end, k, steps, tail, _ in tiles:
        first, end = groups[d]
        assert (a, b, row_end) == (0, 0, rows)
        assert steps == -(-(end - first) // BLOCK_K)
        assert steps == 0 or (k == first and tail == end - first - (steps - 1) * BLOCK_K)
        assert (d, row, column) not in seen
        seen.add((d, row, column))
    some = [g for g, (first, end) in enumerate(groups) if first < end or not into]
    assert seen == {(g, r, c) for g in some for r in range(0, rows, BLOCK_M) for c in range(0, columns, BLOCK_N)}


@pytest.mark.parametrize("share", SPLIT)
@pytest.mark.parametrize("steps", [3, 4, 7, 8])
def test_blocks_of_a_split_take_the_steps_of_a_tile_once(tiles_of, share, steps):
    rows, columns, parts, batches = 200, 70, 3, 2
    size = share * parts
    tiles = tiles_of(SPLIT[share], rows, columns, steps * BLOCK_K - 8, [0] * batches, grid=2 * size)
    seen = {}
    for row, column, a, b, d, row_end, k, own, _, block in tiles:
        assert a == b == d and row_end == rows and own > 0 and k % BLOCK_K == 0
        assert share == 1 or row // BLOCK_M % 2 == block % 2
        seen.setdefault((d, row, column), {})[block % size // share] = range(k // BLOCK_K, k // BLOCK_K + own)
    for ranges in seen.values():
        assert [step for part in range(parts) for step in ranges[part]] == list(range(steps))
    inside = {where for where in seen if where[1] < rows}
    starts = range(0, rows, BLOCK_M), range(0, columns, BLOCK_N)
    assert inside == {(d, row, column) for d in range(batches) for row in starts[0] for column in starts[1]}
