// q = e4m3(x / scale) with one scale, max(max |x|, 1e-4) / 448, of x: what the chip holds of x is read once.
//
// A block takes consecutive rows of kThreads vectors of 16 bytes, and passes over them twice, once for the maximum and once
// for the cast.  Between the passes it keeps kRegisterRows of them in registers and kSharedRows in shared memory.  The rows
// before these are read again, the last ones first, which the L2 still has.
//
// Blocks meet between the passes: each raises `largest` and counts itself, and waits until all have; so all must run at once.
// cast_prepare, the launch before, sets both to 0.  x is older than both launches, so this one reads it before the first ends.
//
// Config: kThreads, kRegisterRows, kSharedRows; Element.
#pragma once

#include <tilewright/copies.cuh>

namespace tilewright {

// Where the blocks meet.
struct Meeting {
    u32 largest;  // magnitude, the bits of a float32
    int arrived;  // blocks
};

template <typename Config> __global__ void cast_prepare(Meeting* meeting) {
    griddepcontrol_wait();
    launch_dependents();
    *meeting = {};
}

struct alignas(16) Vector { u32 words[4]; };

// What the L2 does with what it is asked for: drop it first, or as usual.
__device__ inline u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline u64 evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Loads what no other thread of the multiprocessor reads.
__device__ inline Vector load_vector(const Vector* from, u64 policy) {
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
                 : "l"(from), "l"(policy));
    return v;
}

__device__ inline void bulk_load(void* to, const void* from, u32 bytes, Barrier& full, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(full.address()), "l"(policy)
        : "memory");
}

// Raises the largest magnitude to `own`, and counts this block: who sees the count sees the magnitude.
__device__ inline void raise_and_arrive(Meeting* meeting, u32 own) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(&meeting->largest), "r"(own) : "memory");
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(&meeting->arrived) : "memory");
}
__device__ inline u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// Elements of 16 or 32 bits in the words of vectors.
template <typename Element> struct Words {
    static constexpr bool kPairs = sizeof(Element) == 2;

    // Magnitudes are compared as integers, so that a NaN is the largest.
    __device__ static u32 larger(u32 largest, u32 word) {
        if constexpr (!kPairs) return max(largest, word & 0x7FFFFFFF);
        u32 result;
        asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(largest), "r"(word & 0x7FFF7FFF));
        return result;
    }
    // The bits of the largest magnitude, in float32.
    __device__ static u32 magnitude(u32 largest) {
        if constexpr (!kPairs) return largest;
        return __float_as_uint(to_float(Element{u16(max(largest & 0xFFFF, largest >> 16))}));
    }
    __device__ static void halves(u32 word, float& low, float& high) {
        if constexpr (Same<Element, bfloat16>::value) {
            low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xFFFF0000);
        } else {
            low = to_float(Element{u16(word)}), high = to_float(Element{u16(word >> 16)});
        }
    }
    // Stores the codes of a vector as vector number `index` of q.
    __device__ static void store(u8* q, i64 index, const Vector& v, float factor, u64 policy) {
        if constexpr (kPairs) {
            struct alignas(8) Pair { u32 words[2]; } codes;
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                float f[4];
                halves(v.words[2 * i], f[0], f[1]), halves(v.words[2 * i + 1], f[2], f[3]);
                codes.words[i] = pack_e4m3(f[0] * factor, f[1] * factor) | u32(pack_e4m3(f[2] * factor, f[3] * factor)) << 16;
            }
            asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(reinterpret_cast<Pair*>(q) + index),
                         "r"(codes.words[0]), "r"(codes.words[1]), "l"(policy)
                         : "memory");
        } else {
            float f[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) f[i] = __uint_as_float(v.words[i]) * factor;
            const u32 codes = pack_e4m3(f[0], f[1]) | u32(pack_e4m3(f[2], f[3])) << 16;
            asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(reinterpret_cast<u32*>(q) + index), "r"(codes),
                         "l"(policy)
                         : "memory");
        }
    }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) per_tensor_cast(u8* q, float* scale, const Vector* x,
                                                                        Meeting* meeting, i64 vectors) {
    using W = Words<typename Config::Element>;
    constexpr u32 kThreads = Config::kThreads, kWarps = kThreads / 32;
    constexpr int kKept = Config::kRegisterRows, kShared = Config::kSharedRows;
    static_assert(kWarps <= 32, "one warp reduces the maxima of all");

    extern __shared__ __align__(128) u8 shared[];
    Vector* const shared_rows = reinterpret_cast<Vector*>(shared) + threadIdx.x;
    __shared__ Barrier full[kShared];
    __shared__ u32 warp_maxima[kWarps];

    // This block's rows: the last ones in shared memory, those before them in registers, and the first in neither
    const i64 all = vectors / kThreads, first = all * blockIdx.x / gridDim.x;
    const int rows = int(all * (blockIdx.x + 1) / gridDim.x - first);
    const int in_shared = min(max(rows - kKept, 0), kShared), before = rows - in_shared;
    const Vector* const from = x + first * kThreads + threadIdx.x;
    const i64 to = first * kThreads + threadIdx.x;  // in vectors of q
    // The vectors after the last whole row belong to the last block; the others have none
    const i64 rest = all * kThreads + threadIdx.x;
    const bool has_rest = blockIdx.x + 1 == gridDim.x && rest < vectors;

    // Copy the rows of shared memory
    if (threadIdx.x == 0) {
        for (int row = 0; row < in_shared; ++row) full[row].init(1);
        fence_barrier_init();
        for (int row = 0; row < in_shared; ++row) {
            full[row].arrive_and_expect_tx(kThreads * sizeof(Vector));
            bulk_load(shared_rows + row * kThreads, from + (before + row) * kThreads, kThreads * sizeof(Vector), full[row],
                      evict_first());
        }
    }

    // The maximum of the rows that pass through registers, a window of kKept rows after the other; the last one stays.  The
    // first window has only its last rows.
    const int windows = max((before + kKept - 1) / kKept, 1), start = before - windows * kKept;
    Vector kept[kKept];
    u32 largest[4] = {};
    const auto absorb = [&](const Vector& v) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) largest[j] = W::larger(largest[j], v.words[j]);
    };
    const auto fetch = [&](int window, int i, u64 policy) {
        kept[i] = load_vector(from + i64(start + window * kKept + i) * kThreads, policy);
    };
    const auto policy_of = [&](int window) { return window + 1 < windows ? evict_normal() : evict_first(); };
    const u64 first_policy = policy_of(0);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        if (start + i >= 0) fetch(0, i, first_policy);
    }
    for (int window = 1; window < windows; ++window) {
        const u64 policy = policy_of(window);
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            if (window > 1 || start + i >= 0) absorb(kept[i]);
            fetch(window, i, policy);
        }
    }
    if (has_rest) absorb(load_vector(x + rest, evict_normal()));
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        if (windows > 1 || start + i >= 0) absorb(kept[i]);
    }

    // The maximum of the rows in shared memory
    __syncthreads();  // the barriers are initialized
    for (int row = 0; row < in_shared; ++row) {
        full[row].wait(0);
        absorb(shared_rows[row * kThreads]);
    }

    // Meet the other blocks
    const u32 words = W::larger(W::larger(largest[0], largest[1]), W::larger(largest[2], largest[3]));
    const u32 of_warp = __reduce_max_sync(~0u, W::magnitude(words));
    if (lane_index() == 0) warp_maxima[threadIdx.x / 32] = of_warp;
    griddepcontrol_wait();
    launch_dependents();
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 own = __reduce_max_sync(~0u, lane_index() < kWarps ? warp_maxima[lane_index()] : 0);
        if (lane_index() == 0) {
            raise_and_arrive(meeting, own);
            while (load_acquire(&meeting->arrived) != int(gridDim.x)) {
            }
            warp_maxima[0] = load_relaxed(&meeting->largest);
        }
    }
    __syncthreads();
    const float unit = __uint_as_float(max(warp_maxima[0], __float_as_uint(1e-4f))) * (9586981 * 0x1p-32f);
    const float factor = 1.0f / unit;
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = unit;

    // Cast: registers, while the rows before them are fetched again; the rows before; shared memory.  Codes are the first
    // that the L2 drops, so that it keeps the rows that are read again
    const u64 drop = evict_first();
    for (int window = windows - 1; window >= 0; --window) {
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            const int row = start + window * kKept + i;
            if (row >= 0) W::store(q, to + i64(row) * kThreads, kept[i], factor, drop);
            if (row >= kKept) fetch(window - 1, i, drop);
        }
    }
#pragma unroll 2
    for (int row = 0; row < in_shared; ++row) {
        W::store(q, to + i64(before + row) * kThreads, shared_rows[row * kThreads], factor, drop);
    }
    if (has_rest) W::store(q, rest, load_vector(x + rest, drop), factor, drop);
}

}  // namespace tilewright
