// A mask program as a type, MaskBoth<MaskBand<0>, MaskDocument<2, false>>: the kernel is compiled for the structure, the
// numbers are read from memory.  mask/program.py defines the leaves and where their numbers lie; mask/cuda_program.py
// writes the type.
//
// Mask::visible(data, position, keys): bit c of `row[h]` says whether the query at position + 8 h sees key c of `keys`.
// Positions and keys >= 0 may lie outside the sequence; the caller masks keys from S_k on.
//
// Each leaf fills a word of bits per row, and operators combine words: one leaf at a time is in registers, and loops over
// keys are short.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

struct MaskData {
    const int* numbers;
    int batch, head;  // of the query
};

// Up to 32 columns of a thread's accumulators (epilogue.cuh): first, first + 1, first + 8, first + 9, first + 16, ...
struct MaskKeys {
    int first;
    u32 count;

    __device__ int operator[](u32 c) const { return first + int(c / 2 * 8 + c % 2); }
    // Bits of the keys before `end`.
    __device__ u32 before(i64 end) const {
        const u32 ahead = u32(min(max(end - first, i64(0)), i64(128))), bits = ahead / 8 * 2 + min(ahead % 8, 2u);
        return bits < 32 ? (1u << bits) - 1 : ~0u;
    }
};

struct MaskBits {
    u32 row[2];

    __device__ MaskBits operator&(const MaskBits& other) const {
        return {{row[0] & other.row[0], row[1] & other.row[1]}};
    }
    __device__ MaskBits operator|(const MaskBits& other) const {
        return {{row[0] | other.row[0], row[1] | other.row[1]}};
    }
    __device__ MaskBits operator~() const { return {{~row[0], ~row[1]}}; }
};

struct BandOnly {};  // no program: the kernel itself knows a band (causal, window, no mask)

template <typename A, typename B> struct MaskBoth {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        return A::visible(data, position, keys) & B::visible(data, position, keys);
    }
};

template <typename A, typename B> struct MaskEither {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        return A::visible(data, position, keys) | B::visible(data, position, keys);
    }
};

template <typename A> struct MaskNot {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        return ~A::visible(data, position, keys);
    }
};

// Leaves.  kHeader: index of the leaf's header in the numbers.  Leaves whose visible keys are an interval need no loop.
template <u32 kHeader> struct MaskBand {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        const i64 low = data.numbers[kHeader], high = data.numbers[kHeader + 1];
        const auto row = [&](int q) { return keys.before(q - low + 1) & ~keys.before(q - high); };
        return {{row(position), row(position + 8)}};
    }
};

// Packed sequences: each query sees an interval of keys, whose first key and end are in memory; kByBatch: other ones in each
// batch.
template <u32 kHeader, bool kByBatch> struct MaskSequences {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        const int length = data.numbers[kHeader], shift = data.numbers[kHeader + 1];
        const int* const first = data.numbers + data.numbers[kHeader + 2] + (kByBatch ? data.batch * 3 * length : 0);
        const auto row = [&](int q) {
            const int query = q - shift;
            if (u32(query) >= u32(length)) return 0u;
            return keys.before(first[length + query]) & ~keys.before(first[query]);
        };
        return {{row(position), row(position + 8)}};
    }
};

// The program is packed sequences and nothing else.
template <bool kByBatch> using PackedOnly = MaskSequences<0, kByBatch>;

// kStored: the header has the index of the prefix length instead of the length; kByBatch: one length per batch.
template <u32 kHeader, bool kStored, bool kByBatch> struct MaskPrefix {
    __device__ static MaskBits visible(const MaskData& data, int, const MaskKeys& keys) {
        const int number = data.numbers[kHeader];
        const u32 bits = keys.before(kStored ? data.numbers[number + (kByBatch ? data.batch : 0)] : number);
        return {{bits, bits}};
    }
};

template <u32 kHeader> struct MaskGlobal {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        const int count = data.numbers[kHeader];
        const u32 bits = keys.before(count);
        return {{position < count ? ~0u : bits, position + 8 < count ? ~0u : bits}};
    }
};

// Leaves without intervals: Row(data, position) reads what a query needs once, row.sees(key) decides for one key.
template <typename Row> __device__ inline MaskBits visible_each(const MaskData& data, int position, const MaskKeys& keys) {
    const Row rows[2] = {Row(data, position), Row(data, position + 8)};
    MaskBits bits{};
#pragma unroll 4
    for (u32 c = 0; c < keys.count; ++c) {
        const int key = keys[c];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) bits.row[h] |= u32(rows[h].sees(key)) << c;
    }
    return bits;
}

template <u32 kHeader, bool kByBatch> struct MaskDocument {
    const int* numbers;
    int ids, length, document;

    __device__ MaskDocument(const MaskData& data, int position)
        : numbers(data.numbers), ids(numbers[kHeader + 1]), length(numbers[kHeader]), document(0) {
        if (kByBatch) ids += data.batch * length;
        if (u32(position) < u32(length)) {
            document = numbers[ids + position];
        } else {
            length = 0;  // sees nothing
        }
    }
    __device__ bool sees(int key) const { return key < length && numbers[ids + key] == document; }
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        return visible_each<MaskDocument>(data, position, keys);
    }
};

// Keys with key % step equal to `remainder0` (row 0) or `remainder8` (row 1).  One division in all: the next key is 1 or 7
// further.
__device__ inline MaskBits visible_remainders(int step, int remainder0, int remainder8, const MaskKeys& keys) {
    const u32 one = 1 % step, seven = 7 % step;
    u32 remainder = keys.first % step;
    MaskBits bits{};
#pragma unroll 8
    for (u32 c = 0; c < keys.count; ++c) {
        bits.row[0] |= u32(remainder == u32(remainder0)) << c;
        bits.row[1] |= u32(remainder == u32(remainder8)) << c;
        remainder += c % 2 ? seven : one;
        remainder = min(remainder, remainder - u32(step));  // a negative difference wraps round to a large number
    }
    return bits;
}

template <u32 kHeader> struct MaskDilated {
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        const int step = data.numbers[kHeader];
        const auto remainder = [&](int q) { return (q % step + step) % step; };  // positions may be negative
        return visible_remainders(step, remainder(position), remainder(position + 8), keys);
    }
};

template <u32 kHeader> struct MaskStrided {
    __device__ static MaskBits visible(const MaskData& data, int, const MaskKeys& keys) {
        const int step = data.numbers[kHeader];
        return visible_remainders(step, step - 1, step - 1, keys);
    }
};

template <u32 kHeader, bool kByBatch, bool kByHead> struct MaskBlock {
    const int* numbers;
    int size, columns, words;  // words: index of the first word of the query's row of blocks

    __device__ MaskBlock(const MaskData& data, int position) : numbers(data.numbers) {
        const int* const header = numbers + kHeader;
        const int row = position / header[0], rows = header[2];
        size = header[1], columns = header[3];
        const int table = (kByBatch ? data.batch * header[4] : 0) + (kByHead ? data.head : 0);
        words = header[5] + (table * rows + row) * ((columns + 31) / 32);
        if (position < 0 || row >= rows) columns = 0;  // sees nothing
    }
    __device__ bool sees(int key) const {
        const int column = key / size;
        return column < columns && (numbers[words + column / 32] >> column % 32 & 1);
    }
    __device__ static MaskBits visible(const MaskData& data, int position, const MaskKeys& keys) {
        return visible_each<MaskBlock>(data, position, keys);
    }
};

}  // namespace tilewright
