"""Pure memory traffic of a given size and read:write mix: the floor of memory-bound ops.

Movers of each mix are a torch op and, on a GPU with Triton, a streaming kernel with two block sizes; the fastest is the
ceiling. The streams are timed with the same rounds, rotation and graph as the op whose floor they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise

import torch

from tilewright.bench.rotation import rotate
from tilewright.bench.statistics import Samples
from tilewright.hardware.ceilings import MIXES, mix_between

_ITEM = 4  # int32: sums cannot become NaN, and every torch build moves it at full width
_ARRAYS = {"read": (1, 0), "read2_write1": (2, 1), "read1_write1": (1, 1), "write": (0, 1)}
_BLOCKS = (1024, 4096)
_ALIGN = 64  # elements; with a ragged length the streams could not use wide accesses

Call = Callable[[], object]


def stream_calls(mix: str, total_bytes: int, device: torch.device, *, sets: int) -> dict[str, Call]:
    """Callables by mover, each moving `total_bytes` in `mix`, rotating over `sets` buffers."""
    arrays = [_arrays(mix, total_bytes, device) for _ in range(sets)]
    calls = {"torch": rotate([_torch_mover(mix, *pair) for pair in arrays])}
    if device.type == "cuda" and find_spec("triton") is not None:
        for block in _BLOCKS:
            calls[f"triton{block}"] = rotate([_triton_mover(mix, *pair, block) for pair in arrays])
    return calls


def bracket(bytes_read: int, bytes_written: int) -> list[str]:
    """The one or two measured mixes around this one."""
    written = bytes_written / (bytes_read + bytes_written)
    shares = sorted(MIXES.items(), key=lambda item: item[1])
    for (low, low_share), (high, high_share) in pairwise(shares):
        if low_share <= written <= high_share:
            return [low] if written - low_share < 1e-2 else [high] if high_share - written < 1e-2 else [low, high]
    raise AssertionError(f"a share of {written} lies outside [0, 1]")


def floor_calls(bytes_read: int, bytes_written: int, device: torch.device, *, sets: int) -> dict[str, Call]:
    """Streams whose times `floor_us` turns into the floor of this traffic; names are "mix/mover"."""
    total = bytes_read + bytes_written
    return {
        f"{mix}/{mover}": call
        for mix in bracket(bytes_read, bytes_written)
        for mover, call in stream_calls(mix, total, device, sets=sets).items()
    }


def floor_us(timed: Mapping[str, Samples], bytes_read: int, bytes_written: int, *, shared: bool = False) -> float:
    """Floor in microseconds from the samples of `floor_calls`, interpolated between the mixes.

    Each mix counts with its fastest mover: by median, or, with `shared`, by fastest sample: other processes on the
    machine only add time, and the floor is the time without them.
    """
    fastest: dict[str, float] = {}
    for name, samples in timed.items():
        mix = name.split("/")[0]
        us = min(samples.us) if shared else samples.median
        fastest[mix] = min(us, fastest.get(mix, float("inf")))
    return mix_between(fastest, bytes_written / (bytes_read + bytes_written))


def _arrays(mix: str, total_bytes: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    reads, writes = _ARRAYS[mix]
    n = max(1, round(total_bytes / (_ITEM * (reads + writes) * _ALIGN))) * _ALIGN
    sources = [torch.randint(-9, 9, (n,), dtype=torch.int32, device=device) for _ in range(reads)]
    return sources, torch.empty(n if writes else 1 + n // min(_BLOCKS), dtype=torch.int32, device=device)


def _torch_mover(mix: str, sources: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
    if mix == "read":
        return lambda: torch.amax(sources[0])
    if mix == "write":
        return lambda: out.fill_(7)
    if mix == "read1_write1":
        return lambda: out.copy_(sources[0])
    return lambda: torch.add(sources[0], sources[1], out=out)


def _triton_mover(mix: str, sources: Sequence[torch.Tensor], out: torch.Tensor, block: int) -> Call:
    from tilewright.bench.stream_kernel import stream

    _, writes = _ARRAYS[mix]
    n = sources[0].numel() if sources else out.numel()
    inputs = list(sources)
    return lambda: stream(inputs, out, writes=writes, n=n, block=block)
