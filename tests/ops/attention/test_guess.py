"""What `auto` takes for sizes that no table has."""

import pytest
import torch
from tests.ops.attention.bounds import problem

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import record
from tilewright.ops.attention import score
from tilewright.ops.attention.bucket import CAUSAL, FULL, FmhaBucket
from tilewright.ops.attention.fmha import BACKWARD, FORWARD

HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("options", "dtype", "torchs"),
    [
        ({}, HALF, True),
        ({"causal": True, "sinks": torch.zeros(4)}, HALF, True),
        ({"mask": masks.window(30)}, HALF, False),
        ({"mask": masks.causal() | masks.prefix(9)}, HALF, False),
        ({"causal": True, "softcap": 3.0}, HALF, False),
        ({"causal": True, "score_mod": score.alibi(torch.ones(4))}, HALF, False),
        ({"mask": masks.causal() | masks.prefix(9)}, torch.float32, True),
    ],
    ids=["full", "sinks", "window", "program", "softcap", "alibi", "float32"],
)
def test_torch_is_the_guess_where_it_has_a_kernel(options, dtype, torchs):
    q, k, v = problem(1, 4, 2, 128, 128, 64, dtype=dtype, device="cpu")
    with record() as recording:
        ops.fmha(q, k, v, **options)
    raw, args, *_ = recording.calls[0]
    assert raw.torch_first(raw.bucket_of(args, "default"), dtype, "triton") is torchs


@pytest.mark.parametrize(
    ("direction", "sizes", "torchs"),
    [
        ("fwd", {}, False),
        ("fwd", {"S_q": 256}, True),
        ("fwd", {"S_q": 1, "S_k": 4096}, True),
        ("fwd", {"D": 64}, False),
        ("fwd", {"D": 64, "mask": CAUSAL, "S_q": 1024}, True),
        ("fwd", {"D": 64, "mask": CAUSAL, "S_q": 2048}, False),
        ("bwd", {}, True),
        ("bwd", {"mask": CAUSAL}, False),
        ("bwd", {"mask": CAUSAL, "group": 4}, True),
        ("bwd", {"mask": CAUSAL, "group": 4, "S_q": 1024}, False),
        ("bwd", {"mask": CAUSAL, "BH": 4, "S_q": 2048, "S_k": 2048}, True),
        ("bwd", {"D": 64}, False),
        ("bwd", {"D": 64, "group": 4}, True),
        ("bwd", {"D": 64, "S_q": 512}, True),
    ],
)
def test_torch_is_the_guess_where_it_was_ahead_of_cuda(direction, sizes, torchs):
    of = {"BH": 32, "group": 1, "S_q": 4096, "S_k": 4096, "D": 128, "D_v": 128, "mask": FULL, "extras": 0, "aligned": 1}
    raw = {"fwd": FORWARD, "bwd": BACKWARD}[direction]
    bucket = FmhaBucket(**{**of, **sizes})
    assert raw.torch_first(bucket, HALF, "cuda") is torchs
    assert raw.torch_first(bucket, HALF, "triton"), "which was behind everywhere"
    assert raw.torch_first(bucket, torch.float32, "cuda"), "which takes 16 bits alone"
