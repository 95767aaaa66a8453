"""A thousand calls beside other work on the GPU give the same bits: sums in parts are added in one order, whichever
comes first.  Every backend of every kind of product, and of attention, both ways.

The allocator hands a call the memory of an earlier one, where the result already lies: a value that comes too late, or
never, would be found right.  So what was compared is made wrong, bit by bit, before its memory is freed; the next call,
which may start before that is done (programmatic dependent launch), writes there.
"""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tilewright.dispatch import Sample, contract
from tilewright.errors import RefusedError
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.validate.bits import bits

pytestmark = pytest.mark.gpu

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
REPEATS = 1000
DENSE = [(1, 576, 7168), (8, 2112, 7168), (64, 576, 7168), (64, 4096, 16384), (300, 2112, 4096)]
SCALED = [(*size, scaling) for size in DENSE[::2] for scaling in ("tensor", "row", "token_block", "token_token")]
BLOCKS, GRADIENTS = {"scaling": int(Scaling.TOKEN_BLOCK)}, {"scaling": int(Scaling.TOKEN_TOKEN), "layout": "nt"}
EXPERTS = {"G": 5, "N": 512, "K": 1024, "split": "random"}
MASKS = ({}, {"causal": True}, {"documents": 5})
HEADS = {"B": 2, "H": 8, "H_kv": 2, "S": 1000}
CASES = [
    *(("matmul", {"M": m, "N": n, "K": k}, HALF) for m, n, k in DENSE),
    *(("scaled_matmul", {"M": m, "N": n, "K": k, "scaling": scaling}, FP8) for m, n, k, scaling in SCALED),
    *(("weight_only_matmul", {"M": m, "N": 2112, "K": 4096, "bits": n}, HALF) for m in (1, 64) for n in (4, 8)),
    ("grouped_matmul", {**EXPERTS, "M": 200}, HALF),
    ("grouped_matmul", {**EXPERTS, "M": 200, **BLOCKS}, FP8),
    *(("masked_matmul", {"G": 8, "M": m, "N": 512, "K": 4096}, HALF) for m in (20, 200)),
    *(("masked_matmul", {"G": 8, "M": m, "N": 512, "K": 4096, **BLOCKS}, FP8) for m in (20, 200)),
    ("k_grouped_matmul", {**EXPERTS, "M": 256}, HALF),
    ("k_grouped_matmul", {**EXPERTS, "M": 256, **GRADIENTS}, FP8),
    *(
        ("fmha", {**HEADS, "D": d, **mask}, HALF)
        for d in (64, 128)
        for mask in ({}, {"causal": True}, {"documents": 5})
    ),
]


def name_of(case):
    """The op and its sizes."""
    op, params, dtype = case
    return "-".join([op, str(dtype)[6:], *(f"{name}{value}" for name, value in params.items())])


@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_thousand_repeats_have_the_same_bits(case, backend):
    op, params, dtype = case
    subject = contract(op)
    sample = subject.inputs(params, dtype, torch.device("cuda"), 0)
    try:
        first = [bits(t).clone() for t in results(subject, sample, backend)]
    except RefusedError as error:
        pytest.skip(str(error))
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    for i in range(REPEATS):
        if i % 50 == 0:
            with torch.cuda.stream(side):
                noise = torch.mm(noise, noise).clamp(-1, 1)
        different += differences(results(subject, sample, backend), first)
    torch.cuda.synchronize()
    assert int(different) == 0


def differences(made: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """How many of `made` are not `expected`, which are integers of the same width; `made` is wrong afterwards."""
    found = torch.stack([(bits(t) != e).any() for t, e in zip(made, expected, strict=True)]).sum()
    for t, e in zip(made, expected, strict=True):
        t.detach().view(e.dtype).bitwise_not_()
    return found


def results(subject, sample: Sample, backend: str) -> list[torch.Tensor]:
    """Outputs, and gradients where the op has a backward of its own."""
    if subject.name == "fmha":
        leaves = [t.detach().requires_grad_() for t in sample.args]
        o = subject.function(*leaves, **sample.kwargs, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, leaves, o.detach())]
    made = list(tree_leaves(subject.function(*sample.args, **sample.kwargs, backend=backend)))
    if subject.name == "masked_matmul":  # rows behind the mask have any value
        (o,) = made
        *_, counts = sample.args
        made = [o.masked_fill_((torch.arange(o.shape[1], device=o.device) >= counts[:, None])[..., None], 0)]
    return made
