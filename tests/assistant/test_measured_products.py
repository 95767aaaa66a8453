"""Linears that a patch put on our product, and merged ones: they go together, and come apart in order."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from tests.assistant.test_changes import identity, logits
from tests.models.fake_table import Planted, planted_backend, product

from tilewright.assistant.changes import Scene
from tilewright.assistant.changes.merged_linear import MERGED_GATE_UP, MERGED_QKV
from tilewright.assistant.changes.op_replacement import OpReplacement
from tilewright.assistant.observation.observe import observe
from tilewright.assistant.workload import workload
from tilewright.errors import PatchError
from tilewright.models import patch
from tilewright.models.specialise import Patched

HIDDEN, INNER, ROWS = 64, 96, 32


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    with planted_backend(monkeypatch, tmp_path) as backend:
        yield backend


def work(model):
    return workload(model, prompts=prompts(), new_tokens=4)


@pytest.mark.parametrize("replaced", [False, True], ids=["plain", "replaced"])
def test_a_merged_product_runs_where_its_own_size_was_measured_faster(planted: Planted, replaced: bool) -> None:
    planted.measure(product(ROWS, 128, HIDDEN, 1.0), product(ROWS, 64, HIDDEN, 1.0))
    model = tiny_llama()
    outputs = logits(model)
    if replaced:
        patch(model, verify=False, ops=["linear"])
    generated = [m for m in model.modules() if isinstance(m, Patched)]
    assert len(generated) == (4 if replaced else 0), "q_proj and o_proj of two layers"
    before = identity(model)
    applied = [change.apply(model, work(model)) for change in (MERGED_QKV, MERGED_GATE_UP)]
    planted.launches.clear()
    torch.testing.assert_close(logits(model), outputs, rtol=1e-5, atol=1e-6)
    assert planted.launches.count((24, 128, "")) == 2
    assert planted.launches.count((24, 192, "")) == 0, "gate and up were not measured"
    assert planted.launches.count((24, 64, "")) == (2 if replaced else 0), "o_proj"
    for change in reversed(applied):
        change.undo()
    assert identity(model) == before


def test_a_patch_below_merged_linears_waits_for_them(planted: Planted) -> None:
    planted.measure(product(ROWS, 64, HIDDEN, 1.0))
    model = tiny_llama()
    untouched, outputs = identity(model), logits(model)
    p = patch(model, verify=False)
    merged = MERGED_QKV.apply(model, work(model))
    for forbidden in (p.undo, p.verify):
        with pytest.raises(PatchError, match="class of First was changed again .* merged linears"):
            forbidden()
    merged.undo()
    p.undo()
    assert identity(model) == untouched
    assert torch.equal(logits(model), outputs)


def test_op_replacement_replaces_linears_and_predicts_their_gain(planted: Planted) -> None:
    model = tiny_llama()
    seen = observe(model, work(model))
    scene = Scene(model, work(model), seen, ceilings())
    without = OpReplacement().predict(scene).bound_us
    planted.measure(product(ROWS, 64, 96, 2.0, torch_us=7.0))
    found = OpReplacement().predict(scene).bound_us
    assert found == pytest.approx(without + 2 * 5.0), "down_proj of two layers"
    assert "2 x linear" in OpReplacement().applies(scene).reason
    applied = OpReplacement().apply(model, work(model))
    assert "2 x linear" in applied.detail
    planted.launches.clear()
    logits(model)
    assert planted.launches == 2 * [(24, 64, "")]
