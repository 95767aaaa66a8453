"""What the compiler makes of the fused gate: groups stay in registers, in the lanes that loaded them."""

import pytest
import torch
from tests.ops.norm.fp8_kernels import lines

pytestmark = pytest.mark.compile


def test_groups_stay_in_the_lanes_that_loaded_them():
    from tilewright.ops.activation.kernels.triton.silu_fp8 import SIZES, _silu_fp8_kernel

    gate = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    q = torch.empty(64, 4096, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty(32, 64, device="meta").mT
    for config in SIZES:
        args = (q, scales, gate, gate, 64, 4096, 64, 4096, 4096, 0, 64, 0)
        text, shared = lines(_silu_fp8_kernel, args, (False, False, 1, config.rows, config.groups), config.num_warps)
        assert not [line for line in text if "convert_layout" in line and "x128x" in line]
        assert shared <= 4 * config.rows * config.groups  # scales on their way to their places
