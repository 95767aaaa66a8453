"""Registers an engine as a backend of `matmul`, a batch of one, or of `bmm`, for the files `<op>/<backend>.py`."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl


def register_matmul(backend: str, engine: Any) -> None:
    """engine: a module with the names that `engines/__init__.py` lists."""

    @register_impl(
        "matmul",
        backend=backend,
        configure=engine.configure,
        config_type=engine.Config,
        configs=engine.CONFIGS,
        candidates=engine.candidates,
        supports=engine.why_not,
    )
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        a, b, bias, c, *rest, _ = args  # the last is out_dtype: that of outs
        addend = None if c is None else c.unsqueeze(0)
        engine.gemm(outs[0].unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0), bias, addend, *rest, config)


def register_bmm(backend: str, engine: Any, *, by_batch: bool = False) -> None:
    """by_batch: `configure` and `candidates` of the engine take the batch size, the first number of the bucket, as a
    third argument; otherwise they choose as for a single product.
    """
    batch_fields = 1 if by_batch else 0

    def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Any:
        return engine.configure(bucket[1:], dtype, *bucket[:batch_fields])

    def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        configs: tuple[Any, ...] = engine.candidates(bucket[1:], dtype, *bucket[:batch_fields])
        return configs

    @register_impl(
        "bmm",
        backend=backend,
        configure=configure,
        config_type=engine.Config,
        configs=engine.CONFIGS,
        candidates=candidates,
        supports=engine.why_not,
    )
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        *operands, _ = args  # the last is out_dtype: that of outs
        engine.gemm(outs[0], *operands, config)
