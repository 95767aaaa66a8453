// A cluster on the host: every thread of the GPU is a fiber, which runs until it must wait for others.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

namespace tilewright {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

struct Index { u32 x; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Index thread, block;
    u32 rank;
    bool done = false;
};
struct Group { u32 arrived = 0, size = 0; u64 round = 0; };  // of threads that wait for each other
struct WarpState { Group group; u64 lanes[32]; };
constexpr u32 kMemory = 1 << 20;
struct BlockState { std::vector<u8> memory; Group group; std::vector<WarpState> warps; };

inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<BlockState> cluster;
inline Group all_blocks;
inline Fiber* current;
inline u64 steps_of_progress;
#define threadIdx (current->thread)
#define blockIdx (current->block)

[[noreturn]] inline void stop(const char* why) { std::puts(why), std::fflush(stdout), std::_Exit(1); }
inline BlockState& block() { return cluster[current->rank]; }
template <typename Ready> inline void wait_until(Ready ready) {
    while (!ready()) swapcontext(&current->context, &scheduler);
    ++steps_of_progress;
}
inline void arrive(Group& group) {
    if (++group.arrived == group.size) group.arrived = 0, ++group.round;
}
inline void meet(Group& group) {
    const u64 round = group.round;
    arrive(group);
    wait_until([&] { return group.round != round; });
}

// The language
inline void __syncthreads() { meet(block().group); }
template <typename T> inline T exchange_lanes(T value, u32 from) {
    WarpState& warp = block().warps[threadIdx.x / 32];
    std::memcpy(&warp.lanes[threadIdx.x % 32], &value, sizeof(T));
    meet(warp.group);
    T other;
    std::memcpy(&other, &warp.lanes[from % 32], sizeof(T));
    meet(warp.group);
    return other;
}
template <typename T> inline T __shfl_xor_sync(u32, T value, u32 mask) { return exchange_lanes(value, threadIdx.x ^ mask); }
template <typename T> inline T __shfl_sync(u32, T value, u32 lane) { return exchange_lanes(value, lane); }
template <typename T> inline T __shfl_up_sync(u32, T value, u32 step) {
    const u32 lane = threadIdx.x % 32;
    return exchange_lanes(value, lane >= step ? lane - step : lane);
}
template <typename T, typename Better> inline T reduce(T value, Better better) {
    for (u32 step = 16; step > 0; step /= 2) {
        const T other = __shfl_xor_sync(~0u, value, step);
        value = better(other, value) ? other : value;
    }
    return value;
}
inline int __reduce_max_sync(u32, int value) { return reduce(value, std::greater<int>()); }
inline int __reduce_min_sync(u32, int value) { return reduce(value, std::less<int>()); }
inline u32 __reduce_max_sync(u32, u32 value) { return reduce(value, std::greater<u32>()); }
inline u32 __reduce_min_sync(u32, u32 value) { return reduce(value, std::less<u32>()); }
inline u32 __reduce_add_sync(u32, u32 value) {
    for (u32 step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
inline u32 __ballot_sync(u32, bool vote) { return __reduce_add_sync(~0u, u32(vote) << threadIdx.x % 32); }
inline int __ffs(u32 x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
inline u32 atomicAdd(u32* at, u32 more) { return std::exchange(*at, *at + more); }
inline int __clzll(u64 x) { return std::countl_zero(x); }
inline u32 __popc(u32 x) { return std::popcount(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __ull2float_rn(u64 x) { return float(x); }

// Headers of the library
template <typename A, typename B> struct Same { static constexpr bool value = std::is_same_v<A, B>; };
struct bfloat16 { u16 bits; };
inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return std::bit_cast<float>(u32(x.bits) << 16); }
template <typename T> inline T minus_infinity() {
    if constexpr (std::is_same_v<T, float>) return -INFINITY;
    else return T{0xff80};
}
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
inline u32 multiply_high(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b); }
struct alignas(16) Word4 { u32 x[4]; };
inline Word4 load_once(const void* from) {
    Word4 made;
    return std::memcpy(&made, from, sizeof(made)), made;
}
template <typename T, bool kNan = false> inline u32 max_pair(u32 a, u32 b) {
    u32 made = 0;
    for (u32 shift = 0; shift < 32; shift += 16) {
        const float x = to_float(T{u16(a >> shift)}), y = to_float(T{u16(b >> shift)});
        const bool first = kNan ? std::isnan(x) || x >= y : std::isnan(y) || x >= y;
        made |= u32(u16((first ? a : b) >> shift)) << shift;
    }
    return made;
}
inline u8* dynamic_shared() { return block().memory.data(); }
inline u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - block().memory.data()); }
inline u32 map_shared_rank(u32 address, u32 rank) { return address + rank * kMemory; }
inline u32 cluster_rank() { return current->rank; }
inline u32 cluster_blocks() { return u32(cluster.size()); }
inline u32 warp_index() { return threadIdx.x / 32; }
inline u32 lane_index() { return threadIdx.x % 32; }
inline void fence_barrier_init() {}
inline void cluster_arrive_relaxed() { arrive(all_blocks); }
inline void cluster_wait() {
    wait_until([] { return all_blocks.round > 0; });
}
inline void griddepcontrol_wait() {}
inline void launch_dependents() {}

struct Barrier {
    int expected, pending, bytes;
    u32 phase;
    void init(u32 arrivals) { expected = pending = int(arrivals), bytes = 0, phase = 0; }
    void step(int arrivals, int more) {
        pending -= arrivals, bytes += more;
        if (pending < 0) stop("more arrivals than expected");
        if (pending == 0 && bytes == 0) pending = expected, ++phase;
    }
    void arrive_and_expect_tx(u32 count) { step(1, int(count)); }
    void wait(u32 parity) const {
        wait_until([&] { return (phase & 1) != parity; });
    }
    u32 address() const { return shared_address(this); }
};
inline void wait_acquire_cluster(const Barrier& barrier, u32 parity) { barrier.wait(parity); }
inline void store_shared_remote(u32 to, u32 barrier, u64 value) {
    std::memcpy(cluster[to / kMemory].memory.data() + to % kMemory, &value, 8);
    reinterpret_cast<Barrier*>(cluster[barrier / kMemory].memory.data() + barrier % kMemory)->step(0, -8);
}
inline void bulk_load(void* to, const void* from, u32 bytes, Barrier& barrier) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) stop("a copy is not aligned");
    std::memcpy(to, from, bytes);
    barrier.step(0, -int(bytes));
}

inline std::function<void()> kernel_of_fibers;
inline void run_fiber() {
    kernel_of_fibers();
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

// Runs one cluster of the grid.
inline void run_cluster(u32 index, u32 blocks, u32 threads, std::function<void()> kernel) {
    kernel_of_fibers = kernel;
    cluster.clear(), cluster.resize(blocks), fibers.clear();
    all_blocks = Group{0, blocks * threads, 0};
    for (u32 rank = 0; rank < blocks; ++rank) {
        cluster[rank].memory.assign(kMemory, 0xff);
        cluster[rank].group.size = threads;
        cluster[rank].warps.resize(threads / 32);
        for (WarpState& warp : cluster[rank].warps) warp.group.size = 32;
        for (u32 thread = 0; thread < threads; ++thread) {
            auto fiber = std::make_unique<Fiber>();
            fiber->stack.resize(1 << 16);
            fiber->thread.x = thread, fiber->block.x = index * blocks + rank, fiber->rank = rank;
            getcontext(&fiber->context);
            fiber->context.uc_stack.ss_sp = fiber->stack.data(), fiber->context.uc_stack.ss_size = fiber->stack.size();
            makecontext(&fiber->context, run_fiber, 0);
            fibers.push_back(std::move(fiber));
        }
    }
    for (;;) {
        const u64 before = steps_of_progress;
        bool alive = false;
        for (auto& fiber : fibers) {
            if (fiber->done) continue;
            current = fiber.get(), swapcontext(&scheduler, &current->context);
            steps_of_progress += fiber->done, alive |= !fiber->done;
        }
        if (!alive) return;
        if (steps_of_progress == before) stop("all threads wait");
    }
}
}  // namespace tilewright
