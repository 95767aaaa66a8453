"""Engines: the kernels of attention, one language a file, shared by the ops of this family.

    forward(o, lse, q, k, v, sinks, slopes, mask_data, program, left, right, scale, softcap, config)
    backward(dq, dk, dv, do, delta, q, k, v, lse, sinks, slopes, mask_data, program, left, right, scale, softcap,
             config)

q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v) with unit last strides; everything else is as the raw ops
in `fmha/raw.py` declare it.  `triton_delta` computes the delta of every backward and the gradient of the sinks.
The Triton engines also take a second pair of score operands, `pe`, for `mla`; `triton_head_sum` sums the gradient of a
key over the heads that share it.
Every engine is bitwise reproducible: floats are added in a fixed order.
"""
