"""What the bench measures: decoding steps.  `params` as in `paged.samples`.

Names: B x H/H_kv x length x D, then what is particular.
"""

from collections.abc import Sequence
from typing import Any

from tilewright.dispatch import Workload
from tilewright.ops.attention.fmha_varlen.workloads import by_octaves


def row(lengths: Sequence[int], heads: int, kv_heads: int, end: str = "", **more: Any) -> Workload:
    """A decoding step of sequences of these lengths."""
    what = str(lengths[0]) if len(set(lengths)) == 1 else f"{sum(lengths)}tokens"
    name = f"{len(lengths)}x{heads}/{kv_heads}x{what}x{more.get('D', 128)}{end}"
    params = {"H": heads, "H_kv": kv_heads, "D": 128, "lengths": tuple(lengths), **more}
    return Workload(name, params, directions=("fwd",))


MIXED = by_octaves(65536)
OCTAVES = tuple(128 << b % 11 for b in range(64))  # to 128k
WORKLOADS = (
    row((8192,), 32, 8),
    *(row((length,), 32, 4) for length in (1024, 4096, 16384, 65536, 262144)),
    *(row((length,) * 2, 32, 8) for length in (512, 8192)),
    *(row((length,) * 4, 32, 8) for length in (1024, 32768)),
    row((2048,) * 8, 32, 8),
    row((32768,) * 8, 32, 32),
    row((8192,) * 16, 32, 8),
    *(row((512,) * batch, 32, 8) for batch in (16, 32, 64, 128)),
    row((4096,) * 32, 32, 8),
    row((4096,) * 64, 32, 8),
    row((4096,) * 64, 32, 8, "_e4m3", cache="e4m3"),
    row((8192,) * 128, 32, 8),
    row(OCTAVES, 32, 8, "_octaves_page16", page=16),
    row((sum(OCTAVES) // 64,) * 64, 32, 8, "_page16", page=16),
    row((4096,) * 32, 32, 8, "_page16", page=16),
    row((4096,) * 32, 32, 8, "_page64", page=64),
    row((4096,) * 32, 32, 8, "_page1", page=1),
    row((32768,), 32, 4, "_page64", page=64),
    row((131072,), 32, 4, "_page64", page=64),
    row((32768,) * 32, 8, 1, "_e4m3_page64", page=64, cache="e4m3"),
    row((16384,), 32, 4, "_e4m3_page64", page=64, cache="e4m3"),
    row(MIXED, 32, 8, "_mixed_page16", page=16),
    row((4096,) * 16, 32, 8, "_4tokens_page64", page=64, S_q=4),
    row((8192,) * 16, 64, 8, "_window128_sinks_page16", page=16, D=64, window=(128, 0), sinks=True),
)
CPU_WORKLOADS = (row((96, 33), 4, 2, "_page16", page=16, D=64),)
