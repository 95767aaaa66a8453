// Matrix instructions of a Hopper warpgroup: D (64 x N, float, in registers) += A (64 x K) * B (N x K)^T, both in
// shared memory, K = 32 bytes of elements.  [PTX ISA: Asynchronous warpgroup level matrix instructions]
//
//     float d[kN / 2];
//     wgmma_fence();
//     for (u32 k = 0; k < kBlockK; k += kWgmmaK<Element>)
//         wgmma<kN, Element>(d, a_k, b_k, accumulate);   // descriptors of this k; false: d need not be cleared
//     wgmma_commit();
//     wgmma_wait<0>(d);                                   // only now may d be read
//
// All 128 threads execute each line.  Thread t holds d[4 j + 2 h + e] = D(16 (t / 32) + t % 32 / 4 + 8 h,
// 8 j + 2 (t % 4) + e) for h, e in {0, 1}: see epilogue.cuh.
#pragma once

#include <tilewright/ptx.cuh>
#include <tilewright/wgmma_operands.cuh>

namespace tilewright {

constexpr u32 kWgmmaKBytes = 32;
template <typename Element> constexpr u32 kWgmmaK = kWgmmaKBytes / sizeof(Element);

enum class Major : int { K = 0, Mn = 1 };  // which index runs through consecutive elements; 8-bit elements know K only

// Descriptor of an operand in shared memory, as tma_load with a swizzle of kSpan bytes leaves it.
//
// Major::K: rows of kSpan bytes, of which eight form an atom; `stride` is from one atom of rows to the next, 8 * kSpan
// where they are packed; `leading` is not used.  The next 32 bytes of K begin at wgmma_advance(descriptor, 32).
// Major::Mn: atoms are kSpan bytes of M or N by 8 of K; `stride` from atom to atom along K, `leading` along M or N.
template <u32 kSpan> __device__ inline u64 wgmma_descriptor(const void* tile, u32 stride = 8 * kSpan, u32 leading = 0) {
    static_assert(kSpan == 32 || kSpan == 64 || kSpan == 128, "operands of wgmma are swizzled by 32, 64 or 128 bytes");
    constexpr u64 kMode = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
    return u64((shared_address(tile) & 0x3FFFF) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | kMode << 62;
}

__device__ inline u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Before the first wgmma, and again after ordinary code wrote accumulators.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kLeft committed groups run: what the groups before them read in shared memory may be overwritten.
template <u32 kLeft> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// The same, and `d` are the accumulators of groups that are over: naming them keeps the compiler from reading them earlier.
template <u32 kLeft, u32 kCount> __device__ inline void wgmma_wait(float (&d)[kCount]) {
    wgmma_wait<kLeft>();
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <u32 kN> struct Wgmma {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma has N = 8, 16, ... 256");
};

#define TILEWRIGHT_WGMMA_ASM(WHAT, OPERANDS, ACCUMULATE, MAJORS, TEXT, ...)                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned." WHAT " {" TEXT "}, " OPERANDS ", p, 1, 1" MAJORS ";\n}\n"             \
                 : __VA_ARGS__                                                                                         \
                 : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kA)), "n"(int(kB)))

#define TILEWRIGHT_WGMMA(N, A, B, P, TA, TB, TEXT, ...)                                                                \
    template <> struct Wgmma<N> {                                                                                      \
        template <typename Element, Major kA, Major kB>                                                                \
        __device__ static void multiply(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {                            \
            if constexpr (Same<Element, bfloat16>::value) {                                                            \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.bf16.bf16", "%" #A ", %" #B, "%" #P, ", %" #TA ", %" #TB,      \
                                     TEXT, __VA_ARGS__);                                                               \
            } else if constexpr (Same<Element, float16>::value) {                                                      \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.f16.f16", "%" #A ", %" #B, "%" #P, ", %" #TA ", %" #TB,        \
                                     TEXT, __VA_ARGS__);                                                               \
            } else {                                                                                                   \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k32.f32.e4m3.e4m3", "%" #A ", %" #B, "%" #P, "", TEXT, __VA_ARGS__);   \
            }                                                                                                          \
        }                                                                                                              \
    };
TILEWRIGHT_FOR_EACH_N(TILEWRIGHT_WGMMA)
#undef TILEWRIGHT_WGMMA
#undef TILEWRIGHT_WGMMA_ASM

template <u32 kN, typename Element, Major kA = Major::K, Major kB = Major::K>
__device__ inline void wgmma(float (&d)[kN / 2], u64 a, u64 b, bool accumulate) {
    constexpr bool kBits16 = Same<Element, bfloat16>::value || Same<Element, float16>::value;
    static_assert(kBits16 || Same<Element, float8_e4m3>::value, "elements are bfloat16, float16 or float8_e4m3");
    static_assert(kBits16 || (kA == Major::K && kB == Major::K), "8-bit operands run along K in shared memory");
    Wgmma<kN>::template multiply<Element, kA, kB>(d, a, b, accumulate);
}

}  // namespace tilewright
