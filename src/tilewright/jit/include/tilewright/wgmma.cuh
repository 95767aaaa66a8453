// Matrix instructions of a Hopper warpgroup: D (64 x N, float, in registers) += A (64 x K) * B (N x K)^T, A and B in
// shared memory, K = 32 bytes of elements.  [PTX ISA: Asynchronous warpgroup level matrix instructions]
//
//     float d[kN / 2];
//     wgmma_fence();
//     for (u32 k = 0; k < kBlockK; k += kWgmmaK<Element>)
//         wgmma<kN, Element>(d, a_k, b_k, accumulate);   // descriptors of this k; accumulate = false overwrites d
//     wgmma_commit();
//     wgmma_wait<0>(d);                                   // d may be read from here on
//
// All 128 threads execute each line.  Thread t holds d[4 j + 2 h + e] = D(16 (t / 32) + t % 32 / 4 + 8 h,
// 8 j + 2 (t % 4) + e) for h, e in {0, 1}: see epilogue.cuh.
#pragma once

#include <tilewright/ptx.cuh>
#include <tilewright/wgmma_operands.cuh>

namespace tilewright {

constexpr u32 kWgmmaKBytes = 32;
template <typename Element> constexpr u32 kWgmmaK = kWgmmaKBytes / sizeof(Element);

enum class Major : int { K = 0, Mn = 1 };  // the contiguous index of an operand; 8-bit operands must be K-major

// Descriptor of an operand in shared memory, in the layout that tma_load writes with a swizzle of kSpan bytes.
//
// Major::K: rows of kSpan bytes, eight of which form an atom; `stride` is the bytes from one atom to the next, 8 * kSpan if
// packed; `leading` is unused.  The next 32 bytes of K begin at wgmma_advance(descriptor, 32).
// Major::Mn: an atom is kSpan bytes of M or N by 8 of K; `stride` is the bytes between atoms along K, `leading` along M or N.
template <u32 kSpan> __device__ inline u64 wgmma_descriptor(const void* tile, u32 stride = 8 * kSpan, u32 leading = 0) {
    static_assert(kSpan == 32 || kSpan == 64 || kSpan == 128, "operands of wgmma are swizzled by 32, 64 or 128 bytes");
    constexpr u64 kMode = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
    return u64((shared_address(tile) & 0x3FFFF) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | kMode << 62;
}

__device__ inline u64 wgmma_advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Required before the first wgmma, and again after other code wrote accumulators.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending committed groups are in flight; shared memory that earlier groups read may be overwritten.
template <u32 kPending> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same for accumulators `d` of completed groups: the asm operands keep the compiler from reading d earlier.
template <u32 kPending, u32 kCount> __device__ inline void wgmma_wait(float (&d)[kCount]) {
    wgmma_wait<kPending>();
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <u32 kN> struct Wgmma {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma has N = 8, 16, ..., 256");
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
    static_assert(kBits16 || (kA == Major::K && kB == Major::K), "8-bit operands are K-major");
    Wgmma<kN>::template multiply<Element, kA, kB>(d, a, b, accumulate);
}

}  // namespace tilewright
