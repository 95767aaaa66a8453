"""What `auto` takes for sizes that no table has."""

import pytest
import torch
from tests.ops.attention.bounds import problem

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import record
from tilewright.ops.attention import mla, score
from tilewright.ops.attention.bucket import BAND, CAUSAL, FULL, SINKS, SOFTCAP, FmhaBucket
from tilewright.ops.attention.fmha import BACKWARD, FORWARD
from tilewright.ops.attention.fmha.torch_first import is_estimated
from tilewright.ops.attention.mla.args import MlaBucket

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
        ({"mask": masks.causal() | masks.prefix(9)}, torch.float32, False),
    ],
    ids=["full", "sinks", "window", "program", "softcap", "alibi", "float32_program"],
)
def test_torch_is_the_guess_where_it_has_a_kernel(options, dtype, torchs):
    q, k, v = problem(1, 4, 2, 512, 512, 64, dtype=dtype, device="cpu")
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
        ("fwd", {"S_q": 1, "extras": SINKS}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 1}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 2, "group": 8}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 4, "group": 8}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 2, "D": 80, "D_v": 80}, True),
        ("fwd", {"mask": CAUSAL, "S_q": 16}, True),
        ("fwd", {"mask": CAUSAL, "S_q": 16, "BH": 64}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 256}, False),
        ("fwd", {"mask": CAUSAL, "S_q": 256, "S_k": 256}, True),
        ("fwd", {"D": 64}, False),
        ("fwd", {"D": 64, "mask": CAUSAL, "S_q": 1024}, True),
        ("fwd", {"D": 64, "mask": CAUSAL, "S_q": 2048}, False),
        ("bwd", {}, True),
        ("bwd", {"mask": CAUSAL}, False),
        ("bwd", {"mask": CAUSAL, "group": 4}, False),
        ("bwd", {"mask": CAUSAL, "group": 4, "S_q": 8192, "S_k": 8192}, True),
        ("bwd", {"group": 4}, True),
        ("bwd", {"mask": CAUSAL, "group": 4, "S_q": 1024}, False),
        ("bwd", {"mask": CAUSAL, "BH": 4, "S_q": 2048, "S_k": 2048}, True),
        ("bwd", {"D": 64}, False),
        ("bwd", {"D": 64, "group": 4}, True),
        ("bwd", {"D": 64, "S_q": 512}, True),
    ],
)
def test_torch_is_the_guess_where_it_was_ahead_of_cuda(direction, sizes, torchs):
    common = {
        "BH": 32,
        "group": 1,
        "S_q": 4096,
        "S_k": 4096,
        "D": 128,
        "D_v": 128,
        "mask": FULL,
        "extras": 0,
        "aligned": 1,
    }
    raw = {"fwd": FORWARD, "bwd": BACKWARD}[direction]
    bucket = FmhaBucket(**{**common, **sizes})
    assert raw.torch_first(bucket, HALF, "cuda") is torchs
    assert raw.torch_first(bucket, HALF, "triton"), "which was behind everywhere"
    assert raw.torch_first(bucket, torch.float32, "cuda"), "which takes 16 bits alone"


@pytest.mark.parametrize(("keys", "torchs"), [(1024, False), (8192, False), (16384, True)])
def test_torch_is_the_guess_for_long_backwards_of_latent_attention(keys, torchs):
    bucket = MlaBucket(16, keys, keys, 128, 64, 128, CAUSAL, 1)
    assert mla.BACKWARD.torch_first(bucket, HALF, "cuda") is torchs
    assert mla.BACKWARD.torch_first(bucket, HALF, "triton")
    assert not mla.FORWARD.torch_first(bucket, HALF, "cuda")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("sinks", [0, SINKS])
def test_torch_is_not_the_guess_where_joining_sinks_takes_longer_than_attention(direction, sinks):
    raw = {"fwd": FORWARD, "bwd": BACKWARD}[direction]
    bucket = FmhaBucket(128, 8, 256, 256, 64, 64, CAUSAL, sinks, 1)
    assert raw.torch_first(bucket, HALF, "cuda") is (not sinks)
    assert raw.torch_first(bucket._replace(BH=32, S_q=16, S_k=16384), HALF, "cuda"), "which FLASH divides"
    assert raw.torch_first(bucket, HALF, "triton")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "torchs"),
    [
        ({"BH": 8, "S_q": 64, "S_k": 64}, HALF, False),
        ({"BH": 4, "S_q": 256, "S_k": 256}, HALF, False),
        ({"BH": 8, "S_q": 256, "S_k": 256}, HALF, True),
        ({"BH": 32, "S_q": 1, "S_k": 1024}, HALF, False),
        ({"BH": 32, "S_q": 1, "S_k": 2048}, HALF, True),
        ({"BH": 64, "D": 100}, HALF, False),
        ({"BH": 64, "D_v": 512}, HALF, False),
        ({"BH": 8, "S_q": 128, "S_k": 128}, torch.float32, False),
        ({"BH": 8, "S_q": 128, "S_k": 256}, torch.float32, False),
        ({"BH": 8, "S_q": 64, "S_k": 512}, torch.float32, True),
        ({"BH": 8, "S_q": 64, "S_k": 512, "D": 64, "D_v": 64}, torch.float32, False),
        ({"BH": 64, "S_q": 128, "S_k": 128}, torch.float32, True),
        ({"BH": 32, "S_q": 128, "S_k": 128}, torch.float32, False),
    ],
)
def test_a_kernel_of_ours_is_the_guess_where_torch_would_compute_in_steps(sizes, dtype, torchs, direction):
    common = {
        "BH": 32,
        "group": 1,
        "S_q": 256,
        "S_k": 256,
        "D": 128,
        "D_v": 128,
        "mask": FULL,
        "extras": 0,
        "aligned": 1,
    }
    bucket = FmhaBucket(**{**common, **sizes})
    assert {"fwd": FORWARD, "bwd": BACKWARD}[direction].torch_first(bucket, dtype, "triton") is torchs


def test_a_causal_mask_that_no_kernel_of_torch_has_is_a_band():
    def mask(s_q, s_k, d_v=64):
        q, k, v = problem(1, 2, 2, s_q, s_k, 64, d_v, dtype=HALF, device="cpu")
        with record() as recording:
            ops.fmha(q, k, v, causal=True)
        raw, args, *_ = recording.calls[0]
        return FmhaBucket(*raw.bucket_of(args, "default")).mask

    assert mask(20, 20) == mask(20, 30) == mask(20, 20, 32) == CAUSAL
    assert mask(30, 20) == mask(20, 30, 32) == BAND


@pytest.mark.parametrize(
    ("sizes", "dtype", "estimated"),
    [
        ({}, HALF, False),
        ({}, torch.float32, True),
        ({"S_q": 32, "S_k": 32, "BH": 8}, HALF, True),
        ({"S_q": 32, "S_k": 32, "BH": 8, "mask": BAND}, HALF, False),
        ({"S_q": 32, "S_k": 32, "BH": 8, "extras": SOFTCAP}, HALF, False),
        ({"S_q": 256, "extras": SINKS}, HALF, True),
        ({"S_q": 1024, "S_k": 1024, "extras": SINKS}, HALF, False),
    ],
)
def test_estimates_are_told_from_guesses_that_were_measured(sizes, dtype, estimated):
    common = {
        "BH": 32,
        "group": 1,
        "S_q": 4096,
        "S_k": 4096,
        "D": 128,
        "D_v": 128,
        "mask": FULL,
        "extras": 0,
        "aligned": 1,
    }
    assert is_estimated(FmhaBucket(**{**common, **sizes}), dtype) is estimated
