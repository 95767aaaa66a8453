"""A user's Triton kernel, tuned in Triton's interpreter."""

import pytest

pytestmark = [pytest.mark.interp, pytest.mark.usefixtures("own_cache")]


def test_a_triton_kernel_is_tuned_at_its_first_call(caplog):
    from tests.tuning.own_triton_kernel import check

    check("cpu")
    assert "BLOCK=64 num_warps=4: wrong: result 0" in caplog.text
