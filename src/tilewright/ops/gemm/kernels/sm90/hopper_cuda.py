"""The two CUDA C++ engines as one backend: a memory-bound kernel for few rows of A, a tiled one for more."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.ops.gemm.kernels.sm90 import dense as dense_cuda
from tilewright.ops.gemm.kernels.sm90 import few_rows as few_rows_cuda

_ENGINES = {"dense": dense_cuda, "few_rows": few_rows_cuda}
_A_ALONG_K = (0, 1)  # the layouts nt and nn


class Config(NamedTuple):
    """The engine and its configuration; fields that belong to the other one keep their defaults."""

    kernel: str  # "dense" or "few_rows"
    stages: int
    block_m: int = 0
    block_n: int = 0
    cluster_m: int = 0
    cluster_n: int = 0
    band: int = 0
    tokens: int = 0
    split: int = 0
    ctas: int = 0


def configure(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> Config:
    """bucket: M, N, K, layout, aligned, out_bits, epilogue.  Batch-invariant calls pass M = 4096 for every M."""
    if _few(bucket):
        return _wrap("few_rows", few_rows_cuda.configure(bucket, dtype))
    return _wrap("dense", dense_cuda.configure(bucket, dtype, batch))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype, batch: int = 1) -> tuple[Config, ...]:
    """Returns the configs for the tuner, of both engines if both can run."""
    few = few_rows_cuda.candidates(bucket, dtype) if _few(bucket) else ()
    dense = dense_cuda.candidates(bucket, dtype, batch)
    return (*(_wrap("few_rows", config) for config in few), *(_wrap("dense", config) for config in dense))


def why_not(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why neither engine can run these arguments; None if one can."""
    arch = device_info(a.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    if not a.shape[-1]:
        return "has no tiles for K = 0"
    args = a, b, bias, c, scale, alpha, activation, out_dtype
    return None if few_rows_cuda.why_not(*args) is None else dense_cuda.why_not(*args)


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    scale: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d = act(alpha * scale * a @ b + bias) + c by the engine that `config` names."""
    engine: Any = _ENGINES[config.kernel]
    engine_config = engine.Config(*(getattr(config, field) for field in engine.Config._fields))
    engine.gemm(d, a, b, bias, c, scale, alpha, activation, engine_config)


def _few(bucket: tuple[int, ...]) -> bool:
    return bucket[0] <= few_rows_cuda.MAX_ROWS and bucket[3] in _A_ALONG_K


def _wrap(kernel: str, config: Any) -> Config:
    return Config(kernel=kernel, **config._asdict())


CONFIGS: tuple[Config, ...] = tuple(
    _wrap(kernel, config) for kernel, engine in _ENGINES.items() for config in engine.CONFIGS
)
"""Every config that `configure` can return."""
