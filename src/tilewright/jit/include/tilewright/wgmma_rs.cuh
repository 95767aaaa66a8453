// WGMMA with A in registers (RS): D (64 x N, float) += A (64 x 16, 16-bit elements) * B (N x 16)^T, B in shared memory.
// [PTX ISA: Asynchronous warpgroup level matrix instructions, wgmma.mma_async with A in registers]
//
//     wgmma_fence();                                       // after ordinary code wrote d or a
//     for (u32 k = 0; k < kBlockK / 16; ++k) wgmma_rs<kN, Element, Major::Mn>(d, a + 4 * k, b_k);
//     wgmma_commit();
//     wgmma_wait<0>(d);                                    // from here on d may be read and a written
//
// Thread t holds A(16 (t / 32) + t % 32 / 4 + 8 h, 8 j + 2 (t % 4) + e) in half e of a[2 j + h].  So two adjacent groups of
// eight columns of another product's D, rounded and packed in order, are a valid A.
#pragma once

#include <tilewright/wgmma.cuh>

namespace tilewright {

template <u32 kN> struct WgmmaRs {
    static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma has N = 8, 16, ... 256");
};

#define TILEWRIGHT_WGMMA_ASM(TYPE, A0, A1, A2, A3, B, MAJOR, TEXT, ...)                                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned." TYPE " {" TEXT                \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, " MAJOR ";\n}\n"                      \
                 : __VA_ARGS__                                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define TILEWRIGHT_WGMMA(N, A0, A1, A2, A3, B, TEXT, ...)                                                              \
    template <> struct WgmmaRs<N> {                                                                             \
        template <typename Element, Major kB>                                                                          \
        __device__ static void multiply(float (&d)[N / 2], const u32* a, u64 b) {                                      \
            if constexpr (Same<Element, bfloat16>::value && kB == Major::K) {                                          \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.bf16.bf16", A0, A1, A2, A3, B, "0", TEXT, __VA_ARGS__);        \
            } else if constexpr (Same<Element, bfloat16>::value) {                                                     \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.bf16.bf16", A0, A1, A2, A3, B, "1", TEXT, __VA_ARGS__);        \
            } else if constexpr (kB == Major::K) {                                                                     \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.f16.f16", A0, A1, A2, A3, B, "0", TEXT, __VA_ARGS__);          \
            } else {                                                                                                   \
                TILEWRIGHT_WGMMA_ASM("m64n" #N "k16.f32.f16.f16", A0, A1, A2, A3, B, "1", TEXT, __VA_ARGS__);          \
            }                                                                                                          \
        }                                                                                                              \
    };
TILEWRIGHT_FOR_EACH_N(TILEWRIGHT_WGMMA)
#undef TILEWRIGHT_WGMMA
#undef TILEWRIGHT_WGMMA_ASM

template <u32 kN, typename Element, Major kB = Major::K>
__device__ inline void wgmma_rs(float (&d)[kN / 2], const u32* a, u64 b) {
    static_assert(Same<Element, bfloat16>::value || Same<Element, float16>::value, "elements are bfloat16 or float16");
    WgmmaRs<kN>::template multiply<Element, kB>(d, a, b);
}

}  // namespace tilewright
