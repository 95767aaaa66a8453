"""Which of the measured implementations a table may ask for."""

from types import SimpleNamespace

import pytest

import tilewright.ops  # noqa: F401 - announces the ops
from tilewright.bench.measure.row import table_choice
from tilewright.bench.statistics import Samples
from tilewright.dispatch import contract


@pytest.mark.parametrize(
    ("direction", "recomputes", "backend"), [("fwd", True, "torch"), ("bwd", True, "cpu"), ("bwd", False, "torch")]
)
def test_torchs_backward_is_a_choice_where_it_needs_no_forward_again(direction, recomputes, backend):
    names = ("cpu", "torch")
    case = SimpleNamespace(
        direction=direction, contract=SimpleNamespace(gradient=SimpleNamespace(recomputes=recomputes))
    )
    plans = {name: SimpleNamespace(config=None, kernel="", bucket="M=1", dtype="float32") for name in names}
    found = SimpleNamespace(names=names, plans=plans, raw=SimpleNamespace(op="op"))
    made = table_choice(case, found, {"cpu": Samples([2.0, 2.0]), "torch": Samples([1.0, 1.0])})
    assert (made.backend, made.torch_us) == (backend, 1.0)


def test_attention_needs_no_forward_again():
    assert {op: contract(op).gradient.recomputes for op in ("fmha", "fmha_varlen", "mla", "rms_norm")} == {
        "fmha": False,
        "fmha_varlen": False,
        "mla": False,
        "rms_norm": True,
    }
