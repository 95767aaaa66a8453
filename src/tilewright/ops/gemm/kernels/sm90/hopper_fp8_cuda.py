"""The two CUDA C++ engines for scaled e4m3 operands as one backend: one for few rows of A, a tiled one for more."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hardware.device import device_info
from tilewright.ops.gemm.kernels.sm90 import few_rows as few_rows_cuda
from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_cuda


class Config(NamedTuple):
    """The engine and its configuration; fields that belong to the other one keep their defaults."""

    kernel: str  # "dense" or "few_rows"
    stages: int
    block_m: int = 0
    block_n: int = 0
    band: int = 0
    tokens: int = 0
    split: int = 0
    ctas: int = 0


def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Config:
    """bucket: M, N, K, layout, aligned, out_bits, epilogue, scaling.  Batch-invariant calls pass M = 4096 for any M."""
    if _few(bucket):
        return _wrap("few_rows", few_rows_cuda.configure_scaled(bucket, dtype))
    return _wrap("dense", fp8_cuda.configure(bucket, dtype))


def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Config, ...]:
    """Returns the configs for the tuner, of both engines if both can run."""
    few = few_rows_cuda.candidates_scaled(bucket, dtype) if _few(bucket) else ()
    dense = fp8_cuda.candidates(bucket, dtype)
    return (*(_wrap("few_rows", config) for config in few), *(_wrap("dense", config) for config in dense))


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    out_dtype: torch.dtype,
) -> str | None:
    """Why neither engine can run these arguments; None if one can.  Both accept the same arguments."""
    return why_not_machine(a) or fp8_cuda.why_not(a, b, scale_a, scale_b, bias, c, alpha, activation, out_dtype)


def why_not_machine(a: Tensor) -> str | None:
    """Why neither engine runs on the device of `a`, or with its K; None if they do."""
    arch = device_info(a.device).arch
    if arch != "sm_90":
        return f"is written for Hopper's tensor cores (sm_90), and this is {arch}"
    return None if a.shape[-1] else "has no tiles for K = 0"


def gemm(
    d: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    c: Tensor | None,
    alpha: float,
    activation: str,
    config: Config,
) -> None:
    """d = act(alpha * (a * scale_a) @ (b * scale_b) + bias) + c by the engine that `config` names."""
    args = d, a, b, scale_a, scale_b, bias, c, alpha, activation
    if config.kernel == "few_rows":
        few_rows_cuda.scaled(*args, _unwrap(few_rows_cuda.Config, config))
    else:
        fp8_cuda.gemm(*args, _unwrap(fp8_cuda.Config, config))


def _few(bucket: tuple[int, ...]) -> bool:
    return bucket[0] <= few_rows_cuda.MAX_ROWS


def _unwrap(kind: Any, config: Config) -> Any:
    return kind(*(getattr(config, field) for field in kind._fields))


def _wrap(kernel: str, config: Any) -> Config:
    return Config(kernel=kernel, **config._asdict())


CONFIGS: tuple[Config, ...] = (
    *(_wrap("few_rows", config) for config in few_rows_cuda.CONFIGS_SCALED),
    *(_wrap("dense", config) for config in fp8_cuda.CONFIGS),
)
"""Every config that `configure` can return."""
