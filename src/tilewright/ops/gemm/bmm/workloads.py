"""What the bench measures: the small products of many heads, and a few large ones of equal experts.

`params` of a row: B, M, N, K of D (B, M, N) = A (B, M, K) @ B (B, K, N), and the options of `matmul`'s rows.
"""

from tilewright.dispatch import Workload


def _row(name: str, b: int, m: int, n: int, k: int, layout: str) -> Workload:
    return Workload(name, {"B": b, "M": m, "N": n, "K": k, "layout": layout}, directions=("fwd",))


WORKLOADS = (
    # DeepSeek-V3's absorbed projections, 128 heads: queries to the latent (128 -> 512) and back to values
    _row("mla_absorb_m64", 128, 64, 512, 128, "nn"),
    _row("mla_absorb_m4096", 128, 4096, 512, 128, "nn"),
    _row("mla_values_m64", 128, 64, 128, 512, "nt"),
    _row("experts_m512", 8, 512, 4096, 7168, "nt"),
    _row("experts_m4096", 8, 4096, 4096, 7168, "nt"),
)
CPU_WORKLOADS = (_row("small", 4, 64, 128, 128, "nt"),)
