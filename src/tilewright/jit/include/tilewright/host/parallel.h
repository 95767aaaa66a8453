// Divides tasks among torch's OpenMP threads, a contiguous range each.
#pragma once

#include <stdint.h>

namespace tilewright {

constexpr int64_t kGrain = 32768;  // least elements per thread: waking one costs as much as about 10 us of work

// Calls body(begin, end) for disjoint ranges that cover [0, tasks).  With one thread the OpenMP runtime is not entered.
template <class Body>
inline void parallel(int64_t tasks, int64_t elements, int threads, Body body) {
    const int64_t useful = elements / kGrain < tasks ? elements / kGrain : tasks;
    if (threads > useful) threads = int(useful);
    if (threads <= 1) return body(int64_t(0), tasks);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; ++t) body(tasks * t / threads, tasks * (t + 1) / threads);
}

}  // namespace tilewright
