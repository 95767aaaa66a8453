"""A thousand calls of what decodes give the same bits, whatever the order in which programs end."""

import pytest
import torch

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contract, implementations
from tilewright.dispatch.effects import as_tuple
from tilewright.errors import RefusedError

pytestmark = pytest.mark.gpu

REPEATS = 1000
CASES = {  # one sequence among all processors, then many, and what is particular
    "fmha_decode": ("1x32/8x8192x128", "94x32/8x65536tokensx128_mixed_page16"),
    "fmha_paged": ("31x4096+512_32/8x128",),
    "sample": ("top_k_top_p_1x131072", "mixed_128x131072"),
    "greedy": ("vocabulary_1x131072", "vocabulary_128x131072"),
    "top_k": ("rows_1x131072_k20", "rows_128x131072_k64"),
}


def other_bits(first: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
    """Counted on the device, so that calls queue up behind one another."""
    return (first.contiguous().view(torch.uint8) != again.contiguous().view(torch.uint8)).any()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_a_thousand_repeats(name, case):
    subject = contract(name)
    (workload,) = [w for w in subject.workloads if w.name == case]
    dtype = torch.float32 if subject.family == "sampling" else torch.bfloat16
    sample = subject.inputs(workload.params, dtype, torch.device("cuda"), 0)
    ran = []
    for backend in implementations(name, "fwd", "cuda"):
        try:
            first = as_tuple(subject.function(*sample.args, **sample.kwargs, backend=backend))
        except RefusedError:
            continue
        ran.append(backend)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPEATS):
            made = as_tuple(subject.function(*sample.args, **sample.kwargs, backend=backend))
            different += sum(other_bits(a, b) for a, b in zip(first, made, strict=True))
        assert int(different) == 0, f"{backend}: {int(different)} of {REPEATS} calls differ"
    assert ran
