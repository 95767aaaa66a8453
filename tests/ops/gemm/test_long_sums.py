"""Float32 sums of many terms: short chains that are added up, not one long chain."""

import pytest
import torch

from tilewright.dispatch import contract
from tilewright.validate import check

LONG = {
    "grouped_matmul": {"G": 70, "M": 9, "N": 1025, "K": 32, "split": "random"},
    "k_grouped_matmul": {"G": 3, "M": 65, "N": 33, "K": 1025, "split": "even"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LONG)
def test_long_sums_round_as_torchs_do(name, seed):
    made = contract(name).inputs(LONG[name], torch.float32, torch.device("cuda"), seed)
    found = check(name, made, modes=["eager", "backward"], backend="triton", device="cuda")
    assert found.passed, found
