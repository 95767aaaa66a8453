"""The kernels of the op in place compile for Hopper without spills: no contract has it, so that no other test asks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.jit.collect import collect
from tilewright.ops.loss.in_place import IN_PLACE, SCALE, InPlaceArgs, ScaleArgs
from tilewright.ops.loss.kernels.triton import cross_entropy_in_place, scale_gradient
from tilewright.ops.rows import RowsBucket

OPTIONS = {"plain": (0.0, 0.0, 0.0, "mean"), "all": (0.1, 1e-4, 30.0, "none")}


def compiled(launch):
    """What the launches of a call cost."""
    with collect("sm_90") as collector:
        launch()
    assert collector.jobs
    return [job.compile().info for job in collector.jobs]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("n", [128256, 50257])
def test_in_place(n, options):
    with FakeTensorMode():
        x, target = torch.empty(8, n, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int64)
        weight = torch.empty(n) if options == "all" else None
        args = InPlaceArgs(x, target, weight, None, None, -100, *OPTIONS[options])
        config = cross_entropy_in_place.configure(RowsBucket(8, n), x.dtype)
        infos = compiled(lambda: cross_entropy_in_place.launch(IN_PLACE.allocate(args, "cpu"), args, config))
    assert all(info.get("spills", 0) == 0 for info in infos)


def test_scaling():
    with FakeTensorMode():
        args = ScaleArgs(torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(()))
        config = scale_gradient.configure(RowsBucket(8, 4096), torch.bfloat16)
        compiled(lambda: scale_gradient.launch(SCALE.allocate(args, "cpu"), args, config))
