"""Every number that a public function takes: Python's and numpy's mean the same; a tensor, whose value may change under
a compiled kernel, and what is no number are refused by name.
"""

import inspect
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts
from tilewright.dispatch.effects import pure
from tilewright.errors import InputError

FLOATS = {"eps": 0.5, "offset": 1.0, "alpha": 0.5, "scale": 0.5, "softcap": 2.0}
FLOATS |= {"limit": 0.5, "p": 0.5, "gate_multiplier": 0.5}
FLOATS |= {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "repetition": 0.5, "presence": 0.5, "frequency": 0.5}
FLOATS |= {"label_smoothing": 0.5, "z_loss": 0.5, "beta": 0.25, "hard_weight": 0.5}
FLOATS |= {"lr": 0.5, "weight_decay": 0.5, "norm_type": 2.0}
SIZES = {
    "k": 3, "top_k": 3, "rotary_dim": 64, "groups": 4, "expected_rows": 16, "bits": 8, "group": 128, "dim": 1,
    "tokens": 6, "page_size": 16, "max_pages": 8, "num_experts": 64, "n_group": 2, "topk_group": 1, "d_v": 32,
    "ignore_index": 3, "chunk_rows": 3, "num_groups": 2, "group_size": 8, "seed": 3, "offset": 3,
}  # fmt: skip
# kernels are told of these
RAW_FLAGS = {"fp32_weight", "interleaved", "ue8m0", "transpose", "packed", "renormalize", "recompute", "maximize"}
RAW_FLAGS |= {"norm_before_gate", "log_probs", "log_target"}
# Python branches on the others: by their truth
FLAGS = {*RAW_FLAGS, "causal", "trans_a", "trans_b", "return_lse", "return_z_loss", "inplace_grad"}
FLAGS |= {"keepdim", "training"}
TENSORS = {
    (op, option) for op in ("dropout", "fmha", "fmha_dropout") for option in ("seed", "offset")
}  # may be tensors of no dimensions too
OTHER = {"dropout", "x", "betas"}  # must be 0; a tensor; two numbers
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]


def is_number(parameter):
    """Whether a public function takes a number here; a tensor may bear the same name."""
    return any(kind in str(parameter.annotation) for kind in ("int", "float", "bool"))


def options(kind, number=""):
    """(op, option) of every option in `kind` that is a number of this type: an offset is a float or an int."""
    return [
        (name, option)
        for name, contract in contracts().items()
        for option, parameter in inspect.signature(contract.function).parameters.items()
        if option in kind and is_number(parameter) and number in str(parameter.annotation)
    ]


@cache
def problem(name, option, python):
    """(arguments, options) of a small call that takes this option, and what it returns."""
    contract = contracts()[name]
    for case in contract.edge_cases:
        if 0 in case.params.values():
            continue
        sample = contract.inputs(case.params, contract.dtypes[0], torch.device("cpu"), 0)
        bound = dict(zip(inspect.signature(contract.function).parameters, sample.args, strict=False)) | sample.kwargs
        bound[option] = python
        try:
            with torch.no_grad():
                return bound, pure(contract, contract.function)(**bound, backend="torch")
        except InputError:
            continue  # this case does not go with the option
    raise AssertionError(f"{name} has no edge case that takes {option}={python!r}")


def call(name, bound, option, value, backend):
    with torch.no_grad():
        return pure(contracts()[name], contracts()[name].function)(**{**bound, option: value}, backend=backend)


def same(name, option, python, values, backend):
    bound, _ = problem(name, option, python)
    wanted = call(name, bound, option, python, backend)
    for value in values:
        for ours, theirs in zip(call(name, bound, option, value, backend), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def refused(name, option, python, values):
    bound, _ = problem(name, option, python)
    for value in values:
        with pytest.raises(InputError, match=rf"{option}\b"):
            call(name, bound, option, value, "torch")


def test_every_number_is_listed():
    """A new option of an op belongs into one of the lists above."""
    known = {*FLOATS, *SIZES, *FLAGS, *OTHER}
    for name, contract in contracts().items():
        for option, parameter in inspect.signature(contract.function).parameters.items():
            if is_number(parameter) and "window" not in option:
                assert option in known, (name, option, parameter.annotation)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "option"), options(FLOATS, "float"))
def test_floats(name, option, backend, exhaustive):
    python, slow = FLOATS[option], backend == "triton" and not exhaustive
    floats, ints = (np.float16, np.float32, np.float64), (int, np.int32, np.int64)
    same(name, option, python, [kind(python) for kind in (floats[:1] if slow else floats)], backend)
    if not slow:  # an integer becomes a float before a backend is chosen
        same(name, option, 1.0, [kind(1) for kind in ints], backend)


@pytest.mark.parametrize(("name", "option"), options(FLOATS, "float"))
def test_floats_that_are_none(name, option):
    values = ["0.5", 1j, [0.5]]
    if "Tensor" not in str(inspect.signature(contracts()[name].function).parameters[option].annotation):
        values.append(torch.tensor(0.5))
    refused(name, option, FLOATS[option], values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "option"), options(SIZES, "int"))
def test_sizes(name, option, backend):
    python = SIZES[option]
    same(name, option, python, [np.int32(python), np.int64(python)], backend)


@pytest.mark.parametrize(("name", "option"), options(SIZES, "int"))
def test_sizes_that_are_none(name, option):
    python = SIZES[option]
    values = [float(python) + 0.5, str(python)]
    if (name, option) not in TENSORS:
        values.append(torch.tensor(python))
    refused(name, option, python, values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "option"), options(FLAGS))
def test_flags(name, option, backend, exhaustive):
    slow = backend == "triton" and not exhaustive
    for python in (False, True):
        try:
            problem(name, option, python)
        except AssertionError:
            continue  # transposed operands are other tensors
        same(name, option, python, [np.bool_(python), int(python)][: 1 if slow else 2], backend)


@pytest.mark.parametrize(("name", "option"), options(RAW_FLAGS))
def test_flags_that_are_none(name, option):
    refused(name, option, False, [torch.tensor(False), "no", 2])


def test_there_are_problems():
    bound, made = problem("rms_norm", "eps", 0.5)
    assert bound["eps"] == 0.5
    assert isinstance(made[0], Tensor)
