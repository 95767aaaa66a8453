"""A process group of gloo: this process and, for two ranks, another one that runs the same function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextmanager
def group(store: Path, rank: int, world: int) -> Iterator[None]:
    """The default process group."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _other_rank(function: Callable[[], None], store: Path) -> None:
    torch.set_num_threads(1)
    with group(store, 1, 2):
        function()


def on_two_ranks(function: Callable[[], None], store: Path) -> None:
    """Call `function`, of a module, on rank 0 here and on rank 1 in a process of its own."""
    other = mp.get_context("spawn").Process(target=_other_rank, args=(function, store), daemon=True)
    other.start()
    try:
        with group(store, 0, 2):
            function()
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
