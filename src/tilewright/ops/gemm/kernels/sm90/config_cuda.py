"""One config type for three kernels, because a backend has one config type."""

from typing import Any, NamedTuple

from tilewright.ops.gemm.kernels.sm90 import dense as dense_cuda
from tilewright.ops.gemm.kernels.sm90 import few_rows_model as few_rows
from tilewright.ops.gemm.kernels.sm90 import fp8 as fp8_cuda

_OWN: dict[str, Any] = {"dense": dense_cuda.Config, "fp8": fp8_cuda.Config, "few_rows": few_rows.Config}


class Config(NamedTuple):
    """kernel: "dense", "fp8" or "few_rows" of `ops/gemm/engines`; fields that belong to others keep their defaults."""

    kernel: str
    stages: int
    block_m: int = 0
    block_n: int = 0
    cluster_m: int = 0
    cluster_n: int = 0
    band: int = 0
    tokens: int = 0
    split: int = 0
    ctas: int = 0


def named(kernel: str, config: Any) -> Config:
    """Wraps the config of an engine."""
    return Config(kernel=kernel, **config._asdict())


def own(config: Config) -> Any:
    """Returns the engine's config again."""
    kind = _OWN[config.kernel]
    return kind(*(getattr(config, name) for name in kind._fields))
