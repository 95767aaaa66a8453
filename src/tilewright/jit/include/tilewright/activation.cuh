// Activation functions of a GEMM epilogue, computed in float.  All of them propagate NaN.
//
// gelu in its tanh form is z * sigmoid(2 u), since (1 + tanh u) / 2 = sigmoid(2 u): no cancellation where tanh is near -1.
// Exponentials and divisions are the hardware's approximations, about 1e-6 relative.
#pragma once

namespace tilewright {

enum class Activation : int { None, Relu, Gelu, Silu, Swiglu };  // order of tilewright.ops.gemm.operands.ACTIVATIONS

__device__ inline float sigmoid_times(float z, float x) { return __fdividef(z, 1.0f + __expf(-x)); }  // z * sigmoid(x)

// Swiglu is silu(gate) * up of two columns; this is its silu(gate), the caller multiplies by up.
template <Activation kActivation> __device__ inline float activate(float z) {
    if constexpr (kActivation == Activation::Relu) return z < 0.0f ? 0.0f : z;
    if constexpr (kActivation == Activation::Gelu) {
        constexpr float kTwiceRootTwoOverPi = 1.5957691216057308f;
        return sigmoid_times(z, kTwiceRootTwoOverPi * (z + 0.044715f * z * z * z));
    }
    if constexpr (kActivation == Activation::Silu || kActivation == Activation::Swiglu) return sigmoid_times(z, z);
    return z;
}

}  // namespace tilewright
