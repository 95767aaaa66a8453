"""Every deliberately broken implementation is caught, by the mode that is there for it.

The faults are in `broken/`.  A correct implementation in their place passes, so it is the fault that is caught.
"""

import pytest
import tests.validate.broken.backward
import tests.validate.broken.forward  # noqa: F401 - both fill FAULTS
from tests.validate.broken.planted import BACKEND, FAULTS, OP, passes_allclose, planted

from tilewright.dispatch import Workload
from tilewright.validate import check

REQUIRED = {  # what must be shown to be caught, whatever else is planted
    "wrong_tile",
    "missing_tail_mask",
    "stale_output",
    "mutated_input",
    "nan",
    "wrong_stride",
    "zero_gradient",
    "non_deterministic",
    "batch_variant",
    "out_of_bounds",
}


def report(broken, params, dtype, modes="quick"):
    with planted(broken):
        return check(OP, Workload("planted", params), modes=modes, backend=BACKEND, dtype=dtype, device="cpu")


@pytest.mark.parametrize("name", FAULTS)
def test_caught_by_the_right_mode(name):
    broken = FAULTS[name]
    made = report(broken, broken.params, broken.dtype)
    assert broken.mode in made.failed_modes, str(made)


@pytest.mark.parametrize("name", [name for name, f in FAULTS.items() if f.quiet and name != "stale_output"])
def test_quiet_faults_need_their_mode(name):
    """Without the special mode the fault would pass: accuracy in eager mode sees nothing."""
    broken = FAULTS[name]
    assert report(broken, broken.params, broken.dtype, ["eager"]).passed


@pytest.mark.parametrize("name", FAULTS)
def test_what_plain_allclose_sees(name, seed):
    """allclose(1e-2) misses most of these faults: exactly those that say so."""
    assert passes_allclose(FAULTS[name], seed) == FAULTS[name].fools_allclose


@pytest.mark.parametrize("name", ["wrong_tile", "missing_tail_mask", "batch_variant", "dropped_term"])
def test_a_correct_implementation_passes(name):
    made = report(None, FAULTS[name].params, FAULTS[name].dtype)
    assert made.passed, str(made)


def test_opcheck_sees_a_mutated_input():
    broken = FAULTS["mutated_input"]
    made = report(broken, {"M": 4, "N": 64}, broken.dtype, ["opcheck"])
    assert made.failed_modes == ("opcheck",), str(made)


def test_a_wrong_tile_is_named():
    broken = FAULTS["wrong_tile"]
    made = report(broken, broken.params, broken.dtype, ["eager"])
    assert "1 of 12 tiles wrong: tile [64:128, 128:192]" in str(made)


def test_the_list_is_complete():
    assert set(FAULTS) >= REQUIRED
    assert sum(f.fools_allclose for f in FAULTS.values()) > len(FAULTS) / 2
