"""Few-rows kernels start while the one before runs.  A chain in which each reads what the one before wrote, and writes
where that one read, has the bits of the same launches one at a time.
"""

import pytest
import torch
from tests.ops.gemm.test_few_rows_scaled import deepest, operands

from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.kernels.sm90 import few_rows, few_rows_scaled
from tilewright.ops.gemm.scaled.args import ScaledMatmulArgs
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.kernels.sm90 import weight_only_matmul as weight_only
from tilewright.ops.weight_only.kernels.sm90 import weight_only_model
from tilewright.ops.weight_only.samples import random_weight
from tilewright.ops.weight_only.weight_only_matmul import WeightOnlyMatmulArgs

pytestmark = pytest.mark.gpu

STEPS, WIDTH = 300, 1024
bf16, fp32 = torch.bfloat16, torch.float32


def dense(config):
    """y = W x, where W keeps the length of x on average."""
    w = (torch.randn(1, WIDTH, WIDTH, device="cuda") / WIDTH**0.5).to(bf16)
    return lambda y, x, step: few_rows.gemm(y, plain_args(x, w.mT, y.dtype), config)


def integers(bits, shape):
    """The same by a W of integers; scales of both signs, because integers of 4 bits are negative on average."""
    generator = torch.Generator().manual_seed(0)
    q, scales = random_weight(WIDTH, WIDTH, bits, bf16, torch.device("cuda"), generator)
    signs = torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1
    scales.mul_(signs.cuda()).div_(packing.restore(q, scales.double()).norm() / WIDTH**0.5)
    config = weight_only_model.deepest(bits, *shape)
    packed = (q, scales, None, "", bf16)
    return lambda y, x, step: weight_only.launch((y[0],), WeightOnlyMatmulArgs(x[0], *packed), config)


def scaled(rows, columns, depth, scaling, config):
    """y = alpha A B + x, with another alpha at each step."""
    a, b, *scales = operands(rows, columns, depth, scaling, device="cuda")
    return lambda y, x, step: few_rows_scaled.gemm(
        y, ScaledMatmulArgs(a, b, *scales, None, x, (step % 7 + 1) / 8, "", y.dtype), config
    )


CASES = {  # rows, columns, type of what is written, and the launch
    "few rows, alone": (8, WIDTH, bf16, lambda: dense(few_rows.Config(8, 4, 1, 2))),
    "few rows, a cluster": (8, WIDTH, bf16, lambda: dense(few_rows.Config(8, 3, 4, 3))),
    "4 bits": (13, WIDTH, bf16, lambda: integers(4, (16, 2, 4, 2, 1))),
    "8 bits": (1, WIDTH, bf16, lambda: integers(8, (8, 2, 4, 4, 2))),
    **{
        f"scaled, {scaling.name}": (
            1,
            576,
            fp32,
            lambda scaling=scaling: scaled(1, 576, 7168, scaling, deepest(8, 7, 3, scaling)),
        )
        for scaling in Scaling
        if scaling is not Scaling.OTHER
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_chain_has_the_bits_of_launches_one_at_a_time(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    rows, columns, dtype, make = CASES[case]
    launch = make()
    start = torch.randn(1, rows, columns, device="cuda").to(dtype)

    def chain(one_at_a_time):
        x, y = start.clone(), torch.full_like(start, torch.nan)
        torch.cuda.synchronize()
        for step in range(STEPS):
            launch(y, x, step)
            if one_at_a_time:
                torch.cuda.synchronize()
            x, y = y, x
        return x

    wanted = chain(one_at_a_time=True)
    assert wanted.isfinite().all() and (wanted != 0).any() and not torch.equal(wanted, start)
    for _ in range(5):
        assert torch.equal(chain(one_at_a_time=False), wanted)
