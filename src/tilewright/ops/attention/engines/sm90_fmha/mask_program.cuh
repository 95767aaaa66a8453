// A mask's program as a type, MaskBoth<MaskBand<0>, MaskDocument<2, false>>: compiled for its structure alone, its
// numbers are read from memory.  mask/program.py says what leaves mean and where their numbers lie,
// mask/cuda_program.py writes the type.
//
// Mask::see(data, position, keys): bit c of `row[h]` says whether the query at position + 8 h sees key c of `keys`.
// Positions and keys >= 0 may lie outside the sequence; whether a key lies below S_k is the caller's question.
//
// Leaf after leaf fills its bits, and operators join words: registers hold one leaf at a time, and loops over keys are
// short.
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
    // Bits of those before `end`.
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

struct NoProgram {};  // the mask is something that the kernel knows by itself

template <typename A, typename B> struct MaskBoth {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        return A::see(data, position, keys) & B::see(data, position, keys);
    }
};

template <typename A, typename B> struct MaskEither {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        return A::see(data, position, keys) | B::see(data, position, keys);
    }
};

template <typename A> struct MaskNot {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        return ~A::see(data, position, keys);
    }
};

// Leaves.  kAt: where the header lies.  Those whose keys are intervals need no loop.
template <u32 kAt> struct MaskBand {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        const i64 low = data.numbers[kAt], high = data.numbers[kAt + 1];
        const auto row = [&](int at) { return keys.before(at - low + 1) & ~keys.before(at - high); };
        return {{row(position), row(position + 8)}};
    }
};

// Of packed sequences: every query sees an interval, whose first key and end are in memory.
template <u32 kAt> struct MaskSequences {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        const int length = data.numbers[kAt], shift = data.numbers[kAt + 1];
        const int* const first = data.numbers + data.numbers[kAt + 2];
        const auto row = [&](int at) {
            const int query = at - shift;
            if (u32(query) >= u32(length)) return 0u;
            return keys.before(first[length + query]) & ~keys.before(first[query]);
        };
        return {{row(position), row(position + 8)}};
    }
};

// kStored: the number of keys is itself in memory, one for each batch where kByBatch.
template <u32 kAt, bool kStored, bool kByBatch> struct MaskPrefix {
    __device__ static MaskBits see(const MaskData& data, int, const MaskKeys& keys) {
        const int number = data.numbers[kAt];
        const u32 bits = keys.before(kStored ? data.numbers[number + (kByBatch ? data.batch : 0)] : number);
        return {{bits, bits}};
    }
};

template <u32 kAt> struct MaskGlobal {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        const int count = data.numbers[kAt];
        const u32 bits = keys.before(count);
        return {{position < count ? ~0u : bits, position + 8 < count ? ~0u : bits}};
    }
};

// Others: Row(data, position) reads what the keys of a query have in common, row.sees(key) decides one.
template <typename Row> __device__ inline MaskBits see_each(const MaskData& data, int position, const MaskKeys& keys) {
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

template <u32 kAt, bool kByBatch> struct MaskDocument {
    const int* numbers;
    int ids, length, own;

    __device__ MaskDocument(const MaskData& data, int position)
        : numbers(data.numbers), ids(numbers[kAt + 1]), length(numbers[kAt]), own(0) {
        if (kByBatch) ids += data.batch * length;
        if (u32(position) < u32(length)) {
            own = numbers[ids + position];
        } else {
            length = 0;  // sees nothing
        }
    }
    __device__ bool sees(int key) const { return key < length && numbers[ids + key] == own; }
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        return see_each<MaskDocument>(data, position, keys);
    }
};

// Keys that leave the remainder `rest` by `step`, which each of the two rows has of its own.  One division: the next key is
// 1 or 7 further.
__device__ inline MaskBits see_remainders(int step, int rest0, int rest8, const MaskKeys& keys) {
    const u32 one = 1 % step, seven = 7 % step;
    u32 left = keys.first % step;
    MaskBits bits{};
#pragma unroll 8
    for (u32 c = 0; c < keys.count; ++c) {
        bits.row[0] |= u32(left == u32(rest0)) << c;
        bits.row[1] |= u32(left == u32(rest8)) << c;
        left += c % 2 ? seven : one;
        left = min(left, left - u32(step));  // the difference wraps round to something large where it is negative
    }
    return bits;
}

template <u32 kAt> struct MaskDilated {
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        const int step = data.numbers[kAt];
        const auto rest = [&](int at) { return (at % step + step) % step; };  // positions may be negative
        return see_remainders(step, rest(position), rest(position + 8), keys);
    }
};

template <u32 kAt> struct MaskStrided {
    __device__ static MaskBits see(const MaskData& data, int, const MaskKeys& keys) {
        const int step = data.numbers[kAt];
        return see_remainders(step, step - 1, step - 1, keys);
    }
};

template <u32 kAt, bool kByBatch, bool kByHead> struct MaskBlock {
    const int* numbers;
    int size, columns, words;  // words: where those of the query's row of blocks begin

    __device__ MaskBlock(const MaskData& data, int position) : numbers(data.numbers) {
        const int* const header = numbers + kAt;
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
    __device__ static MaskBits see(const MaskData& data, int position, const MaskKeys& keys) {
        return see_each<MaskBlock>(data, position, keys);
    }
};

}  // namespace tilewright
