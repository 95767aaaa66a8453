"""Slices of the vocabulary by Triton's kernels, in its interpreter; ranks run one after the other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.distributed import vocab_rows
from tilewright.distributed.vocab_slice import VocabSlice, labels_of
from tilewright.ops.loss import entropy
from tilewright.ops.loss.entropy import Options

pytestmark = pytest.mark.interp

CLASSES, FIRST = 301, 151
PARTS = VocabSlice(0, FIRST, CLASSES, FIRST, None), VocabSlice(FIRST, CLASSES - FIRST, CLASSES, FIRST, None)
OPTIONS = {
    "plain": (Options(-100, 0.0, 0.0, 0.0, "mean"), False),
    "all": (Options(3, 0.1, 1e-2, 5.0, "mean"), True),
}


class Gathered:
    """What the ranks send: noted in a first round of calls, received by all in a second one."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.complete = False

    def all_gather(self, received: list[Tensor], sent: Tensor, **unused: Any) -> None:
        if not self.complete:
            self.sent.append(sent)
        for out, each in zip(received, self.sent if self.complete else [sent] * len(received), strict=True):
            out.copy_(each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_slices(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    options, weighted = OPTIONS[name]
    x, target = torch.randn(5, CLASSES).to(dtype), torch.tensor([7, options.ignore_index, 150, 151, 300])
    weight = 0.5 + torch.rand(CLASSES) if weighted else None
    exact = x.double().requires_grad_()
    wanted = ops.cross_entropy(
        exact, target, weight=weight, **{**options._asdict(), "softcap": options.softcap or None}
    )
    wanted.backward()
    gathered, run = Gathered(), vocab_rows.runner("triton")
    fake = SimpleNamespace(get_world_size=lambda group: len(PARTS), all_gather=gathered.all_gather)
    monkeypatch.setattr(vocab_rows, "dist", fake)
    slices = [x[:, part.first : part.first + part.size] for part in PARTS]
    labels = [labels_of(part, target, weight, options.ignore_index, torch.float32) for part in PARTS]
    for _ in range(2):
        ranks = zip(PARTS, slices, labels, strict=True)
        results = [vocab_rows.losses(run, *of_rank, weight, options) for of_rank in ranks]
        gathered.complete = True
    totals = vocab_rows.totals_of(labels[0])
    for part, logits, known, (losses, statistics) in zip(PARTS, slices, labels, results, strict=True):
        loss = entropy.reduced(losses, statistics.lse, totals, options)
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-6, atol=0)
        out = torch.empty(logits.shape, dtype=dtype)
        of_rows = vocab_rows.of_batch(torch.ones(()), totals, known, options)
        vocab_rows.write_gradient(run, out, part, logits, known, weight, options, statistics, of_rows)
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-4
        share = exact.grad[:, part.first : part.first + part.size]
        torch.testing.assert_close(out.double(), share, rtol=rtol, atol=1e-7)
