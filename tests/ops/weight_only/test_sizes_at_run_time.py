"""How many kernels odd sizes compile: sizes are run-time values, and only their layout is compiled for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.dispatch import contract, record
from tilewright.warmup.calls import RawCall
from tilewright.warmup.planning import plan

COLUMNS_AND_DEPTHS = {
    "unaligned": [(100, 202), (33, 130), (520, 278), (1000, 1042), (48, 390), (72, 138), (200, 646), (1, 2), (7, 1034)],
    "rows": [(100, 208), (33, 128), (520, 272), (1000, 1040), (49, 384), (72, 144), (200, 640), (1, 32), (7, 1024)],
    "aligned": [(96, 224), (32, 128), (528, 288), (992, 1024), (48, 384), (64, 160), (208, 640), (16, 32), (480, 960)],
    "larger": [(2000, 2000), (1344, 1504), (2048, 1504), (1808, 2016), (1600, 1600), (4000, 1008), (1504, 2528)],
}


def calls(sizes, bits, rows):
    subject = contract("weight_only_matmul")
    with FakeTensorMode(), torch.no_grad():
        for i, (n, k) in enumerate(sizes):
            params = {"M": rows[i % len(rows)], "N": n, "K": k, "bits": bits}
            sample = subject.inputs(params, torch.bfloat16, torch.device("cpu"), 0)
            with record() as notes:
                subject.function(*sample.args, **sample.kwargs)
            ((op, args, *_),) = notes.calls
            yield RawCall(op, args)


def builds(layout, bits, rows, backend, arch="sm_90"):
    """Distinct kernels that all sizes of a layout compile, and how many of the sizes the backend takes."""
    made = plan(list(calls(COLUMNS_AND_DEPTHS[layout], bits, rows)), arch, (backend,))
    assert not made.failures
    return len({job.key for job in made.jobs}), made.calls


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rows", [(1, 2, 7, 15, 16), (17, 33, 48, 64, 100, 128)], ids=["few", "more"])
@pytest.mark.parametrize("layout", ["unaligned", "rows", "aligned"])
@pytest.mark.parametrize("bits", [8, 4])
def test_one_triton_kernel_a_layout(bits, layout, rows, arch):
    made, taken = builds(layout, bits, rows, "triton", arch)
    assert taken == len(COLUMNS_AND_DEPTHS[layout])
    assert made == 1


@pytest.mark.parametrize("rows", [(1, 3, 8), (9, 16), (17, 32), (33, 64)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "aligned", "larger"])
@pytest.mark.parametrize("bits", [8, 4])
def test_few_hopper_kernels_a_number_of_tokens(bits, layout, rows):
    """K is split in two, in four, or not."""
    made, taken = builds(layout, bits, rows, "cuda")
    assert taken >= 4
    assert made <= 3
