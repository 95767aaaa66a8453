// y = factor * x + shift, one element a thread; `add` chooses whether shift counts.  Every kind of plain parameter.
#pragma once

#include <tilewright/types.cuh>

namespace tilewright {

template <typename Config>
__global__ void scale(const typename Config::Element* x, typename Config::Element* y, float factor, double shift,
                      bool add, int n, long long offset) {
    using Element = typename Config::Element;
    const i64 i = offset + blockIdx.x * Config::kThreads + threadIdx.x;
    if (i < n) y[i] = from_float<Element>(factor * to_float(x[i]) + (add ? float(shift) : 0.0f));
}

}  // namespace tilewright
