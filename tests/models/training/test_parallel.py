"""A patched model under DDP and FSDP2, on gloo: one process, and two, of which this one is the first."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from tests.distributed.ranks import group
from tests.models.zoo import build, tokens
from torch import Tensor, nn

from tilewright.models import patch

STYLES = ("ddp", "fsdp2", "fsdp2_head")  # the last shards the head by itself, so its weight exists in its call alone


def parallel(model: nn.Module, style: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if style == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    if style == "fsdp2_head":
        fully_shard(model.lm_head)
    return fully_shard(model)


def gradients(style: str, rank: int, world: int) -> list[Tensor]:
    """Of the mean loss over two sequences, of which each rank has its share."""
    ids = tokens(2, 16)
    model = build("llama").train()
    patch(model, mode="train", verify=False)
    wrapped = parallel(model, style)
    share = ids.chunk(world)[rank]
    output = wrapped(input_ids=share, labels=share)
    assert output.logits is None
    output.loss.backward()
    found = [p.grad for p in wrapped.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]


def expected() -> list[Tensor]:
    ids = tokens(2, 16)
    model = build("llama").train()
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters()]


def second_rank(store: Path) -> None:
    torch.set_num_threads(1)
    with group(store, 1, 2):
        for style in STYLES:
            gradients(style, 1, 2)


def judge(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_one_process(tmp_path: Path, style: str) -> None:
    with group(tmp_path / "store", 0, 1):
        judge(gradients(style, 0, 1), expected())


def test_two_processes(tmp_path: Path) -> None:
    other = mp.get_context("spawn").Process(target=second_rank, args=(tmp_path / "store",), daemon=True)
    other.start()
    try:
        with group(tmp_path / "store", 0, 2):
            for style in STYLES:
                judge(gradients(style, 0, 2), expected())
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
