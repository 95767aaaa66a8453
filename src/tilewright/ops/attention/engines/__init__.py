"""Engines: the kernels of attention, one language a file, shared by the ops of this family.

    forward(o, lse, q, k, v, sinks, slopes, mask_data, program, left, right, scale, softcap, config)
    backward(dq, dk, dv, do, delta, q, k, v, lse, sinks, slopes, mask_data, program, left, right, scale, softcap,
             config)

q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v) with unit last strides; everything else is as the raw ops
in `fmha/raw.py` declare it.  `triton_delta` makes the delta that every backward takes, and the gradient of the sinks.
The Triton ones take a second pair of score operands too, `pe`, as `mla` has them; `triton_head_sum` adds up what the
heads give to the gradient of a key that they share.
Every engine is bitwise reproducible: no sums of floats in an order that may change.
"""
