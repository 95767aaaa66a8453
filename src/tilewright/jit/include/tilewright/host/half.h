// float16 elements (see vector.h): converted by the CPU's instructions if it has them, else by arithmetic on the bits.
// A separate file, because the intrinsics double the time to compile a kernel.
#pragma once

#include <tilewright/host/vector.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace tilewright {

struct half {
    uint16_t bits;
};

template <>
struct Element<half> {
    static Float even(Bits v) { return widen(v & 0xffffu); }
    static Float odd(Bits v) { return widen(v >> 16); }
    static Bits both(Float even, Float odd) { return narrow(even) | narrow(odd) << 16; }
    static Float rounded(Float v) { return widen(narrow(v)); }

   private:
#if defined(__F16C__)
    using Packed = uint16_t __attribute__((vector_size(2 * kLanes)));
#if defined(__AVX512F__)
    static Float widen(Bits v) { return (Float)_mm512_cvtph_ps((__m256i)__builtin_convertvector(v, Packed)); }
    static Bits narrow(Float v) { return __builtin_convertvector((Packed)_mm512_cvtps_ph((__m512)v, 0), Bits); }
#else
    static Float widen(Bits v) { return (Float)_mm256_cvtph_ps((__m128i)__builtin_convertvector(v, Packed)); }
    static Bits narrow(Float v) { return __builtin_convertvector((Packed)_mm256_cvtps_ph((__m256)v, 0), Bits); }
#endif
#else
    // Shift exponent and mantissa up by 13 bits; multiplying by 2^112 corrects the exponent's bias, for subnormals too.
    static Float widen(Bits v) {
        const Bits magnitude = (v & 0x7fffu) << 13;
        const Bits finite = (Bits)((Float)magnitude * 0x1p112f);
        const Bits result = magnitude < 0x7c00u << 13 ? finite : magnitude | 0x7f800000u;
        return (Float)(result | (v & 0x8000u) << 16);
    }
    // A normal result is the upper bits, rounded as in bf16.  A subnormal one is rounded by adding 1/2, whose unit in
    // the last place, 2^-24, is that of the result.
    static Bits narrow(Float v) {
        const Bits magnitude = (Bits)v & 0x7fffffffu;
        const Bits normal = (magnitude + (magnitude >> 13 & 1u) + (0xfffu - (112u << 23))) >> 13;
        const Bits subnormal = (Bits)((Float)magnitude + 0.5f) - 0x3f000000u;
        Bits result = magnitude < 0x38800000u ? subnormal : normal;
        result = magnitude < 0x477ff000u ? result : Bits{} + 0x7c00u;  // 65520 and more become infinity
        result = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : result;
        return result | ((Bits)v >> 16 & 0x8000u);
    }
#endif
};

}  // namespace tilewright
