"""The Triton kernels with a second pair of score operands, against float64 over joined tensors; both loads.

Outputs lie inside larger, poisoned tensors: an element left out and one written beside both fail.
"""

from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.attention.test_fmha_triton import (
    POISON,
    PROGRAMS,
    Problem,
    close,
    exact,
    poisoned,
    problem,
    program,
    raw,
)
from tests.ops.attention.test_gradients import errors

from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs

pytestmark = pytest.mark.interp


class Split(NamedTuple):
    """One problem, joined for the oracle and apart for the kernels."""

    whole: Problem
    q: torch.Tensor
    q_pe: torch.Tensor
    k: torch.Tensor
    k_pe: torch.Tensor

    def rest(self) -> tuple[Any, ...]:
        return raw(self.whole)


def split(d=16, d_pe=16, **params) -> Split:
    """Views of projections, by token in memory; the rotated part of all key heads is that of the first."""
    whole = problem(d=d + d_pe, **params)
    whole.k[..., d:] = whole.k[:, :1, :, d:]
    apart = (whole.q[..., :d], whole.q[..., d:], whole.k[..., :d], whole.k[:, :1, :, d:])
    return Split(whole, *apart)


CASES = {
    "causal": {"right": 0},
    "full, ragged, all heads of one": {"heads": 4, "heads_kv": 1, "s_q": 40},
    "causal, rows without keys": {"right": 0, "s_q": 90, "s_k": 40},
    "window": {"left": 20, "right": 5},
    "80 = 64 + 16 beside 24, and other values": {"d": 80, "d_pe": 24, "d_v": 48, "s_q": 40, "s_k": 40},
    "negative scale": {"scale": -0.3, "right": 0},
    "documents": {"program": "documents"},
    "by head": {"program": "by head"},
}
HEADS = {"heads": 2, "heads_kv": 2}


def named(name) -> Split:
    params = dict(CASES[name])
    if "program" in params:
        params.update(program(PROGRAMS[params.pop("program")]))
    return split(**{**HEADS, "d_v": 16, **params})


def run_forward(p: Split, fast: bool) -> dict[str, torch.Tensor]:
    from tilewright.ops.attention.kernels.triton import forward as triton_forward
    from tilewright.ops.attention.kernels.triton import tiles as triton_tiles

    config = triton_tiles.Config(32, 32, 4, 2, fast)
    o, around = poisoned(p.whole.do)
    lse = torch.full(p.q.shape[:3], torch.nan)
    args = FmhaArgs(p.q, p.k, p.whole.v, *p.rest())
    triton_forward.forward((o, lse), args, config, pe=(p.q_pe, p.k_pe))
    made = {"o": o.clone(), "lse": lse}
    o.fill_(POISON)
    assert (around == POISON).all(), "written beside the output"
    return made


pointers_and_descriptors = pytest.mark.parametrize("fast", [False, True], ids=["pointers", "descriptors"])


@pointers_and_descriptors
@pytest.mark.parametrize("name", CASES)
def test_forward(name, fast):
    p = named(name)
    close(run_forward(p, fast), p.whole, "o lse")


@pointers_and_descriptors
@pytest.mark.parametrize("name", CASES)
def test_backward(name, fast):
    """dk_pe of the kernel is each key head's share, and so a column of what the oracle gives."""
    from tilewright.ops.attention.kernels.triton import backward as triton_backward
    from tilewright.ops.attention.kernels.triton import delta as triton_delta

    p = named(name)
    forward = run_forward(p, fast)
    rooms = [poisoned(t) for t in (p.q, p.k, p.whole.v, p.q_pe)]
    dq, dk, dv, dq_pe = (room for room, _ in rooms)
    batch, heads_kv, s_k, _ = p.k.shape
    shares = torch.full((batch, heads_kv, s_k, p.k_pe.shape[3]), torch.nan)
    delta = torch.full(p.q.shape[:3], torch.nan)
    dlse = torch.where(forward["lse"].isinf(), 0.0, 0.3)
    triton_delta.delta(delta, p.whole.do, forward["o"], dlse)
    config = triton_backward.Config(16, 32, 4, 2, 32, 16, 4, 2, fast)
    args = FmhaBackwardArgs(p.whole.do, dlse, p.q, p.k, p.whole.v, forward["o"], forward["lse"], *p.rest())
    pe = triton_backward.Rope(p.q_pe, p.k_pe, dq_pe, shares)
    triton_backward.backward((dq, dk, dv), args, delta, config, pe=pe)
    joined = {"dq": torch.cat((dq, dq_pe), -1), "dk": torch.cat((dk.float(), shares), -1), "dv": dv.clone()}
    for room, around in rooms:
        room.fill_(POISON)
        assert (around == POISON).all(), "written beside a gradient"
    wanted = exact(p.whole)
    for name, made in joined.items():
        whole, tile = errors(made, wanted[name])
        assert max(whole, tile / 2) <= 6 * torch.finfo(torch.bfloat16).eps, (name, whole, tile)


@pytest.mark.parametrize("heads", [1, 16, 37])
def test_shares_are_added_up(heads):
    from tilewright.ops.attention.kernels.triton.latent.head_sum import head_sum

    shares = torch.randn(2, heads, 21, 24)
    out, around = poisoned(torch.empty(2, 1, 21, 24, dtype=torch.bfloat16))
    head_sum(out, shares)
    exact = shares.double().sum(1, keepdim=True)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * shares.abs().sum(1, keepdim=True)).all()
    out.fill_(POISON)
    assert (around == POISON).all(), "written beside the sum"
