"""What the bench measures: steps of a server, in which some sequences decode and one or two are prefilled in chunks.

Names: sequences that decode x their length + chunks x their tokens, H/H_kv x D.
"""

from collections.abc import Sequence
from typing import Any

from tilewright.dispatch import Workload


def row(decoding: Sequence[int], chunks: Sequence[tuple[int, int]], name: str, **more: Any) -> Workload:
    """decoding: lengths.   chunks: (new tokens, length) of each."""
    params = {
        "H": 32,
        "H_kv": 8,
        "D": 128,
        "page": 64,
        "new": (1,) * len(decoding) + tuple(new for new, _ in chunks),
        "lengths": (*decoding, *(length for _, length in chunks)),
        **more,
    }
    return Workload(f"{name}_{params['H']}/{params['H_kv']}x{params['D']}", params, directions=("fwd",))


WORKLOADS = (
    row((4096,) * 32, (), "32x4096"),
    row((4096,) * 31, ((512, 4096),), "31x4096+512"),
    row((2048,) * 64, ((2048, 2048), (1024, 8192)), "64x2048+2048+1024"),
    row((), ((8192, 8192),), "8192"),
    row((4096,) * 31, ((512, 4096),), "31x4096+512_page16", page=16),
)
CPU_WORKLOADS = (row((70, 33), ((40, 57),), "2+40", H=4, H_kv=2, D=64, page=16),)
