"""Engines: one GEMM in one language, shared by `matmul` (a batch of one) and `bmm`.

Every module here defines the same names, and the files `<op>/<backend>.py` register them:

    class Config(NamedTuple)                plain ints, bools, strs
    configure(bucket, dtype) -> Config      pure; bucket without batch: M, N, K, layout, aligned, out_bits, epilogue
    candidates(bucket, dtype) -> Configs    what the tuner may try, legal ones only
    CONFIGS                                 every config that `configure` can return, each compiled without a GPU
    why_not(a, b, bias, c, scale, alpha, activation, out_dtype) -> str | None   by bucket and dtypes alone
    gemm(d, a, b, bias, c, scale, alpha, activation, config) -> None

`gemm` writes d (B, M, N_out), contiguous along its last dimension, from a (B, M, K), b (B, K, N), bias (N,) or None,
c (B, M, N_out) of any row stride or None, scale None or one float32 on the device.  c may be d.  In float32:
z = alpha * scale * acc, z += bias, the activation, z += c, one rounding.

Every engine is bitwise reproducible without atomics on floats, correct for any M, N, K >= 1 under any of its configs
(so that batch invariance can demand one config for every M), and addresses with 64 bits.  The number of SMs and the
batch are run-time values.
"""
