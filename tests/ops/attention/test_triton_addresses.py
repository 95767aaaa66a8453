"""The attention kernels' matrix instructions address what was written, with and without descriptors.

On Hopper, addresses of the second part of an operand were computed from registers that ptxas never set; with one key or
one query, from others that held the base of the shared memory.
"""

import pytest
import torch

from tilewright.ops.attention.arguments import FmhaArgs, FmhaBackwardArgs
from tilewright.ops.attention.bucket import FmhaBucket
from tilewright.validate.layouts import misaligned

pytestmark = pytest.mark.compile

WIDTHS = {
    "d_48": (48, 48, 0), "d_80": (80, 80, 0), "d_96": (96, 96, 0), "d_160": (160, 160, 0), "d_v_48": (64, 48, 0),
    "mla": (80, 48, 24),
}  # fmt: skip
BAND, ALL = 0, -1
"""How far right of its own position a query sees."""
LENGTHS = {"one": (1, ALL), "a_tile": (64, BAND), "a_tile_full": (64, ALL), "odd": (123, BAND)}
"""What Triton specialises: a length of 1, multiples of 16, whether the last tile is cut, whether a bound is checked."""


def _forms():
    """Each width at each place in two of the lengths, which change places from width to width; --exhaustive: in all."""
    for i, widths in enumerate(WIDTHS):
        for j, place in enumerate(("aligned", "misaligned")):
            for k, length in enumerate(LENGTHS):
                marks = [pytest.mark.exhaustive] if (i + j + k) % 2 else []
                yield pytest.param(widths, place, length, marks=marks, id=f"{widths}-{place}-{length}")


@pytest.mark.parametrize(("widths", "place", "length"), [*_forms()])
def test_no_address_comes_from_another_register(widths, place, length):
    from tests.harness.fake_driver import target
    from tests.harness.uniform_registers import of_binary

    from tilewright.ops.attention.kernels.triton import backward as triton_backward
    from tilewright.ops.attention.kernels.triton import forward as triton_forward

    (rows, right), (d, d_v, d_pe) = LENGTHS[length], WIDTHS[widths]
    batch, kv_heads = (1, 2) if rows > 1 else (2, 4)

    def operand(heads, width):
        dense = torch.empty(batch, heads, rows, width, dtype=torch.bfloat16, device="meta")
        return dense if place == "aligned" else misaligned(dense)

    q, k, v, do = operand(4, d), operand(kv_heads, d), operand(kv_heads, d_v), operand(4, d_v)
    pe = (operand(4, d_pe), operand(1, d_pe)) if d_pe else None
    gradients = (operand(4, d_pe), torch.empty(batch, kv_heads, rows, d_pe, device="meta")) if d_pe else ()
    o, lse, delta = operand(4, d_v), *(torch.empty(batch, 4, rows, device="meta") for _ in range(2))
    bucket = FmhaBucket(4 * batch, 4 // kv_heads, rows, rows, d, d_v, 1, 0, int(place == "aligned"))
    options = (None, None, None, "", -1, right, 0.1, 0.0)
    forward, backward = (e.configure(bucket, torch.bfloat16) for e in (triton_forward, triton_backward))
    with target("sm_90") as compiled:
        triton_forward.forward((o, lse), FmhaArgs(q, k, v, *options), forward, pe)
        pes = triton_backward.Rope(*pe, *gradients) if pe else None
        results = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        args = FmhaBackwardArgs(do, None, q, k, v, o, lse, *options)
        triton_backward.backward(results, args, delta, backward, pes)
    assert len(compiled) == 3
    assert {kernel.name: of_binary(kernel.asm["cubin"]) for kernel in compiled} == {k.name: [] for k in compiled}
