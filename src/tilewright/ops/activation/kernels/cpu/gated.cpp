// Gated activations, act(gate) * up: one pass, in blocks of a row that are divided among threads.
#include <tilewright/host/exponential.h>
#include <tilewright/host/parallel.h>
#include <tilewright/host/rows.h>

namespace tilewright {

constexpr int64_t kBlock = 4096;

// x * sigmoid(u), computed from e^-|u|, which cannot overflow.
template <bool kPrecise>
inline Float times_sigmoid(Float x, Float u) {
    const Float e = exp<kPrecise>((Float)((Bits)u | 0x80000000u));
    return (u < 0.0f ? x * e : x) / (1.0f + e);
}

struct silu {
    template <bool kPrecise>
    static Float act(Float g) {
        return times_sigmoid<kPrecise>(g, g);
    }
};

// (1 + tanh(z)) / 2 is sigmoid(2 z).
struct gelu_tanh {
    template <bool kPrecise>
    static Float act(Float g) {
        return times_sigmoid<kPrecise>(g, 1.5957691216057308f * (g + 0.044715f * g * g * g));
    }
};

// g times the normal distribution's cdf, which for -a <= 0 is e^(-a^2 / 2) q(t), t = 1 / (1 + 0.3 a), q a minimax
// polynomial with a relative error of 2^-28: the lower tail keeps its digits, which 1 + erf would cancel.
struct gelu {
    template <bool kPrecise>
    static Float act(Float g) {
        const Float a = (Float)((Bits)g & 0x7fffffffu), t = 1.0f / (1.0f + 0.3f * a);
        Float q = splat(-0.020628701895475388f);
        q = q * t + 0.1124650090932846f;
        q = q * t - 0.2282852828502655f;
        q = q * t + 0.19188395142555237f;
        q = q * t - 0.07950970530509949f;
        q = q * t + 0.0962052047252655f;
        q = q * t + 0.07837212830781937f;
        q = q * t + 0.11023936420679092f;
        q = q * t + 0.11957131326198578f;
        q = q * t + 0.11968671530485153f;
        const Float tail = exp<kPrecise>(-0.5f * a * a) * (q * t);
        return g * (g < 0.0f ? tail : 1.0f - tail);
    }
};

// T: dtype of gate, up and out.  Act: silu, gelu_tanh or gelu.  The data of up begin at up + up_offset.
template <class Config, class T = typename Config::T>
void gated(T* out, const T* gate, const T* up, int64_t m, int64_t n, int64_t stride_gate, int64_t stride_up,
           int64_t up_offset, int threads) {
    using Row = RowOf<T>;
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    parallel(m * blocks, m * n, threads, [=](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t row = task / blocks, start = task % blocks * kBlock;
            const T* g = gate + row * stride_gate + start;
            const T* u = up + row * stride_up + up_offset + start;
            T* y = out + row * n + start;
            sweep(n - start < kBlock ? n - start : kBlock, [=](int64_t i, auto extent) {
                // act(g) is rounded to the input's dtype before the product, as the models do
                const F32 a = rounded<T>(map(Config::Act::template act<sizeof(T) == 4>, Row::load(g + i, extent)));
                Row::store(y + i, a * Row::load(u + i, extent), extent);
            });
        }
    });
}

}  // namespace tilewright
