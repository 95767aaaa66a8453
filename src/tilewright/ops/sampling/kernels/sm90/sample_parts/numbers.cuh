// The arithmetic of ops/sampling/numbers.py, bit for bit.
//
// A logit becomes an int key in its order; NaN counts as -inf, +inf as the largest number.  x >= value(key) in float is the
// same test as ordered(x) >= key for every key above kNothing, so passes over rows compare floats and need no keys.
#pragma once
#include <tilewright/ptx.cuh>

namespace tilewright {

constexpr int kNothing = -2139095041;  // the key of -inf
constexpr float kLargest = 3.4028234663852886e38f;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kFixed = 16777216.0f;  // 2^24
constexpr u64 kOne = 1ull << 40;       // the weight of the likeliest token

__device__ inline int ordered(float x) {
    const int bits = __float_as_int(x == 0.0f ? 0.0f : x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ inline float value_of(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

// 2^24 log2(e) / temperature.  The factor 2^24 is exact: a distance that it takes out of the subnormal numbers is below 1.
__device__ inline float steepness(float temperature) {
    return fminf(__fdiv_rn(kLog2e, temperature > 0.0f ? temperature : 1.0f), 1.2676506002282294e30f) * kFixed;
}

// The distance of x from the largest logit, in units of 2^-24 octaves of probability.
__device__ inline float distance(float x, float largest, float steep) { return __fmul_rn(__fsub_rn(largest, x), steep); }

__device__ inline u64 weight_at(float distance) {
    const u32 fixed = u32(fminf(distance, 63.0f * kFixed));  // 2^40 >> 41 is 0 already
    const u32 f = fixed << 8;
    u32 y = 472172u;
    y = 5486705u - multiply_high(f, y);
    y = 41155296u - multiply_high(f, y);
    y = 238337602u - multiply_high(f, y);
    y = 1031757278u - multiply_high(f, y);
    y = 2977044080u - multiply_high(f, y);
    const u64 mantissa = (1ull << 32) - multiply_high(f, y);
    return (mantissa << 8) >> (fixed >> 24);
}

// ceil(p * total), p < 1 rounded down to a multiple of 2^-24.
__device__ inline u64 share_of(u64 total, float p) {
    const float inside = p < 1.0f ? (p > 0.0f ? p : 0.0f) : 1.0f;
    const u64 parts = max(u64(inside * kFixed), u64(1));
    return (total >> 24) * parts + (((total & 0xffffff) * parts + 0xffffff) >> 24);
}

// The smallest weight that min_p leaves.
__device__ inline u64 least_of(float min_p) {
    return u64((min_p > 0.0f ? (min_p < 1.0f ? min_p : 1.0f) : 0.0f) * 1099511627776.0f);
}

// Distances from here on have weights below `least`, at most 2^40: those of at least n octaves are at most 2^(40 - n).
__device__ inline float cut_of(u64 least) { return float(__clzll(max(least, u64(1)) - 1) - 23) * kFixed; }

// 62 random bits.
struct Random { u32 high, low; };

// Those of (seed, position) in a stream: Philox 4x32 with 10 rounds.
__device__ inline Random random_of(u64 seed, u64 position, u32 stream) {
    u32 k0 = u32(seed), k1 = u32(seed >> 32), c0 = u32(position), c1 = u32(position >> 32), c2 = stream, c3 = 0;
    for (u32 round = 0; round < 10; ++round) {
        const u32 high_0 = __umulhi(0xD2511F53u, c0), low_0 = 0xD2511F53u * c0;
        const u32 high_2 = __umulhi(0xCD9E8D57u, c2), low_2 = 0xCD9E8D57u * c2;
        c0 = high_2 ^ c1 ^ k0, c1 = low_2, c2 = high_0 ^ c3 ^ k1, c3 = low_0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c0 >> 1, c1 >> 1};
}

// floor(r * total / 2^62), for total < 2^62.
__device__ inline u64 random_below(const Random& r, u64 total) {
    const u64 high = r.high, low = r.low, total_high = total >> 31, total_low = total & 0x7fffffff;
    return high * total_high + ((high * total_low + low * total_high + ((low * total_low) >> 31)) >> 31);
}

}  // namespace tilewright
