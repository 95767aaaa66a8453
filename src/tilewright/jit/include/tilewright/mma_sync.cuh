// The matrix instruction of one warp: D (16 x 8, float) += A (16 x 16) * B (16 x 8), all in registers.
//
// Both operands are in registers, so K may be permuted: a product is the same for any order of K that A and B share.  A
// thread can therefore hold consecutive elements of K, as one wide load brings them.  A WGMMA reads B from shared memory and
// fixes the order.  [PTX ISA: mma.m16n8k16]
//
// With g = lane / 4 and c = lane % 4, and K in the instruction's own order, a register holds the pair
//     a[0] A(g, 2c..2c+1)   a[1] A(g + 8, 2c..2c+1)   a[2] A(g, 2c+8..2c+9)   a[3] A(g + 8, 2c+8..2c+9)
//     b[0] B(2c..2c+1, g)   b[1] B(2c+8..2c+9, g)     and   d[2 h + e] = D(g + 8 h, 2c + e).
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

template <typename Element>
__device__ inline void mma_16x8x16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (Same<Element, bfloat16>::value) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        static_assert(Same<Element, float16>::value, "elements are bfloat16 or float16");
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// Loads four 8x8 matrices of 16-bit elements from shared memory.  Lane i gives the 16-byte aligned address of row i % 8 of
// matrix i / 8; m[j] of lane i is the pair (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1) of matrix j, or of its transpose.
// [ldmatrix]
__device__ inline void ldmatrix_x4(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void ldmatrix_x4_trans(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that the lanes hold as above.  [movmatrix]
__device__ inline u32 transpose_8x8(u32 m) {
    u32 t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(m));
    return t;
}

}  // namespace tilewright
