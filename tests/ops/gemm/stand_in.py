"""A backend that is not torch, on CPU tensors: what happens between the public function and a kernel shows there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tests.harness.registry import own_registry

from tilewright.dispatch import contract, register_impl
from tilewright.ops.gemm.dense.args import MatmulArgs
from tilewright.ops.gemm.dense.reference import product


@contextmanager
def stand_in(*names: str) -> Iterator[list[tuple[torch.Size, torch.Size]]]:
    """Inside the block backend "cpu" of these ops computes by torch; yields the shapes (a, b) of its launches."""
    launched: list[tuple[torch.Size, torch.Size]] = []

    def launch(outs, a, b, *rest, config):
        launched.append((a.shape, b.shape))
        assert config == "config"
        with torch.autocast("cpu", enabled=False):  # what a kernel knows nothing of
            outs[0].copy_(product(MatmulArgs(a, b, *rest)))

    raws = [contract(name).forward for name in names]
    with own_registry():
        for raw in raws:
            raw.dtypes = (*raw.dtypes, torch.float64)  # for gradients by differences
        for name in names:
            register_impl(name, backend="cpu", configure=lambda bucket, dtype: "config")(launch)
        try:
            yield launched
        finally:
            for name, raw in zip(names, raws, strict=True):
                raw.dtypes = raw.dtypes[:-1]
                gradient = contract(name).gradient
                for op in (raw, *(() if gradient is None else (gradient.op,))):
                    op.forget_plans()
