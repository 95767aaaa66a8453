"""cuTile on a GPU: telling cases of each op in the modes of `validate.check`, and what only a device can show.

`tests/jit/test_cutile_kernels.py` runs every edge case of every kernel in an emulation; compiling them all would take a
GPU machine minutes.
"""

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import contract
from tilewright.dispatch.backends import missing
from tilewright.jit.compilers import tileiras
from tilewright.validate import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing("cutile", "cuda") is not None, reason="needs tileiras, or kernels from a bundle"),
]
# masks and unaligned rows; rows longer than registers; all that a rotation may be at once
TELLING = ("odd_n", "long_row", "blocks", "halves", "masked_finite", "interleaved_partial", "packed", "positions")
CASES = [
    (name, w)
    for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "swiglu", "softmax", "apply_rope")
    for w in contract(name).edge_cases
    if w.name.partition(":")[0] in TELLING
]


def name_of(value):
    return value if isinstance(value, str) else value.name.partition(":")[0]


@pytest.mark.parametrize(("name", "workload"), CASES, ids=name_of)
def test_edge_case(name, workload):
    modes = ["eager", "backward", "poison", "guard_bands", "offset", "determinism", "cuda_graph", "side_stream"]
    made = check(name, workload, modes=modes, backend="cutile", dtype=torch.bfloat16, device="cuda").require()
    assert {r.status for r in made.results} == {"passed"}, str(made)


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_model_size(name):
    """The first workload of the bench in float32, thousands of blocks instead of a few."""
    workload = contract(name).workloads[0]
    made = check(name, workload, modes=["eager", "backward"], backend="cutile", dtype=torch.float32, device="cuda")
    if tileiras.compiler.version() is None and all(
        "is not in the kernel cache" in str(r.details) for r in made.results
    ):
        pytest.skip(tileiras.compiler.install())
    made.require()


@pytest.mark.skipif(tileiras.compiler.version() is None, reason="a size of its own: " + tileiras.compiler.install())
def test_a_second_call_is_a_replay_that_reads_the_new_tensors():
    weight = torch.randn(512, device="cuda")
    for _ in range(3):
        x = torch.randn(7, 512, device="cuda")
        torch.testing.assert_close(
            ops.rms_norm(x, weight, backend="cutile"), ops.rms_norm(x, weight, backend="torch"), rtol=1e-5, atol=1e-5
        )
    found = [entry for key, entry in contract("rms_norm").forward.entries.items() if key[0] == "cutile!"]
    assert found and all(entry is not None for entry in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_loads_its_own():
    for index in (0, 1, 0):
        x = torch.randn(4, 256, device=f"cuda:{index}")
        y = ops.softmax(x, backend="cutile")
        assert y.device == x.device
        torch.testing.assert_close(y, torch.softmax(x, -1))
