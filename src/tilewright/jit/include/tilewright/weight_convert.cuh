// Converts 8-bit and 4-bit integers to bfloat16 or float16, two at a time and exactly.
//
// Take a power of two 2^m whose unit in the last place is 1.  An unsigned integer u in the low bits of its mantissa makes it
// 2^m + u: one LOP3 masks and inserts, one subtraction removes 2^m.  bfloat16 has 2^m = 128 (0x4300) and room for 7 bits,
// float16 has 2^m = 1024 (0x6400) and room for 10.  A signed integer v has the bits of u = v + 8 (4-bit) or v + 128 (8-bit)
// with the sign bit flipped; the same LOP3 flips it back.
//
// A mask selects pairs whose elements are not adjacent in memory: of one 32-bit word
//     8 bits, elements 0..3    (0, 2), (1, 3)
//     4 bits, elements 0..7    (0, 4), (1, 5), (2, 6), (3, 7)      element 2 j in the low four bits of byte j
// `pair_low` and `pair_high` put the other operand's elements into the same order.  If that operand has many rows, it is
// cheaper to permute here: kAdjacent gives (0, 1), (2, 3), ... for one more instruction per four elements.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// x - y of packed pairs.  [sub.bf16x2: sm_90]
template <typename Element> __device__ inline u32 subtract_pairs(u32 x, u32 y) {
    u32 z;
    if constexpr (Same<Element, bfloat16>::value) asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    else asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// (x & mask) ^ bits in one instruction.  From C++ the compiler makes two, each with an immediate constant; here one constant
// stays in a register.  [lop3]
__device__ inline u32 mask_and_flip(u32 x, u32 mask, u32 bits) {
    u32 z;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(z) : "r"(x), "r"(mask), "r"(bits));
    return z;
}

template <typename Element> constexpr u32 kExponent = Same<Element, bfloat16>::value ? 0x43004300 : 0x64006400;

// Converts eight 4-bit integers to four pairs.
template <typename Element, bool kAdjacent> __device__ inline void convert_4bit(u32 word, u32 (&pairs)[4]) {
    constexpr u32 kZero = kExponent<Element> | 0x00080008;  // 2^m + 8
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        // Adjacent: the low four bits of byte i in the lower half, the high four in the upper half
        const u32 shifted = kAdjacent ? __byte_perm(word, word >> 4, 0x4400 + 0x1111 * i) : word >> 4 * i;
        pairs[i] = subtract_pairs<Element>(mask_and_flip(shifted, 0x000F000F, kZero), kZero);
    }
}

// Converts four 8-bit integers to two pairs.  bfloat16 has room for 7 bits only, so the sign bit is converted separately, to
// 128 or 256, and subtracted.
template <typename Element, bool kAdjacent> __device__ inline void convert_8bit(u32 word, u32 (&pairs)[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        // Adjacent: byte 2 i in the lower half, byte 2 i + 1 in the upper half
        const u32 shifted = kAdjacent ? __byte_perm(word, 0, 0x1100 + 0x2222 * i) : word >> 8 * i;
        if constexpr (Same<Element, bfloat16>::value) {
            const u32 low = mask_and_flip(shifted, 0x007F007F, kExponent<Element>);
            const u32 sign = mask_and_flip(shifted, 0x00800080, kExponent<Element>);
            pairs[i] = subtract_pairs<Element>(low, sign);
        } else {
            constexpr u32 kZero = kExponent<Element> | 0x00800080;  // 2^m + 128
            pairs[i] = subtract_pairs<Element>(mask_and_flip(shifted, 0x00FF00FF, kZero), kZero);
        }
    }
}

// The pair of the first elements of two pairs, and the pair of their second elements.
__device__ inline u32 pair_low(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
__device__ inline u32 pair_high(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }

}  // namespace tilewright
