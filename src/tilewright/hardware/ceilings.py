"""Measured ceilings of a device: bandwidth, matrix rate, attention rate and launch cost, stored and interpolated.

`bench.calibrate` measures; this module stores the points in one JSON file per device and returns the least time of a
workload. Sizes between points are interpolated in log space, where times follow power laws; a stored point is returned
exactly. Beyond the largest point the last rate holds; below the smallest point its time is returned, a lower bound for
any launch.

Datasheet peaks are not used: sustained rates depend on power limit, clocks and library, and a floor must be reachable.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import InputError
from tilewright.hardware.device import device_info
from tilewright.log import log_once
from tilewright.settings import current

SCHEMA = 1

# Measured traffic mixes: the share of the bytes that are writes. Mixes in between are interpolated.
MIXES = {"read": 0.0, "read2_write1": 1 / 3, "read1_write1": 0.5, "write": 1.0}

Curve = list[list[float]]  # [[bytes in total, us], ...], both ascending


@dataclass(frozen=True)
class Ceilings:
    """Measured times of one device. Every curve and grid holds microseconds.

    bandwidth  mix -> curve over total bytes, cold cache
    matmul     dtype -> {"m": [...], "n": [...], "k": [...], "us": us[m][n][k]} for x (M, K) @ w (N, K)^T
    attention  dtype -> "causal"|"full" -> "D" -> curve over S; next to them the "batch" and "heads" of the curves
    launch_us  one small kernel launched eagerly, back to back; launch_graph_us: as a node of a CUDA graph, or None
    held_out   kind -> {"median_percent": error of predictions for shapes not on the grid, "shapes": how many}
    threads    of torch on a CPU; None for a GPU
    """

    device: str
    arch: str
    driver: str | None
    torch_version: str
    date: str
    tf32: bool
    bandwidth: dict[str, Curve]
    matmul: dict[str, dict[str, Any]]
    attention: dict[str, dict[str, Any]]
    launch_us: float
    launch_graph_us: float | None
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    quick: bool = False
    threads: int | None = None
    schema: int = SCHEMA

    def memory_us(self, bytes_read: float, bytes_written: float) -> float:
        """The least time to move these bytes with a cold cache, for their total and their read:write mix."""
        total = bytes_read + bytes_written
        if total <= 0:
            return 0.0
        return mix_between(
            {mix: interpolate(curve, total) for mix, curve in self.bandwidth.items()}, bytes_written / total
        )

    def matmul_us(self, m: int, n: int, k: int, dtype: torch.dtype | str) -> float:
        """Time of x (M, K) @ w (N, K)^T in `dtype` with the vendor library.

        Log-trilinear between measured shapes.
        """
        grid = _of_dtype(self.matmul, dtype, "matmul")
        corners: list[tuple[float, tuple[int, int, int]]] = [(1.0, (0, 0, 0))]
        excess = 1.0  # work beyond the largest shape, at the rate of the largest shape
        for axis, size in enumerate((m, n, k)):
            points = grid["mnk"[axis]]
            low, high, weight = _bracket(points, size)
            excess *= max(1.0, size / points[-1])
            corners = [
                (share * axis_share, _replaced(corner, axis, point))
                for share, corner in corners
                for axis_share, point in ((1 - weight, low), (weight, high))
                if axis_share > 0
            ]
        return excess * exp(sum(share * log(grid["us"][i][j][h]) for share, (i, j, h) in corners))

    def attention_us(
        self,
        batch: int,
        heads: int,
        s_q: int,
        s_kv: int,
        dim: int,
        dtype: torch.dtype | str,
        *,
        causal: bool,
        kv_heads: int | None = None,
    ) -> float:
        """Time of scaled_dot_product_attention; q (B, H, S_q, D), k and v (B, H_kv, S_kv, D).

        The measured rate at sqrt(S_q * S_kv) and the nearest D, or the time to move q, k, v and the output, whichever
        is longer.
        """
        measured = _of_dtype(self.attention, dtype, "attention")
        by_dim = measured["causal" if causal and s_q > 1 else "full"]
        nearest = min(by_dim, key=lambda measured_dim: abs(log(int(measured_dim) / dim)))
        length = (s_q * s_kv) ** 0.5
        work = batch * heads * dim / (measured["batch"] * measured["heads"] * int(nearest))
        compute = interpolate(by_dim[nearest], length, beyond=2) * work
        item = dtype_bytes(dtype)
        traffic = item * batch * dim * (heads * s_q + 2 * (kv_heads or heads) * s_kv)
        return max(compute, self.memory_us(traffic, item * batch * heads * s_q * dim))

    def to_json(self) -> str:
        """This object as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Ceilings:
        """Read what `to_json` wrote. Raises InputError for another schema version."""
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise InputError(
                f"ceilings file has schema {data.get('schema')!r}, this version reads {SCHEMA}: "
                "run `tilewright calibrate`"
            )
        return Ceilings(**data)


def interpolate(curve: Sequence[Sequence[float]], size: float, beyond: float = 1) -> float:
    """Microseconds at `size`, linear between points in log-log space.

    Above the last point they grow as size ** beyond, below the first they are constant.
    """
    sizes = [point[0] for point in curve]
    low, high, weight = _bracket(sizes, size)
    inside = exp((1 - weight) * log(curve[low][1]) + weight * log(curve[high][1]))
    return inside * float(max(1.0, size / sizes[-1]) ** beyond)


def mix_between(us: dict[str, float], written: float) -> float:
    """Microseconds if a share `written` of the bytes is writes; `us`: times of the measured mixes for as many bytes."""
    points = sorted((MIXES[mix], value) for mix, value in us.items())
    shares = [share for share, _ in points]
    index = bisect_left(shares, written - 1e-9)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (low, first), (high, second) = points[index - 1], points[index]
    weight = (written - low) / (high - low)
    return (1 - weight) * first + weight * second


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name without its module: "bfloat16" for torch.bfloat16 and for "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_bytes(dtype: torch.dtype | str) -> int:
    """Bytes of one element."""
    return int(getattr(torch, dtype_name(dtype)).itemsize)


def path_for(device: torch.device | str) -> Path:
    """The file with the ceilings of `device`; on a CPU there is one for each number of torch's threads."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", device_info(device).name).strip("-").lower()
    threads = f"-{torch.get_num_threads()}-threads" if torch.device(device).type == "cpu" else ""
    return current().cache_dir / "ceilings" / f"{name}{threads}.json"


def save(ceilings: Ceilings, device: torch.device | str) -> Path:
    """Write `ceilings` as those of `device`; returns the file."""
    path = path_for(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(ceilings.to_json())
    partial.replace(path)
    return path


def load(device: torch.device | str) -> Ceilings | None:
    """The ceilings measured on `device` with this driver and torch.

    None if there are none, or if they are from another set-up (logged).
    """
    path = path_for(device)
    if not path.exists():
        return None
    try:
        ceilings = Ceilings.from_json(path.read_text())
    except (InputError, ValueError, TypeError) as error:
        log_once(("ceilings", str(path)), f"{path} is not readable ({error}); run `tilewright calibrate`")
        return None
    setup = (device_info(device).name, driver_version(device), torch.__version__)
    if (ceilings.device, ceilings.driver, ceilings.torch_version) != setup:
        log_once(
            ("ceilings", str(path)),
            f"{path} was measured with driver {ceilings.driver}, torch {ceilings.torch_version}; "
            f"here are driver {setup[1]}, torch {setup[2]}: run `tilewright calibrate`",
        )
        return None
    return ceilings


def driver_version(device: torch.device | str) -> str | None:
    """Version of the GPU driver: from /proc if the kernel module is listed there, else its API version.

    None on a CPU.
    """
    if torch.device(device).type != "cuda":
        return None
    module = Path("/proc/driver/nvidia/version")
    if module.exists():
        match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", module.read_text())
        if match:
            return match.group(1)
    return f"api {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def _bracket(points: Sequence[float], value: float) -> tuple[int, int, float]:
    """The indices around `value` and its weight towards the upper one, in log space; clamped to the ends."""
    if value <= points[0]:
        return 0, 0, 0.0
    if value >= points[-1]:
        return len(points) - 1, len(points) - 1, 0.0
    high = bisect_left(points, value)
    if points[high] == value:
        return high, high, 0.0
    low = high - 1
    return low, high, (log(value) - log(points[low])) / (log(points[high]) - log(points[low]))


def _replaced(index: tuple[int, int, int], axis: int, value: int) -> tuple[int, int, int]:
    changed = list(index)
    changed[axis] = value
    return changed[0], changed[1], changed[2]


def _of_dtype(measured: dict[str, dict[str, Any]], dtype: torch.dtype | str, what: str) -> dict[str, Any]:
    name = dtype_name(dtype)
    if name not in measured:
        raise InputError(
            f"ceilings: no {what} was measured for {name}, only for {', '.join(measured)}; run `tilewright calibrate`"
        )
    return measured[name]
