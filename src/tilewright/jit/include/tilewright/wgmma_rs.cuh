// WGMMA with A in registers (RS): D (64 x N, float) += A (64 x K) * B (N x K)^T, B in shared memory, K = 32 bytes of elements.
// [PTX ISA: Asynchronous warpgroup level matrix instructions, wgmma.mma_async with A in registers]
//
//     wgmma_fence();                                       // after ordinary code wrote d or a
//     for (u32 k = 0; k < kBlockK / 16; ++k) wgmma_rs<kN, Element, Major::Mn>(d, a + 4 * k, b_k);
//     wgmma_commit();
//     wgmma_wait<0>(d);                                    // from here on d may be read and a written
//
// Thread t holds A(16 (t / 32) + t % 32 / 4 + 8 h, 8 j + 2 (t % 4) + e) in half e of a[2 j + h].  So two adjacent groups of
// eight columns of another product's D, rounded and packed in order, are a valid A.
//
// Of e4m3 it holds A(16 (t / 32) + t % 32 / 4 + 8 h, 16 j + 4 (t % 4) + e) in byte e of a[2 j + h].  Four columns of D in order,
// 8 i + 2 (t % 4) + {0, 1} of i = 2 j and 2 j + 1, are a valid A if B has its K in that order too (pack_e4m3).
#pragma once

#include <tilewright/wgmma.cuh>

namespace tilewright {

template <u32 kN> struct WgmmaRs {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma has N = 8, 16, ... 256");
};

#define TILEWRIGHT_WGMMA_ASM(TYPE, A0, A1, A2, A3, B, ACCUMULATE, MAJOR, TEXT, ...)                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned." TYPE " {" TEXT    \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1" MAJOR ";\n}\n"                        \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define TILEWRIGHT_WGMMA(N, A0, A1, A2, A3, B, TEXT, ...)                                                              \
    template <> struct WgmmaRs<N> {                                                                                    \
        template <typename Element, Major kB, bool kAccumulate>                                                        \
        __device__ static void multiply(float (&d)[N / 2], const u32* a, u64 b) {                                      \
            if constexpr (Same<Element, float8_e4m3>::value && kAccumulate) {                                          \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k32.f32.e4m3.e4m3", A0, A1, A2, A3, B, "1", "", TEXT, __VA_ARGS__);    \
            } else if constexpr (Same<Element, float8_e4m3>::value) {                                                  \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k32.f32.e4m3.e4m3", A0, A1, A2, A3, B, "0", "", TEXT, __VA_ARGS__);    \
            } else if constexpr (Same<Element, bfloat16>::value && kB == Major::K) {                                   \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.bf16.bf16", A0, A1, A2, A3, B, "1", ", 0", TEXT, __VA_ARGS__); \
            } else if constexpr (Same<Element, bfloat16>::value) {                                                     \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.bf16.bf16", A0, A1, A2, A3, B, "1", ", 1", TEXT, __VA_ARGS__); \
            } else if constexpr (kB == Major::K) {                                                                     \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.f16.f16", A0, A1, A2, A3, B, "1", ", 0", TEXT, __VA_ARGS__);   \
            } else {                                                                                                   \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.f16.f16", A0, A1, A2, A3, B, "1", ", 1", TEXT, __VA_ARGS__);   \
            }                                                                                                          \
        }                                                                                                              \
    };
TILEWRIGHT_FOR_EACH_N(TILEWRIGHT_WGMMA)
#undef TILEWRIGHT_WGMMA
#undef TILEWRIGHT_WGMMA_ASM

// kAccumulate false, of e4m3 alone: d is overwritten.
template <u32 kN, typename Element, Major kB = Major::K, bool kAccumulate = true>
__device__ inline void wgmma_rs(float (&d)[kN / 2], const u32* a, u64 b) {
    constexpr bool kBits16 = Same<Element, bfloat16>::value || Same<Element, float16>::value;
    static_assert(kBits16 || Same<Element, float8_e4m3>::value, "elements are bfloat16, float16 or float8_e4m3");
    static_assert(kBits16 || kB == Major::K, "8-bit operands are K-major");
    static_assert(!kBits16 || kAccumulate, "a product of 16-bit elements is added to d");
    WgmmaRs<kN>::template multiply<Element, kB, kAccumulate>(d, a, b);
}

}  // namespace tilewright
