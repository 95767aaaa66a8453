"""An engine as a backend of `matmul`, a batch of one, or of `bmm`: what the files `<op>/<backend>.py` call."""

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
        supports=engine.refusal,
    )
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        a, b, bias, c, *rest, _ = args  # the last is out_dtype: that of outs
        rows = None if c is None else c.unsqueeze(0)
        engine.gemm(outs[0].unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0), bias, rows, *rest, config)


def register_bmm(backend: str, engine: Any, *, by_batch: bool = False) -> None:
    """by_batch: `configure` and `candidates` of the engine take the size of the batch, the first number of the bucket,
    as a third argument; others choose as for one of the products.
    """
    taken = 1 if by_batch else 0

    def configure(bucket: tuple[int, ...], dtype: torch.dtype) -> Any:
        return engine.configure(bucket[1:], dtype, *bucket[:taken])

    def candidates(bucket: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        found: tuple[Any, ...] = engine.candidates(bucket[1:], dtype, *bucket[:taken])
        return found

    @register_impl(
        "bmm",
        backend=backend,
        configure=configure,
        config_type=engine.Config,
        configs=engine.CONFIGS,
        candidates=candidates,
        supports=engine.refusal,
    )
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        *operands, _ = args  # the last is out_dtype: that of outs
        engine.gemm(outs[0], *operands, config)
