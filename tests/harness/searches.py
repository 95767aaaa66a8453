"""In which tensors a program searches.

Inductor before torch 2.13 takes a slice for the tensor that it is a part of (pytorch/pytorch#182343): the compiled
search begins too early, on a GPU alone, where Inductor compiles searches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Searches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.boundaries: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.searchsorted.Tensor:
            self.boundaries.append(args[0])
        if func is torch.ops.aten.bucketize.Tensor:
            self.boundaries.append(args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def searched() -> Iterator[list[Tensor]]:
    """The boundaries of every searchsorted and bucketize in the block."""
    with _Searches() as mode:
        yield mode.boundaries
