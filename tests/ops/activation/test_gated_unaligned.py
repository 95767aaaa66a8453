"""Gated activations of lengths that are no multiples of 16: by vectors where all sizes are, or in a single row."""

import pytest
import torch
import torch.nn.functional as F
from tests.ops.unaligned import DEVICES, accesses, filled, poisoned, untouched

SHAPES = ((5, 72), (3, 1368), (1, 333), (1, 8), (1, 7), (7, 333), (9, 515), (1, 2047), (2, 1028))


@pytest.fixture
def kernels():
    from tilewright.ops.activation.kernels.triton import gated

    return gated


def limits(dtype):
    return {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2.0**-6, "atol": 1e-2}


def gradients(gate, up, dout):
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    return torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, dout.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_outside_is_read_or_written(kernels, device, dtype):
    for shape in SHAPES:
        gate, up, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        expected, grads = F.silu(gate.double()) * up.double(), gradients(gate, up, dout)
        both = filled(torch.cat((gate, up), 1))
        for config in kernels.CONFIGS:
            (first, out), (second, packed) = (poisoned(shape, dtype, device) for _ in range(2))
            kernels.split(out, filled(gate), filled(up), "silu", config)
            kernels.packed(packed, both, "silu", config)
            torch.testing.assert_close(out.double(), expected, **limits(dtype))
            assert torch.equal(packed, out)
            assert untouched(first, out)
            assert untouched(second, packed)
            (first, dgate), (second, dup) = (poisoned(shape, dtype, device) for _ in range(2))
            third, dx = poisoned(tuple(both.shape), dtype, device)
            kernels.split_backward(dgate, dup, filled(dout), filled(gate), filled(up), "silu", config)
            kernels.packed_backward(dx, filled(dout), both, "silu", config)
            for ours, wanted in zip((dgate, dup), grads, strict=True):
                torch.testing.assert_close(ours.double(), wanted, **limits(dtype))
            assert torch.equal(dx, torch.cat((dgate, dup), 1))
            assert untouched(first, dgate)
            assert untouched(second, dup)
            assert untouched(third, dx)


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_row_of_a_wider_tensor_has_its_own_tail(kernels, device):
    gate, up = (filled(torch.randn(1, 333, device=device), pitch=350) for _ in range(2))
    memory, out = poisoned((1, 333), gate.dtype, device)
    kernels.split(out, gate, up, "silu", kernels.FEW)
    torch.testing.assert_close(out, F.silu(gate) * up)
    assert untouched(memory, out)


@pytest.mark.compile
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("form", "n", "tail"), [("split", 1368, 0), ("packed", 1368, 0), ("split", 5461, 4)])
def test_whole_vectors_are_loaded_and_stored_by_16_bytes(kernels, form, n, tail, backward):
    from tests.harness.fake_driver import target

    def rows(width):
        return torch.empty(1500, width, dtype=torch.bfloat16, device="meta")

    with target("sm_90") as compiled:
        config = kernels.Config(1024, 4)
        if form == "split" and backward:
            kernels.split_backward(rows(n), rows(n), rows(n), rows(n), rows(n), "silu", config)
        elif form == "split":
            kernels.split(rows(n), rows(n), rows(n), "silu", config)
        elif backward:
            kernels.packed_backward(rows(2 * n), rows(n), rows(2 * n), "silu", config)
        else:
            kernels.packed(rows(n), rows(2 * n), "silu", config)
    loads, stores = (3, 2) if backward else (2, 1)
    edges = {"ld b16": loads, "st b16": stores} if tail else {}
    assert dict(accesses(compiled[0].asm["ptx"])) == {"ld v4.b32": loads, "st v4.b32": stores, **edges}
