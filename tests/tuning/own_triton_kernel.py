"""A Triton kernel as a user writes one, tuned with `tilewright.tune`: softmax of rows, and a wrong configuration."""

import torch
import triton
import triton.language as tl
from torch import Tensor

import tilewright

LAUNCHED: list[int] = []
"""BLOCK of every launch."""


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + offs_n, mask=offs_n < N, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * N + offs_n, p / tl.sum(p, axis=0), mask=offs_n < N)


@tilewright.tune(
    space={"BLOCK": (1024, 64, 2048), "num_warps": (4, 8)},
    key=lambda x, out: {"M": x.shape[0], "N": x.shape[1]},
    restore=("out",),
    constraint=lambda key, config: config["BLOCK"] <= 2048,
    name="test_softmax_rows",
)
def softmax_rows(x: Tensor, out: Tensor, *, BLOCK: int, num_warps: int) -> None:
    """The softmax of every row; wrong for rows longer than BLOCK."""
    LAUNCHED.append(BLOCK)
    _softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=BLOCK, num_warps=num_warps)


def check(device: str) -> None:
    """Measure at the first call, drop what is too short for a row, leave x alone, and run the winner from then on."""
    LAUNCHED.clear()
    x = torch.randn(8, 1000, device=device)
    before, out = x.clone(), torch.full_like(x, 7.0)
    softmax_rows(x, out)
    measured = len(LAUNCHED)
    assert measured > 12
    assert {64, 1024, 2048} == set(LAUNCHED)
    torch.testing.assert_close(out, torch.softmax(x, -1))
    assert torch.equal(x, before)
    config = softmax_rows.choice(x, out).config
    assert config["BLOCK"] != 64, "wrong for rows of 1000"
    for _ in range(3):
        softmax_rows(x, out)
    assert LAUNCHED[measured:] == [config["BLOCK"]] * 3
