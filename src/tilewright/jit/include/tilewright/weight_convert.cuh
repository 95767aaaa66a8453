// Integers of 8 and 4 bits become 16-bit floating-point numbers, two at a time, exactly.
//
// The bits of a small unsigned integer, put into the low bits of the mantissa of a number 2^m whose last place is 1, make
// 2^m + u: one LOP3 masks and inserts, one subtraction takes the 2^m away.  For bfloat16 2^m is 128, 0x4300, with room for 7
// bits; for float16 1024, 0x6400, with room for 10.  A signed integer v is u = v + 8 (v + 128) with its sign bit flipped,
// which the same LOP3 does.
//
// In the order in which masks find them pairs are not neighbours in memory: from word w of
//     8 bits, elements 0..3    (0, 2), (1, 3)
//     4 bits, elements 0..7    (0, 4), (1, 5), (2, 6), (3, 7)      element 2 j in the low four bits of byte j
// `pair_low` and `pair_high` put the other operand's elements into the same order.  Where that operand has many rows it is
// cheaper to permute here: kNeighbours gives (0, 1), (2, 3), ... for one instruction more in four elements.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// x - y of two 16-bit numbers each.  [sub.bf16x2: sm_90]
template <typename Element> __device__ inline u32 subtract_pairs(u32 x, u32 y) {
    u32 z;
    if constexpr (Same<Element, bfloat16>::value) asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    else asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// (x & mask) ^ bits in one instruction.  Of C++ the compiler makes two, each with its constant inside; here one of the
// constants stays in a register.  [lop3]
__device__ inline u32 mask_and_flip(u32 x, u32 mask, u32 bits) {
    u32 z;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(z) : "r"(x), "r"(mask), "r"(bits));
    return z;
}

template <typename Element> constexpr u32 kInsert = Same<Element, bfloat16>::value ? 0x43004300 : 0x64006400;

// Eight 4-bit integers as four pairs.
template <typename Element, bool kNeighbours> __device__ inline void convert_4bit(u32 word, u32 (&pairs)[4]) {
    constexpr u32 kZero = kInsert<Element> | 0x00080008;  // 2^m + 8
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        // Neighbours: byte i below, its high four bits above
        const u32 spread = kNeighbours ? __byte_perm(word, word >> 4, 0x4400 + 0x1111 * i) : word >> 4 * i;
        pairs[i] = subtract_pairs<Element>(mask_and_flip(spread, 0x000F000F, kZero), kZero);
    }
}

// Four 8-bit integers as two pairs.  In bfloat16 the sign is a number of its own, 128 or 256, because 128 has room for 7
// bits alone.
template <typename Element, bool kNeighbours> __device__ inline void convert_8bit(u32 word, u32 (&pairs)[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        // Neighbours: byte 2 i below, byte 2 i + 1 above
        const u32 spread = kNeighbours ? __byte_perm(word, 0, 0x1100 + 0x2222 * i) : word >> 8 * i;
        if constexpr (Same<Element, bfloat16>::value) {
            const u32 low = mask_and_flip(spread, 0x007F007F, kInsert<Element>);
            const u32 sign = mask_and_flip(spread, 0x00800080, kInsert<Element>);
            pairs[i] = subtract_pairs<Element>(low, sign);
        } else {
            constexpr u32 kZero = kInsert<Element> | 0x00800080;  // 2^m + 128
            pairs[i] = subtract_pairs<Element>(mask_and_flip(spread, 0x00FF00FF, kZero), kZero);
        }
    }
}

// The first, and the second elements of two pairs, as a pair.
__device__ inline u32 pair_low(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
__device__ inline u32 pair_high(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }

}  // namespace tilewright
