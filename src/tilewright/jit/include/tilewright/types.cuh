// Storage types and their conversions.
//
// NVRTC ships no headers (neither <cstdint> nor cuda_bf16.h), so this file includes none and converts in PTX.  A storage type
// holds bits and has no arithmetic; kernels compute in float.
#pragma once

namespace tilewright {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct bfloat16 { u16 bits; };
struct float16 { u16 bits; };
struct float8_e4m3 { u8 bits; };  // OCP e4m3: largest finite value 448, no infinity

template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ inline float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Packs two floats into two adjacent 16-bit elements, `low` at the lower address.  Rounds to nearest even.
template <typename T> __device__ inline u32 pack(float low, float high) {
    u32 packed;
    if constexpr (Same<T, bfloat16>::value) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        static_assert(Same<T, float16>::value, "two elements fill 32 bits: bfloat16 or float16");
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// Rounds four floats to adjacent e4m3, the first at the lowest address; beyond 448 saturates.
__device__ inline u32 pack_e4m3(float f0, float f1, float f2, float f3) {
    u32 packed;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(packed)
        : "f"(f0), "f"(f1), "f"(f2), "f"(f3));
    return packed;
}

// Packs two floats into two adjacent e4m3, `low` at the lower address.
__device__ inline u16 pack_e4m3(float low, float high) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

template <typename T> __device__ inline T from_float(float x) {
    if constexpr (Same<T, float>::value) {
        return x;
    } else {
        return T{u16(pack<T>(x, 0.0f))};
    }
}

// The larger of each of two adjacent elements; of a number and NaN the number, or with kNan NaN.
template <typename T, bool kNan = false> __device__ inline u32 max_pair(u32 a, u32 b) {
    static_assert(Same<T, bfloat16>::value || Same<T, float16>::value, "two elements fill 32 bits: bfloat16 or float16");
    u32 larger;
    if constexpr (Same<T, bfloat16>::value && kNan) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    if constexpr (Same<T, bfloat16>::value && !kNan) asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    if constexpr (Same<T, float16>::value && kNan) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    if constexpr (Same<T, float16>::value && !kNan) asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

template <typename T> __device__ inline T minus_infinity() {
    if constexpr (Same<T, float>::value) {
        return __uint_as_float(0xff800000u);
    } else {
        return T{u16(Same<T, bfloat16>::value ? 0xff80 : 0xfc00)};
    }
}

}  // namespace tilewright
