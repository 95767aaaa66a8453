// Vectors of 16 bytes: their elements as numbers that are compared, and their largest without unpacking.
#pragma once
#include <tilewright/copies.cuh>

#include "numbers.cuh"

namespace tilewright {

// What passes over a row compare.  float: logits, +inf as the largest number; NaN stays, and fails every comparison.
// int: keys in the order of numbers, where infinities are above all others, and NaN above these.
constexpr int kKeyOfNan = 0x7ffffffe;
template <typename Scalar> __device__ inline Scalar scalar_of(float x) {
    if constexpr (Same<Scalar, float>::value) {
        return min_nan(x, kLargest);
    } else {
        return x == x ? ordered(x) : kKeyOfNan;
    }
}
__device__ inline int key_of(float x) { return ordered(x); }
__device__ inline int key_of(int key) { return key; }
template <typename Scalar> __device__ inline Scalar scalar_at(int key) {
    if constexpr (Same<Scalar, float>::value) {
        return value_of(key);
    } else {
        return key;
    }
}
__device__ inline float larger_of(float a, float b) { return fmaxf(a, b); }
__device__ inline int larger_of(int a, int b) { return max(a, b); }
__device__ inline float lesser_of(float a, float b) { return fminf(a, b); }
__device__ inline int lesser_of(int a, int b) { return min(a, b); }

// The largest of several vectors, in little more than half an instruction an element of 16 bits.  As floats NaN is left out.
template <typename Element, typename Scalar = float> struct Largest {
    static constexpr bool kFloat = Same<Element, float>::value, kNan = !Same<Scalar, float>::value;
    u32 bits;  // one float, or a pair of 16-bit elements

    __device__ Largest() {
        if constexpr (kFloat) {
            bits = 0xff800000u;
        } else {
            bits = u32(minus_infinity<Element>().bits) * 0x10001u;
        }
    }
    __device__ explicit Largest(const Word4& w) : Largest() { take(w); }

    __device__ void take(const Word4& w) {
        if constexpr (kFloat) {
            float x = __uint_as_float(bits);
#pragma unroll
            for (u32 i = 0; i < 4; ++i) x = kNan ? max_nan(x, __uint_as_float(w.x[i])) : fmaxf(x, __uint_as_float(w.x[i]));
            bits = __float_as_uint(x);
        } else {
            const u32 a = max_pair<Element, kNan>(w.x[0], w.x[1]), b = max_pair<Element, kNan>(w.x[2], w.x[3]);
            bits = max_pair<Element, kNan>(bits, max_pair<Element, kNan>(a, b));
        }
    }

    __device__ Scalar scalar() const {
        if constexpr (kFloat) {
            return scalar_of<Scalar>(__uint_as_float(bits));
        } else {
            const float a = to_float(Element{u16(bits)}), b = to_float(Element{u16(bits >> 16)});
            return scalar_of<Scalar>(kNan ? max_nan(a, b) : fmaxf(a, b));
        }
    }
};

template <typename Element> __device__ inline float element_of(const Word4& w, u32 i) {
    if constexpr (Same<Element, float>::value) {
        return __uint_as_float(w.x[i]);
    } else {
        return to_float(Element{u16(w.x[i / 2] >> i % 2 * 16)});
    }
}

// The elements of one vector.
template <typename Element, typename Scalar = float> struct Vector {
    static constexpr u32 kWidth = 16 / sizeof(Element);
    Scalar x[kWidth];

    __device__ static Vector of(const Word4& w) {
        Vector made;
#pragma unroll
        for (u32 i = 0; i < kWidth; ++i) made.x[i] = scalar_of<Scalar>(element_of<Element>(w, i));
        return made;
    }
};

}  // namespace tilewright
