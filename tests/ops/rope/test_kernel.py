"""What the Triton kernel promises beyond the accuracy rule: the reference's bits, wide accesses, loud bad positions."""

import re
from functools import partial

import pytest
import torch

from tilewright.ops.rope.apply_rope import CONTRACT, apply_rope

CASES = {workload.name.split(":")[0]: workload for workload in CONTRACT.edge_cases}
WORKLOADS = {workload.name: workload for workload in CONTRACT.workloads}


@pytest.mark.interp
@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_reference(case, seed):
    """In bf16, the coarsest: a rounding more or less shows most."""
    compare_bits(CASES[case].params, torch.bfloat16, torch.device("cpu"), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CONTRACT.dtypes)
@pytest.mark.parametrize("name", [*CASES, *WORKLOADS])
def test_bits_of_the_reference_on_a_gpu(name, dtype, seed):
    compare_bits({**CASES, **WORKLOADS}[name].params, dtype, torch.device("cuda"), seed)


def compare_bits(params, dtype, device, seed):
    """Backward too, where tables have the heads' dtype: with wider ones autograd rounds each summand to the heads'."""
    sample = CONTRACT.inputs(params, dtype, device, seed)
    results = []
    for function in (partial(apply_rope, backend="triton"), CONTRACT.reference):
        q, k = (x.detach().requires_grad_() for x in sample.args[:2])
        outputs = function(q, k, *sample.args[2:], **sample.kwargs)
        torch.manual_seed(seed)
        grads = torch.autograd.grad(outputs, (q, k), [torch.randn(o.shape).to(o) for o in outputs])
        results.append((*outputs, *(grads if sample.args[2].dtype == dtype else ())))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.interp
@pytest.mark.parametrize("bad", [-1, 8, 2**40])
def test_a_position_outside_the_table_shows_as_nan(bad):
    """Positions are not looked at first, as on a GPU.  Other tokens, and elements not turned, stay right."""
    from tilewright.ops.rope.apply_rope.args import ApplyRopeArgs, RopeBucket
    from tilewright.ops.rope.kernels.triton.rope import configure, launch

    q, k, table = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.rand(8, 2)
    positions = torch.tensor([[0, 1, bad, 3, 7]])
    outs = torch.empty_like(q), torch.empty_like(k)
    config = configure(RopeBucket(T=8, H=2, H_kv=1, D=8, R=4), torch.float32)
    launch(outs, ApplyRopeArgs(q, k, table, table, positions, False, 4), config)
    wanted = apply_rope(q, k, table, table, positions=positions.clamp(0, 7), rotary_dim=4, backend="torch")
    for ours, theirs in zip(outs, wanted, strict=True):
        assert ours[:, :, 2, :4].isnan().all()
        theirs[:, :, 2, :4] = torch.nan
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.compile
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_access_is_wide_and_every_rounding_is_there(name, direction):
    """16-byte vectors (8 for the angles of neighbouring pairs), no shared memory, no fused multiply-add."""
    from tests.harness.cases import raw_call
    from tests.harness.fake_driver import target

    from tilewright.dispatch import implementations

    op = CONTRACT.raw_ops[direction == "bwd"]
    call = raw_call(CONTRACT, op, name, WORKLOADS[name].params, torch.bfloat16)
    implementation = implementations(op.op, op.direction)["triton"]
    config = implementation.configure(op.bucket_of(call.args, "default"), torch.bfloat16)
    with target("sm_90") as compiled:
        implementation.launch(call.outputs(), *call.args, config=config)
    (kernel,) = compiled
    assert kernel.metadata.shared == 0
    interleaved = WORKLOADS[name].params.get("interleaved", False)
    positions = "positions" in WORKLOADS[name].params
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", kernel.asm["ptx"])
    narrow = [a for a in accesses if ".v4.b32" not in a and not (interleaved and ".v2.b32" in a)]
    assert accesses
    assert len(narrow) == (1 if positions else 0), narrow
    assert not re.findall(r"\bfma\.\S*", kernel.asm["ptx"])
