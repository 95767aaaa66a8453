"""Casts of lengths that are whole vectors but no multiples of 16: the same bits, by 16-byte loads."""

import pytest
import torch
from tests.ops.unaligned import DEVICES, accesses, filled

from tilewright.ops.activation import silu_and_mul_fp8, swiglu_fp8
from tilewright.ops.quant import per_token_cast_to_fp8 as per_token
from tilewright.ops.unaligned_rows import unit_of

LENGTHS = (8, 24, 136, 264, 1368)


@pytest.fixture
def casts():
    from tilewright.ops.quant.kernels.triton import per_token_cast

    return per_token_cast


@pytest.fixture
def gates():
    from tilewright.ops.activation.kernels.triton import silu_fp8

    return silu_fp8


def test_a_unit_is_a_vector_where_that_tells_more():
    assert [unit_of(2, n, n) for n in (1368, 1376, 1364, 1367)] == [8, 1, 1, 1]
    assert [unit_of(4, n) for n in (1364, 1366, 1360)] == [4, 1, 1]
    assert unit_of(2, 1376, 1368) == 8, "a stride"
    assert unit_of(2, (1 << 31) + 8) == 1


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("device", DEVICES)
def test_casts_of_whole_vectors(casts, device, group):
    for k in (*LENGTHS, 16392):
        if group and k > 2000:
            continue
        rows = 3
        x = torch.randn(rows, k, device=device).bfloat16()
        for pitch in (k, k + 8):
            args = per_token.PerTokenCastArgs(filled(x, pitch), group, False, False)
            expected, expected_scales = per_token.FORWARD.reference(*args)
            memory = torch.full((rows * k + 128,), 77, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            q = memory.as_strided((rows, k), (k, 1), 64)
            scales = per_token.FORWARD.allocate(args, device)[1]
            bucket = per_token.FORWARD.bucket(*args)
            casts.launch((q, scales), args, casts.configure(bucket, x.dtype))
            assert torch.equal(scales, expected_scales), (k, pitch)
            assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8)), (k, pitch)
            q.view(torch.uint8).fill_(77)
            assert (memory.view(torch.uint8) == 77).all(), (k, pitch)


@pytest.mark.parametrize("device", DEVICES)
def test_gates_of_whole_vectors(gates, device):
    for n in LENGTHS:
        gate, up = (torch.randn(3, n, device=device).bfloat16() for _ in range(2))
        both = torch.cat((gate, up), 1)
        q, scales = swiglu_fp8.FORWARD.allocate(swiglu_fp8.SwigluFp8Args(gate, up, False), device)
        args = silu_and_mul_fp8.SiluAndMulFp8Args(both, False)
        packed_q, packed_scales = silu_and_mul_fp8.FORWARD.allocate(args, device)
        config = gates.configure(silu_and_mul_fp8.FORWARD.bucket(*args), gate.dtype)
        gates.split(q, scales, filled(gate), filled(up, n + 8), False, config)
        gates.packed(packed_q, packed_scales, filled(both), False, config)
        expected, expected_scales = swiglu_fp8.FORWARD.reference(gate, up, False)
        torch.testing.assert_close(scales, expected_scales, rtol=2.0**-7, atol=0)
        torch.testing.assert_close(
            q.float() * scales.repeat_interleave(128, 1)[:, :n],
            expected.float() * expected_scales.repeat_interleave(128, 1)[:, :n],
            rtol=0.13,
            atol=1e-2,
        )
        assert torch.equal(q.view(torch.uint8), packed_q.view(torch.uint8))
        assert torch.equal(scales, packed_scales)


@pytest.mark.compile
@pytest.mark.parametrize("op", ["rows", "groups", "gate"])
def test_whole_vectors_are_loaded_by_16_bytes(casts, gates, op):
    from tests.harness.fake_driver import target

    x = torch.empty(2000, 1368, dtype=torch.bfloat16, device="meta")
    with target("sm_90") as compiled:
        if op == "gate":
            args = swiglu_fp8.SwigluFp8Args(x, x, False)
            config = gates.configure(swiglu_fp8.FORWARD.bucket(*args), x.dtype)
            gates.launch_swiglu(swiglu_fp8.FORWARD.allocate(args, "meta"), args, config)
        else:
            args = per_token.PerTokenCastArgs(x, 128 if op == "groups" else None, False, False)
            config = casts.configure(per_token.FORWARD.bucket(*args), x.dtype)
            casts.launch(per_token.FORWARD.allocate(args, "meta"), args, config)
    found = accesses(compiled[0].asm["ptx"])
    assert {access for access in found if access.startswith("ld")} == {"ld v4.b32"}
    assert found["st v2.b32"] > 0
    assert not {"st b8", "st b16"} & set(found)
