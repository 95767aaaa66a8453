"""`dense_parts/split_k.cuh` compiled for the host, a thread for each of the GPU's: every result is written once and is
the sum of all parts in their order, while producers overwrite the rings as soon as barriers let them.

Barriers count as the hardware's do, and stop the process if more arrives than they wait for.
"""

import shutil
import subprocess

import pytest

from tilewright.jit.compilers import INCLUDE
from tilewright.ops.gemm.kernels.sm90 import dense_kernel

CLUSTER = r"""
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __restrict__
using std::min;
using std::max;
namespace tilewright {
using u8 = unsigned char; using u32 = unsigned; using u64 = unsigned long long; using i64 = long long;
struct Index { u32 x; };
inline thread_local Index threadIdx;
inline thread_local u32 block_of_thread;   // rank in the cluster
inline u8* memory[8];                      // shared memory of the blocks
constexpr u32 kMemory = 1 << 20;
inline std::mutex mutex;
inline std::condition_variable changed;
inline void stop(const char* why) { std::puts(why); std::fflush(stdout); std::_Exit(1); }

// A barrier of a warp
struct Warp { u32 arrived = 0, round = 0; float lanes[32]; };
inline Warp warps[8][16];
inline void __syncwarp() {
    std::unique_lock<std::mutex> lock(mutex);
    Warp& warp = warps[block_of_thread][threadIdx.x / 32];
    const u32 mine = warp.round;
    if (++warp.arrived == 32) warp.arrived = 0, ++warp.round, changed.notify_all();
    else changed.wait(lock, [&] { return warp.round != mine; });
}
inline float __shfl_xor_sync(u32, float value, u32 mask) {
    Warp& warp = warps[block_of_thread][threadIdx.x / 32];
    warp.lanes[threadIdx.x % 32] = value;
    __syncwarp();
    const float other = warp.lanes[(threadIdx.x ^ mask) % 32];
    __syncwarp();
    return other;
}
inline u32 lane_index() { return threadIdx.x % 32; }
inline u32 fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
inline u32 fragment_column() { return threadIdx.x % 4 * 2; }
inline u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - memory[block_of_thread]); }
inline u32 map_shared_rank(u32 address, u32 rank) { return address + rank * kMemory; }
inline void fence_proxy_async_shared() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}

struct Barrier {
    int expected, pending, bytes; u32 phase;
    void init(u32 arrivals) { expected = pending = int(arrivals), bytes = 0, phase = 0; }
    void step(int arrivals, int more) {  // under the lock
        pending -= arrivals, bytes += more;
        if (pending < 0) stop("more arrivals than expected");
        if (pending == 0 && bytes == 0) pending = expected, ++phase, changed.notify_all();
    }
    void arrive() { std::lock_guard<std::mutex> lock(mutex); step(1, 0); }
    void arrive_and_expect_tx(u32 count) { std::lock_guard<std::mutex> lock(mutex); step(1, int(count)); }
    void arrive_remote_after_reads(u32 rank) {
        std::lock_guard<std::mutex> lock(mutex);
        reinterpret_cast<Barrier*>(memory[rank] + address())->step(1, 0);
    }
    void wait(u32 parity) const {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return (phase & 1) != parity; });
    }
    u32 address() const { return shared_address(this); }
};
inline void wait_acquire_cluster(const Barrier& barrier, u32 parity) { barrier.wait(parity); }
inline void store_shared_remote(u32 to, u32 barrier, float a, float b, float c, float d) {
    const float values[4] = {a, b, c, d};
    std::lock_guard<std::mutex> lock(mutex);
    std::memcpy(memory[to / kMemory] + to % kMemory, values, 16);
    reinterpret_cast<Barrier*>(memory[barrier / kMemory] + barrier % kMemory)->step(0, -16);
}
}
"""

MAIN = r"""
#include <dense_parts/split_k.cuh>
#include <cmath>
using namespace tilewright;
constexpr u32 kSplit = SPLIT, kShare = SHARE, kWarpgroups = WARPGROUPS, kColumns = COLUMNS;
constexpr u32 kRows = 64 * kWarpgroups, kBlocks = kSplit * kShare, kTiles = 3, kM = ROWS, kN = WIDTH;
using Split = SplitK<kSplit, kShare, kWarpgroups, kColumns>;
struct Shared { Split::Barriers barriers; Barrier loaded; alignas(16) u8 ring[Split::kBytes]; };
static_assert(sizeof(Shared) <= kMemory);
// The pair shares rows of B: adjacent rows of tiles; a tile a column further on
static u32 first_row(u32 rank) { return rank % kShare * kRows; }
static float part_of(u32 range, u32 tile, u32 row, u32 column) {
    return std::ldexp(1.0f + float((row * 131 + column * 17 + tile * 7) % 1009), int(range * 5 + row % 7) % 19 - 9);
}
static int written[kTiles][kM][kN];

static void math(u32 rank, u32 thread) {
    block_of_thread = rank, threadIdx.x = thread;
    Shared& shared = *reinterpret_cast<Shared*>(memory[rank]);
    const u32 warpgroup = thread / 128, range = rank / kShare, row_0 = first_row(rank) + warpgroup * 64;
    Split split{shared.barriers, shared.ring, rank, warpgroup};
    for (u32 tile = 0; tile < kTiles; ++tile) {
        const u32 column_0 = tile * kColumns;
        const TilePart part = split.announce(row_0, column_0, kM, kN);
        shared.loaded.wait(tile & 1);
        if (thread % 61 == rank) std::this_thread::sleep_for(std::chrono::microseconds(50 * (rank + tile)));
        float acc[kColumns / 2];
        for (u32 i = 0; i < kColumns / 2; ++i) {
            acc[i] = part_of(range, tile, row_0 + fragment_row() + i / 2 % 2 * 8,
                             column_0 + i / 4 * 8 + fragment_column() + i % 2);
        }
        split.reduce(acc, part, [&](const float (&sum)[4], u32 row, u32 column) {
            for (u32 i = 0; i < 4; ++i) {
                const u32 r = row_0 + row, c = column_0 + column + i;
                if (r >= kM || c >= kN) continue;
                float wanted = part_of(0, tile, r, c);
                for (u32 s = 1; s < kSplit; ++s) wanted += part_of(s, tile, r, c);
                if (std::memcmp(&wanted, &sum[i], 4) != 0) stop("a sum is wrong");
                std::lock_guard<std::mutex> lock(mutex);
                ++written[tile][r][c];
            }
        });
    }
}

// Fills the rings of all blocks that share an operand with NaN, as copies of the next tile would, when it may.
static void produce(u32 rank) {
    block_of_thread = rank, threadIdx.x = 128 * kWarpgroups;
    Shared& shared = *reinterpret_cast<Shared*>(memory[rank]);
    for (u32 tile = 0; tile < kTiles; ++tile) {
        shared.barriers.read.wait(tile & 1 ^ 1);
        for (u32 i = 0; i < kShare; ++i) {
            std::lock_guard<std::mutex> lock(mutex);
            Shared& peer = *reinterpret_cast<Shared*>(memory[rank / kShare * kShare + i]);
            std::memset(peer.ring, 0xff, sizeof(peer.ring));
            peer.loaded.step(1, 0);
        }
    }
}

int main() {
    for (u32 rank = 0; rank < kBlocks; ++rank) {
        memory[rank] = static_cast<u8*>(std::aligned_alloc(1024, kMemory));
        block_of_thread = rank;
        Shared& shared = *reinterpret_cast<Shared*>(memory[rank]);
        shared.barriers.init(), shared.loaded.init(kShare);
    }
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < kBlocks; ++rank) {
        threads.emplace_back(produce, rank);
        for (u32 thread = 0; thread < 128 * kWarpgroups; ++thread) threads.emplace_back(math, rank, thread);
    }
    for (auto& thread : threads) thread.join();
    for (u32 tile = 0; tile < kTiles; ++tile)
        for (u32 r = 0; r < kM && r < kShare * kRows; ++r)
            for (u32 c = 0; c < kN; ++c)
                if (written[tile][r][c] != (c / kColumns == tile)) stop("a result is not written once");
    return 0;
}
"""

SHAPES = {  # parts, blocks that share, warpgroups, columns of a tile, rows and columns of D
    "two parts": (2, 1, 1, 32, 64, 96),
    "three parts of two warpgroups": (3, 1, 2, 48, 100, 140),
    "pairs": (2, 2, 1, 40, 90, 120),
    "pairs, one outside": (3, 2, 1, 24, 50, 68),
    "more parts than parcels": (5, 1, 1, 32, 33, 40),
}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_added_once_in_order_and_rings_stay_until_they_are_read(shape, tmp_path):
    (tmp_path / "tilewright").mkdir()
    (tmp_path / "few_rows_parts").mkdir()
    (tmp_path / "tilewright" / "cluster.cuh").write_text(CLUSTER)
    (tmp_path / "tilewright" / "epilogue.cuh").write_text("#pragma once\n")
    output = (
        "#pragma once\nnamespace tilewright { template <typename> struct Output { int columns; const float* bias; };\n"
    )
    stubs = "template <typename... A> void apply_epilogue(A&&...); float to_float(float); }\n"
    (tmp_path / "few_rows_parts" / "finish.cuh").write_text(output + stubs)
    (tmp_path / "main.cpp").write_text(MAIN)
    names = ("SPLIT", "SHARE", "WARPGROUPS", "COLUMNS", "ROWS", "WIDTH")
    defines = [f"-D{name}={value}" for name, value in zip(names, SHAPES[shape], strict=True)]
    sources = dense_kernel.KERNEL.file.parent
    program = tmp_path / "main"
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-w", f"-I{tmp_path}", f"-I{sources}", f"-I{INCLUDE}", *defines]
    subprocess.run([*command, tmp_path / "main.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
