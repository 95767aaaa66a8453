"""The stride of a dimension of one element means nothing, on every backend that a GPU has.

`tests/gpu/test_contracts.py` runs the mode on every edge case in Triton; here are cuTile, whose strides have 32 bits,
and CUDA C++, whose tensor maps take multiples of 16 bytes.
"""

import pytest
import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import Workload, contract, implementations
from tilewright.dispatch.backends import missing
from tilewright.validate import check

pytestmark = pytest.mark.gpu

ROWS = ("one_row", "n_1", "decode", "mqa", "one_head")
CUTILE = [
    (name, w)
    for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "swiglu", "softmax", "apply_rope")
    for w in contract(name).edge_cases
    if w.name.partition(":")[0] in ROWS and (name, w.params.get("N")) != ("silu_and_mul", 1)
]  # silu_and_mul reads two columns for one
PRODUCTS = [
    ("matmul", {"M": 1, "N": 256, "K": 512}),
    ("matmul", {"M": 1, "N": 256, "K": 512, "layout": "tn"}),
    ("bmm", {"B": 1, "M": 128, "N": 256, "K": 512}),
    ("bmm", {"B": 3, "M": 1, "N": 256, "K": 512}),
    ("scaled_matmul", {"M": 1, "N": 256, "K": 512}),
    ("scaled_matmul", {"M": 256, "N": 256, "K": 128}),  # one scale along K
    ("weight_only_matmul", {"M": 1, "N": 256, "K": 512}),
    ("weight_only_matmul", {"M": 4, "N": 256, "K": 128}),
    ("masked_matmul", {"G": 1, "M": 64, "N": 256, "K": 512}),
]


def name_of(value):
    if isinstance(value, dict):
        return "x".join(str(v) for v in value.values())
    return value if isinstance(value, str) else value.name.partition(":")[0]


def require(name, workload, backend):
    made = check(name, workload, modes=["eager", "single_elements"], backend=backend, device="cuda").require()
    assert {r.status for r in made.results} == {"passed"}, str(made)


@pytest.mark.skipif(missing("cutile", "cuda") is not None, reason="needs tileiras, or kernels from a bundle")
@pytest.mark.parametrize(("name", "workload"), CUTILE, ids=name_of)
def test_cutile(name, workload):
    require(name, workload, "cutile")


@pytest.mark.parametrize("backend", ["cuda", "triton", "cutile"])
@pytest.mark.parametrize(("name", "params"), PRODUCTS, ids=name_of)
def test_products(name, params, backend):
    op = contract(name).forward
    if backend not in implementations(op.op, op.direction) or missing(backend, "cuda") is not None:
        pytest.skip(f"{name} has no {backend} here")
    require(name, Workload("single", params), backend)


@pytest.mark.parametrize("backend", ["triton", "cutile"])
def test_one_head_of_a_fused_projection_does_not_say_how_k_lies(backend):
    params = {"B": 1, "S": 129, "H": 1, "H_kv": 3, "D": 96, "R": 48, "layout": "fused"}
    if missing(backend, "cuda") is not None:
        pytest.skip(f"no {backend} here")
    workload = Workload("one_head", params)
    made = check(
        "apply_rope", workload, modes=["eager", "backward"], backend=backend, dtype=torch.bfloat16, device="cuda"
    )
    assert {r.status for r in made.require().results} == {"passed"}, str(made)
