// The kernels of ops/sampling/kernels/sm90 for the host: `<kernel>_<element>(pointers, numbers)`, a cluster after another.
#include <fibers.h>
#include <greedy.cuh>
#include <sample.cuh>
#include <top_k.cuh>
#include <top_k_short.cuh>

using namespace tilewright;

template <typename T, int kOffset> struct Config {
    static constexpr int kThreads = THREADS, kRowOffset = kOffset, kBest = 512, kWarps = THREADS / 32, kEach = 16;
    using Element = T;
};

struct Numbers {
    i64 stride;
    int rows, n, part, blocks, mode, k;
    float temperature, top_p, min_p;
};

template <typename T> static void run_sample(void** p, const Numbers& a) {
    for (int row = 0; row < a.rows; ++row) {
        run_cluster(row, a.blocks, THREADS, [&] {
            sample<Config<T, ROW_OFFSET>>((i64*)p[0], (float*)p[1], (T*)p[2], (i64*)p[3], (i64*)p[4], (float*)p[5], (int*)p[6],
                                          (float*)p[7], (float*)p[8], a.temperature, a.k, a.top_p, a.min_p, a.stride, a.n,
                                          a.part, a.mode);
        });
    }
}

template <typename T> static void run_greedy(void** p, const Numbers& a) {
    for (int row = 0; row < a.rows; ++row) {
        run_cluster(row, a.blocks, THREADS, [&] { greedy<Config<T, 0>>((i64*)p[0], (T*)p[1], a.stride, a.n, a.part); });
    }
}

template <typename T> static void run_top_k(void** p, const Numbers& a) {
    for (int row = 0; row < a.rows; ++row) {
        run_cluster(row, a.blocks, THREADS, [&] {
            top_k<Config<T, TOP_K_OFFSET>>((T*)p[0], (i64*)p[1], (T*)p[2], a.stride, a.n, a.k, a.part);
        });
    }
}

template <typename T> static void run_top_k_short(void** p, const Numbers& a) {
    for (int block = 0; block * THREADS / 32 < a.rows; ++block) {
        run_cluster(block, 1, THREADS, [&] {
            top_k_short<Config<T, 0>>((T*)p[0], (i64*)p[1], (T*)p[2], a.stride, a.rows, a.n, a.k);
        });
    }
}

#define BOTH(kernel)                                                                               \
    extern "C" void kernel##_float32(void** p, const Numbers* a) { run_##kernel<float>(p, *a); } \
    extern "C" void kernel##_bfloat16(void** p, const Numbers* a) { run_##kernel<bfloat16>(p, *a); }
BOTH(sample)
BOTH(greedy)
BOTH(top_k)
BOTH(top_k_short)
