"""The kernels of the op in place compile for Hopper without spills: no contract has it, so that no other test asks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.jit.collect import collect
from tilewright.ops.loss.in_place import IN_PLACE, SCALE, InPlaceArgs, ScaleArgs, in_place_bucket
from tilewright.ops.loss.kernels.triton import cross_entropy_in_place, scale_gradient
from tilewright.ops.rows import rows_bucket
from tilewright.warmup.needed import AbsentDevice

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
        config = cross_entropy_in_place.configure(in_place_bucket(args), x.dtype)
        infos = compiled(lambda: cross_entropy_in_place.launch(IN_PLACE.allocate(args, "cpu"), args, config))
    assert all(info.get("spills", 0) == 0 for info in infos)


def test_scaling():
    with FakeTensorMode():
        args = ScaleArgs(torch.empty(8, 4096, dtype=torch.bfloat16), torch.empty(()))
        config = scale_gradient.configure(rows_bucket(args.gradient), torch.bfloat16)
        compiled(lambda: scale_gradient.launch(SCALE.allocate(args, "cpu"), args, config))


def test_what_a_cluster_does_not_take_is_tritons():
    """Plans are kept by bucket: a call with class weights has another than the one before it without."""
    plans = {}
    with FakeTensorMode(allow_non_fake_inputs=True), collect("sm_90"), AbsentDevice():
        memory = torch.empty(8, 32008, dtype=torch.bfloat16, device="cuda")
        target, weight = torch.empty(8, dtype=torch.int64, device="cuda"), torch.empty(32000, device="cuda")
        rows = memory[:, :32000]
        for name, x, w, softcap in (
            ("plain", rows, None, 0.0),
            ("weights", rows, weight, 0.0),
            ("softcap", rows, None, 30.0),
            ("unaligned", memory[:, 1:32001], None, 0.0),
            ("short", rows[:, :1000], None, 0.0),
            ("again", rows, None, 0.0),
        ):
            args = InPlaceArgs(x, target, w, None, None, -100, 0.0, 0.0, softcap, "mean")
            plans[name] = IN_PLACE.plan(args, "auto", "default").backend
    assert {name for name, backend in plans.items() if backend == "cuda"} == {"plain", "again"}
    assert set(plans.values()) == {"cuda", "triton"}
