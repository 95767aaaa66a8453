"""What the compiler makes of the fused norms: rows stay in registers, in the layout of the plain norm."""

import re

import pytest
import torch
from tests.ops.norm.fp8_kernels import lines

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(("rows", "n", "warps"), [(1, 4096, 2), (1, 4096, 8), (4, 512, 4), (1, 14336, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_summed_in_the_layout_of_the_plain_norm(rows, n, warps, dtype):
    """The order of a sum is the layout's: with another one, the last bit of a norm would differ from `rms_norm`'s."""
    from tilewright.ops.norm.kernels.triton.rms_norm import _rms_norm_kernel
    from tilewright.ops.norm.kernels.triton.rms_norm_fp8 import _rms_norm_fp8_kernel

    block = 1 << (n - 1).bit_length()
    x, weight = torch.empty(64, n, dtype=dtype, device="meta"), torch.empty(n, dtype=dtype, device="meta")
    q, scales = (
        torch.empty(64, n, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(n // 128, 64, device="meta").mT,
    )
    unit = 16 // dtype.itemsize
    plain, _ = lines(_rms_norm_kernel, (x, x, weight, 64, n, n, 1e-6, 0.0), (False, rows, block, False), warps)
    fused, shared = lines(
        _rms_norm_fp8_kernel,
        (q, scales, None, x, None, weight, 64, n, 64, n, 0, n // unit, 64, 0, 1e-6, 0.0),
        (False, False, False, False, True, unit, rows, block),
        warps,
    )

    def of_rows(text):
        return [
            re.sub(r".*-> |.*: | loc.*", "", line) for line in text if "tt.load" in line and f"{rows}x{block}x" in line
        ]

    assert len(of_rows(plain)) == 1
    assert of_rows(fused) == of_rows(plain)
    moved = [line for line in fused if "convert_layout" in line and f"x{block}x" in line]
    assert not moved, "a row goes through shared memory"
    assert shared <= 1024  # partial sums of warps, scales on their way to their places


@pytest.mark.parametrize(
    ("n", "warps", "columns"), [(4096, 2, 1024), (7168, 2, 1024), (14336, 4, 2048), (7168, 4, 1024)]
)
def test_parts_of_a_row_stay_where_they_were_loaded(n, warps, columns):
    """Nothing is masked, and only sums and scales pass through shared memory."""
    from tilewright.ops.norm.kernels.triton.rms_norm_fp8_parts import _rms_norm_fp8_parts_kernel

    count = n // columns
    x, weight = torch.empty(64, n, dtype=torch.bfloat16, device="meta"), torch.empty(n, device="meta").bfloat16()
    q = torch.empty(64, n, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(n // 128, 64, device="meta").mT
    text, shared = lines(
        _rms_norm_fp8_parts_kernel,
        (q, scales, x, weight, n, 64, n, 64, 0, 1e-6, 0.0),
        (False, False, False, True, count, (count - 1).bit_length(), columns),
        warps,
    )
    loads = [line for line in text if "tt.load" in line]
    assert len(loads) == 2 * count
    assert all(re.search(r"tt\.load %\w+ :", line) for line in loads), "a mask"
    moved = [line for line in text if "convert_layout" in line and re.search(r"x(64|128)x(bf16|f16|f32|i32|f8)", line)]
    assert not moved, "a row goes through shared memory"
    assert shared <= 1024
