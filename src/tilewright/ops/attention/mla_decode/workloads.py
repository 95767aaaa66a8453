"""What the bench measures: decoding steps of DeepSeek's models.  `params` as in `mla_decode.samples`.

Names: B x H x length x D, then what is particular.
"""

from collections.abc import Sequence
from typing import Any

from tilewright.dispatch import Workload


def row(lengths: Sequence[int], heads: int, end: str = "", **more: Any) -> Workload:
    """A decoding step of sequences of these lengths."""
    what = str(lengths[0]) if len(set(lengths)) == 1 else f"{sum(lengths)}tokens"
    params = {"H": heads, "D": 576, "d_v": 512, "lengths": tuple(lengths), "page": 64, **more}
    return Workload(f"{len(lengths)}x{heads}x{what}x576{end}", params, directions=("fwd",))


MIXED = tuple(128 << (b % 8) for b in range(64))
WORKLOADS = (
    row((4096,) * 128, 128),
    row((4096,) * 128, 16),
    row((8192,), 128),
    row((1024,) * 32, 128),
    row((4096,) * 128, 128, "_656bytes", cache="e4m3"),
    row((8192,), 128, "_656bytes", cache="e4m3"),
    row((4096,) * 64, 128, "_2tokens", S_q=2),
    row((4096,) * 64, 16, "_page1", page=1),
    row(MIXED, 128, "_mixed"),
    row((8192,) * 128, 128, "_656bytes_2tokens_top2048", cache="e4m3", S_q=2, topk=2048),
    row((8192,) * 64, 128, "_top2048", topk=2048),
)
CPU_WORKLOADS = (row((96, 33), 16, "_page16", page=16),)
