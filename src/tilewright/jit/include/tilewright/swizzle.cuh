// The TMA swizzle: the layout in shared memory of a box whose rows are kSpan bytes.
//
// Row r begins at r * kSpan, and its 16-byte chunks are permuted by XOR with bits of r, so that the same chunk of eight
// consecutive rows falls into eight different groups of banks.  The pattern is a function of the address, so tiles must
// begin at multiples of 8 * kSpan bytes.  [PTX ISA: Tensor swizzling modes]
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

// Swizzled offset of byte `offset` of a tile.  It is its own inverse.
template <u32 kSpan> __device__ constexpr u32 swizzle(u32 offset) {
    static_assert(kSpan == 0 || kSpan == 32 || kSpan == 64 || kSpan == 128, "the hardware swizzles 32, 64, 128 bytes");
    constexpr u32 kChunks = kSpan == 0 ? 0 : kSpan - 16;  // the bits of an offset that choose a chunk: 0x10, 0x30, 0x70
    return offset ^ ((offset >> 3) & kChunks);
}

}  // namespace tilewright
