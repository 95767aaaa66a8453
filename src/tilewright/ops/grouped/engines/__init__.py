"""Engines: grouped products in one language each, shared by the ops of this family.

Each module has the names `Config`, `configure(bucket, dtype)`, `candidates(bucket, dtype)`, `CONFIGS` and
`why_not(*raw_args)` as those of `ops/gemm/engines`, with the buckets of `raw.py` and `k_grouped_matmul`, and one of

    rows:   gemm(d, a, b, scale_a, scale_b, starts, ends, activation, config) -> None
    along K: gemm(d, a, b, scale_a, scale_b, c, ends, config) -> None

Rows.   d (Ba, R, N_out), a (Ba, R, K), b (G, K, N), all by stride; scale_a (Ba, Mb, Kb) and scale_b (G, Nb, Kb) float32
or None; starts and ends (G,) int32 on the device, contiguous.  Rows starts[g] <= r < ends[g] of a[0] (Ba == 1), or of
a[g] (Ba == G), times b[g].  `starts` may be None: a group then begins where the previous one ends, or, if Ba == G, at
row 0.  A kernel may read any row of a, but writes only rows of the groups.

Along K.   d (G, M, N) = a[:, group g] @ b[group g, :] + c[g]; a (M, T), b (T, N) by stride, scales (M, T/128) and
(N, T/128) or None, c (G, M, N) of any strides or None; c may be d.  Group g is ends[g - 1] <= t < ends[g], the
first begins at 0.  Every element of d is written: an empty group is c, or zeros.

Kernels clamp starts and ends to 0..R (0..T); a group that ends before it begins is empty.  Offsets
are 64 bits wide, results bitwise reproducible, and G and the number of SMs run-time values.
"""
