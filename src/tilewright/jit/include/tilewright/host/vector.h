// Vectors of float32 for CPU kernels, and their loads and stores for elements of any dtype.
//
// A kernel computes on F32, 2 kLanes elements in two registers, and rounds to nearest even when it stores.  The
// registers are GCC vectors, so one source compiles to AVX-512, AVX2, SSE2 or NEON, by -march only.
#pragma once

#include <stdint.h>

namespace tilewright {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kWidth = 2 * kLanes;

using Float = float __attribute__((vector_size(4 * kLanes)));
using Int = int32_t __attribute__((vector_size(4 * kLanes)));
using Bits = uint32_t __attribute__((vector_size(4 * kLanes)));

inline Float splat(float value) { return value - Float{}; }

// 2 kLanes elements in two registers; `Order` defines which element is in which.
struct F32 {
    Float a, b;
};

inline F32 operator+(F32 x, F32 y) { return {x.a + y.a, x.b + y.b}; }
inline F32 operator-(F32 x, F32 y) { return {x.a - y.a, x.b - y.b}; }
inline F32 operator*(F32 x, F32 y) { return {x.a * y.a, x.b * y.b}; }
inline F32 operator+(F32 x, float y) { return {x.a + y, x.b + y}; }
inline F32 operator-(F32 x, float y) { return {x.a - y, x.b - y}; }
inline F32 operator*(F32 x, float y) { return {x.a * y, x.b * y}; }

// Applies f to each register of the arguments.
template <class Function, class... Arguments>
inline F32 map(Function f, Arguments... x) {
    return {f(x.a...), f(x.b...)};
}

// The extent of a load or store: a whole F32, or the first `count` elements, of which the rest reads as zero and is not
// written.
struct Whole {};
struct Part {
    int count;
};

struct bf16 {
    uint16_t bits;
};

// An element type.  Two 16-bit elements share a 32-bit lane, the even one in the lower half, the odd one in the upper.  A
// 16-bit type has Float even(Bits), Float odd(Bits), Bits both(Float even, Float odd) and Float rounded(Float).
template <class T>
struct Element;

template <>
struct Element<float> {
    using Vector = Float;
};

template <>
struct Element<double> {
    using Vector = double __attribute__((vector_size(8 * kLanes)));
};

// Rounding keeps a NaN a NaN if its lower half is zero, as in every widened bf16 and in the NaN that arithmetic produces;
// `Order` canonicalises NaNs loaded as float32.
template <>
struct Element<bf16> {
    static Float even(Bits v) { return (Float)(v << 16); }
    static Float odd(Bits v) { return (Float)(v & 0xffff0000u); }
    static Bits both(Float even, Float odd) { return nearest(even) >> 16 | (nearest(odd) & 0xffff0000u); }
    static Float rounded(Float v) { return (Float)(nearest(v) & 0xffff0000u); }

   private:
    // Its upper half is the value rounded to nearest even
    static Bits nearest(Float v) { return (Bits)v + 0x7fffu + ((Bits)v >> 16 & 1u); }
};

template <class T, class... Ts>
constexpr bool any_half = sizeof(T) == 2 || any_half<Ts...>;
template <class T>
constexpr bool any_half<T> = sizeof(T) == 2;

// The assignment of elements to the registers of an F32, and the loads and stores that keep it: even elements in `a` and
// odd ones in `b`, or the first half in `a` and the second half in `b`.
template <bool kEvenOdd>
struct Order {
    template <class T>
    static F32 load(const T* from, Whole) {
        if constexpr (sizeof(T) == 2) {
            static_assert(kEvenOdd, "16-bit elements are held as even and odd ones");
            Bits v;
            __builtin_memcpy(&v, from, sizeof(v));
            return {Element<T>::even(v), Element<T>::odd(v)};
        } else {
            const Float first = straight(from), second = straight(from + kLanes);
            if constexpr (!kEvenOdd) return {first, second};
            Int even, odd;
            for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
            auto clean = [](Float v) { return v == v ? v : splat(__builtin_nanf("")); };
            return {clean(__builtin_shuffle(first, second, even)), clean(__builtin_shuffle(first, second, odd))};
        }
    }

    template <class T>
    static void store(T* to, F32 v, Whole) {
        if constexpr (sizeof(T) == 2) {
            const Bits both = Element<T>::both(v.a, v.b);
            __builtin_memcpy(to, &both, sizeof(both));
        } else {
            if constexpr (kEvenOdd) {
                Int low, high;
                for (int i = 0; i < kLanes; ++i) low[i] = i / 2 + i % 2 * kLanes, high[i] = low[i] + kLanes / 2;
                v = {__builtin_shuffle(v.a, v.b, low), __builtin_shuffle(v.a, v.b, high)};
            }
            straight(to, v.a);
            straight(to + kLanes, v.b);
        }
    }

    template <class T>
    static F32 load(const T* from, Part part) {
        T values[kWidth] = {};
        __builtin_memcpy(values, from, part.count * sizeof(T));
        return load(values, Whole{});
    }

    template <class T>
    static void store(T* to, F32 v, Part part) {
        T values[kWidth];
        store(values, v, Whole{});
        __builtin_memcpy(to, values, part.count * sizeof(T));
    }

    // Replaces all elements of `v` but [begin, end) by `other`.
    static F32 only(F32 v, int begin, int end, float other) {
        Int a, b;
        for (int i = 0; i < kLanes; ++i) a[i] = kEvenOdd ? 2 * i : i, b[i] = kEvenOdd ? 2 * i + 1 : kLanes + i;
        return {a >= begin & a < end ? v.a : splat(other), b >= begin & b < end ? v.b : splat(other)};
    }

   private:
    template <class T>
    static Float straight(const T* from) {
        typename Element<T>::Vector v;
        __builtin_memcpy(&v, from, sizeof(v));
        return __builtin_convertvector(v, Float);
    }
    template <class T>
    static void straight(T* to, Float v) {
        const auto converted = __builtin_convertvector(v, typename Element<T>::Vector);
        __builtin_memcpy(to, &converted, sizeof(converted));
    }
};

// The Order of a kernel over elements of types Ts: 16-bit elements are cheap to widen and narrow as even and odd ones.
template <class... Ts>
using RowOf = Order<any_half<Ts...>>;

// Rounds `v` to T and back, as a model does that stores a value and reads it again.
template <class T>
inline F32 rounded(F32 v) {
    if constexpr (sizeof(T) == 2) return map(Element<T>::rounded, v);
    return v;
}

}  // namespace tilewright
