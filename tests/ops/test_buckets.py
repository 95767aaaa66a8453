"""A plan is kept by bucket: whatever a kernel refuses, its bucket must tell.

Calls with other layouts, alignments and numbers that fall into one bucket get one answer of every kernel, as on Hopper.
"""

import sys

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import tilewright.ops
from tilewright import record
from tilewright.dispatch import contract, contracts, implementations
from tilewright.errors import InputError
from tilewright.hardware.device import DeviceInfo
from tilewright.validate.layouts import LAYOUTS, misaligned

HOPPER = DeviceInfo("a GPU", "sm_90", 132, 0, 0)
PLACES = {**LAYOUTS, "misaligned": misaligned}


def kernels(raw):
    """Those of the raw op for NVIDIA GPUs, with what they refuse."""
    backends = implementations(raw.op, raw.direction, "cuda").values()
    return [kernel for backend in backends for kernel in backend.kernels or (backend,) if kernel.supports]


def layouts(sample):
    """The sample, and with one tensor elsewhere in memory."""
    leaves, structure = tree_flatten((sample.args, dict(sample.kwargs)))
    yield "as made", *tree_unflatten(leaves, structure)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim():
            for name, place in PLACES.items():
                changed = [*leaves[:i], place(leaf), *leaves[i + 1 :]]
                yield f"tensor {i} {name}", *tree_unflatten(changed, structure)


def numbers(args):
    """The arguments, and with one number of another sign or size."""
    yield "", args
    for i, value in enumerate(args):
        for other in (-value, 0.0, value * 1e6) if isinstance(value, float) else ():
            yield f", argument {i} {other}", (*args[:i], other, *args[i + 1 :])


def raw_calls(name, args, kwargs):
    """The raw calls of one call; none where it is refused."""
    with record() as recording, torch.no_grad():
        try:
            getattr(tilewright.ops, name)(*args, **kwargs)
        except InputError:
            return []
    return [(raw, values) for raw, values, *_ in recording.calls if raw.compose is None and not raw.is_empty(values)]


@pytest.mark.parametrize("name", sorted(name for name in contracts() if kernels(contract(name).forward)))
def test_calls_of_one_bucket_get_one_answer(name, monkeypatch):
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("tilewright.ops.") and hasattr(module, "device_info"):
            monkeypatch.setattr(module, "device_info", lambda _: HOPPER)
    subject, answers, different = contract(name), {}, []
    for case in subject.edge_cases:
        sample = subject.inputs(dict(case.params), subject.dtypes[0], torch.device("cpu"), 0)
        for layout, args, kwargs in layouts(sample):
            for raw, values in raw_calls(name, args, kwargs):
                for change, changed in numbers(values):
                    problem = f"{case.name}: {layout}{change}"
                    bucket = raw.key, raw.dtype_of(changed), tuple(raw.bucket(*changed))
                    given = {kernel.kernel: kernel.supports(*changed) for kernel in kernels(raw)}
                    first, expected = answers.setdefault(bucket, (problem, given))
                    different += [
                        f"{kernel}: {reason} ({problem}), {expected[kernel]} ({first})"
                        for kernel, reason in given.items()
                        if (reason is None) != (expected[kernel] is None)
                    ]
    assert answers
    assert different == []
