"""Registers an engine as a backend; the files `<op>/<backend>.py` call this."""

from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import register_impl
from tilewright.ops.gemm.grouped.reference import bounds
from tilewright.ops.gemm.operands import copyable


def register_rows(op: str, backend: str, engine: Any, *, any_out: bool = False) -> None:
    """engine: a module for groups of rows, as `engines/__init__.py` describes; op: grouped_matmul or masked_matmul.

    any_out: `gemm` writes a d of any alignment.  Others write memory that TMA can write, and the rows of the groups are
    copied from there.
    """

    @register_impl(
        op,
        backend=backend,
        configure=engine.configure,
        config_type=engine.Config,
        configs=engine.CONFIGS,
        candidates=engine.candidates,
        supports=engine.why_not,
    )
    def launch(
        outs: tuple[Tensor],
        a: Tensor,
        b: Tensor,
        scale_a: Tensor | None,
        scale_b: Tensor | None,
        starts: Tensor | None,
        ends: Tensor,
        *rest: Any,
        config: Any,
    ) -> None:
        _, activation, _ = rest  # expected rows, which chose the config, and out_dtype: that of outs
        d = outs[0]
        if any_out or copyable(d):
            engine.gemm(d, a, b, scale_a, scale_b, starts, ends, activation, config)
            return
        source = torch.empty_like(d, memory_format=torch.contiguous_format)
        engine.gemm(source, a, b, scale_a, scale_b, starts, ends, activation, config)
        copy_rows(d, source, starts, ends)


def register_along_k(backend: str, engine: Any) -> None:
    """engine: a module for groups along K, as a backend of `k_grouped_matmul`."""

    @register_impl(
        "k_grouped_matmul",
        backend=backend,
        configure=engine.configure,
        config_type=engine.Config,
        configs=engine.CONFIGS,
        candidates=engine.candidates,
        supports=engine.why_not,
    )
    def launch(outs: tuple[Tensor], *args: Any, config: Any) -> None:
        *operands, _ = args  # the last is out_dtype: that of outs
        engine.gemm(outs[0], *operands, config)


def copy_rows(d: Tensor, source: Tensor, starts: Tensor | None, ends: Tensor) -> None:
    """Copies the rows of the groups from `source` (Ba, R, N) to `d`, and no others."""
    count, rows = d.shape[:2]
    first, last = bounds(starts, ends, count, rows)
    row_idx = torch.arange(rows, device=d.device)
    mask = (row_idx >= first[:, None]) & (row_idx < last[:, None])
    mask = mask if count == ends.shape[0] else mask.any(0, keepdim=True)
    d.copy_(torch.where(mask[..., None], source, d))
