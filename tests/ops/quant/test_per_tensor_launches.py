"""per_tensor_cast_to_fp8: its second launch starts beside the first, and uses nothing of it too early."""

import re

import pytest
import torch

from tilewright import ops
from tilewright.ops.quant.per_tensor_cast_to_fp8 import PerTensorCastArgs, PerTensorCastBucket

MEMORY = r"(?:ld|st)\.global[\w.:]*|griddepcontrol\.\w+"


@pytest.fixture
def kernels():
    from tilewright.ops.quant.kernels.triton import per_tensor_cast

    return per_tensor_cast


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_maxima_are_read_after_the_wait_and_the_block_before(kernels, arch):
    from tests.harness.fake_driver import target

    x = torch.empty(8192, 7168, dtype=torch.bfloat16, device="meta")
    q = torch.empty(8192, 7168, dtype=torch.float8_e4m3fn, device="meta")
    config = kernels.configure(PerTensorCastBucket(8192, 7168, 1), x.dtype)
    with target(arch) as compiled:
        kernels.launch((q, torch.empty(1, 1, device="meta")), PerTensorCastArgs(x), config)
    amax, cast = compiled
    assert not amax.metadata.launch_pdl, "it reads what the kernel before wrote, and has no wait"
    early = arch != "sm_80"
    assert bool(cast.metadata.launch_pdl) == early
    steps = re.findall(MEMORY, cast.asm["ptx"])
    if not early:
        assert not any("griddepcontrol" in step for step in [*steps, *re.findall(MEMORY, amax.asm["ptx"])])
        return
    assert re.findall(MEMORY, amax.asm["ptx"])[0] == "griddepcontrol.launch_dependents"
    wait = steps.index("griddepcontrol.wait")
    assert all("evict_first" in step for step in steps[:wait]), "only x is read before the wait"
    assert wait == config.block // (32 * config.num_warps * 8), "all of x is"
    assert [step for step in steps[wait + 1 :] if "evict_first" in step] == []
    assert any(step.startswith("ld") for step in steps[wait + 1 :]), "the maxima are read after it"


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("shape", [(64, 4096), (4096, 4096), (8192, 7168), (37, 333)], ids=str)
def test_chains_of_casts_see_the_values_of_their_turn(shape, backend, graph):
    """x is written right before each cast and overwritten right after it."""
    if backend == "cuda" and (torch.cuda.get_device_capability() != (9, 0) or shape[0] < 4096):
        pytest.skip("CUDA C++ is for Hopper, and for a large x")
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    values = torch.randn_like(x)

    def chain():
        made = []
        for i in range(6):
            torch.mul(values, float(2**i), out=x)
            made.append(ops.per_tensor_cast_to_fp8(x, backend=backend))
            x.fill_(1e4)
        return made

    chain()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            made = chain()
        for _ in range(3):
            captured.replay()
    else:
        made = chain()
    for i, (q, scale) in enumerate(made):
        expected, expected_scale = ops.per_tensor_cast_to_fp8(values * 2**i, backend="torch")
        assert torch.equal(scale, expected_scale), i
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8)), i
