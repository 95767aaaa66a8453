// e^x of float32 vectors for x <= 0, the only arguments that softmax and the activations have.
#pragma once

#include <tilewright/host/vector.h>

namespace tilewright {

// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite, 1980), then 2^n times a minimax polynomial in r, whose relative
// error is 2^-28 with kPrecise (for float32 results), else 2^-17 (for results rounded to a half type).
// e^-inf is 0, subnormal results are rounded once, NaN stays NaN.
template <bool kPrecise>
inline Float exp(Float x) {
    x = x < -150.0f ? splat(-150.0f) : x;  // below -104 the result is 0; an infinite x has no r
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; here it becomes the exponent of 2^(n + 100)
    const float kRound = 0x1.8p23f + 127.0f + 100.0f;
    const Float shifted = x * 1.4426950408889634f + kRound;
    const Float n = shifted - kRound;
    Float p, r;
    if constexpr (kPrecise) {
        r = (x - n * 0.693359375f) - n * -2.1219444005469057e-4f;  // the first product is exact
        p = splat(1.3814320554956794e-3f);
        p = p * r + 8.36885068565607e-3f;
        p = p * r + 4.1668400168418884e-2f;
        p = p * r + 0.1666651964187622f;
        p = p * r + 0.4999999403953552f;
    } else {
        r = x - n * 0.6931471805599453f;
        p = splat(4.12762314081192e-2f);
        p = p * r + 0.1675386130809784f;
        p = p * r + 0.5000515580177307f;
    }
    p = (p * r + 1.0f) * r + 1.0f;
    return p * (Float)((Bits)shifted << 23) * 0x1p-100f;
}

}  // namespace tilewright
