"""Shapes and strides that no list has: sizes 0 and 1, odd, prime, one beside a tile; transposed, strided, misaligned.

Hypothesis draws an edge case for its options, then other sizes, a dtype and a layout; the accuracy rule decides.
On a CPU the torch backend runs, so checks, shapes and the wiring of gradients are tested; on a GPU the kernels.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Sample, contract, contracts
from tilewright.validate import check
from tilewright.validate.layouts import LAYOUTS, misaligned

OPS = sorted(contracts())
SMALL = st.integers(0, 9)
BESIDE_A_TILE = st.builds(lambda power, step: (1 << power) + step, st.integers(4, 10), st.integers(-1, 1))
FEW_GROUPS = 8
PRIMES = st.sampled_from([11, 13, 97, 251, 509, 1021, 2039])
PLACES = {"as made": lambda t: t, "misaligned": misaligned, **LAYOUTS}


@st.composite
def problems(draw, name, device):
    """(workload parameters, dtype, layout, seed) and the sample they describe."""
    subject = contract(name)
    params = dict(draw(st.sampled_from([w.params for w in subject.edge_cases])))
    if "M" in params:
        few = params.get("G", 1) > FEW_GROUPS  # M is of each group
        params["M"] = draw(SMALL if few else st.one_of(SMALL, BESIDE_A_TILE.filter(lambda m: m < 300)))
        params["N"] = draw(st.one_of(SMALL.filter(bool), BESIDE_A_TILE, PRIMES))
    elif "S" in params:
        params["B"], params["S"] = (
            draw(st.integers(0, 3)),
            draw(st.one_of(SMALL.filter(bool), PRIMES.filter(lambda s: s < 99))),
        )
    dtype = draw(st.sampled_from(subject.dtypes))
    layout = draw(st.sampled_from(sorted(PLACES)))
    made = subject.inputs(params, dtype, torch.device(device), draw(st.integers(0, 2**31 - 1)))
    args, kwargs = tree_map(lambda v: PLACES[layout](v) if isinstance(v, Tensor) else v, (made.args, dict(made.kwargs)))
    return f"{params}, {dtype}, {layout}", Sample(args, kwargs)


def examine(name, data, backend, device):
    label, sample = data.draw(problems(name, device), label="problem")
    modes = ["eager", "backward"]
    made = check(name, sample, modes=modes, backend=backend, device=device)
    if all(result.status == "skipped" for result in made.results):  # the kernel refuses the call by name
        made = check(name, sample, modes=modes, device=device)
    assert made.passed, f"{label}\n{made}"


def searching(examples):
    # function-scoped fixtures only seed and limit threads here: repeating them for each example would change nothing
    unhealthy = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, print_blob=True, suppress_health_check=unhealthy)


@pytest.mark.parametrize("name", OPS)
@searching(5)
@given(data=st.data())
def test_any_shape_on_a_cpu(name, data):
    examine(name, data, "torch", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
@searching(15)
@given(data=st.data())
def test_any_shape_on_a_gpu(name, data):
    examine(name, data, "triton", "cuda")
