// cross_entropy_in_place for the host: a cluster after another.
#include <fibers.h>

namespace tilewright {
template <typename T> inline u32 pack(float low, float high) {
    const auto round = [](float x) {
        u32 bits = __float_as_uint(x);
        if (std::isnan(x)) return u32(0x7fc0);
        bits += 0x7fff + (bits >> 16 & 1);
        return bits >> 16;
    };
    return round(low) | round(high) << 16;
}
}  // namespace tilewright

#include <cross_entropy_in_place.cuh>

using namespace tilewright;

template <typename T, typename I, bool smooth, bool mean, bool rows, bool given> struct Config {
    static constexpr int kThreads = THREADS, kVectors = VECTORS, kBlocks = 1;
    static constexpr bool kSmooth = smooth, kMean = mean, kRows = rows, kGiven = given;
    using Element = T;
    using Index = I;
};

struct Numbers {
    i64 stride, ignore_index;
    int rows, n, part, blocks;
    float smoothing, z_loss;
};

template <typename C> static void run(void** p, const Numbers& a) {
    for (int row = 0; row < a.rows; ++row) {
        run_cluster(row, a.blocks, THREADS, [&] {
            cross_entropy_in_place<C>((float*)p[0], (float*)p[1], (typename C::Element*)p[2], (typename C::Index*)p[3],
                                      (float*)p[4], (float*)p[5], a.stride, a.ignore_index, a.n, a.part, a.smoothing, a.z_loss);
        });
    }
}

extern "C" void mean_float32(void** p, const Numbers* a) { run<Config<float, i64, false, true, false, false>>(p, *a); }
extern "C" void mean_bfloat16(void** p, const Numbers* a) { run<Config<bfloat16, int, false, true, false, false>>(p, *a); }
extern "C" void rows_float32(void** p, const Numbers* a) { run<Config<float, int, true, false, true, true>>(p, *a); }
extern "C" void rows_bfloat16(void** p, const Numbers* a) { run<Config<bfloat16, i64, true, false, true, true>>(p, *a); }
