"""A user's Triton kernel, tuned in Triton's interpreter."""

from pathlib import Path

import pytest

from tilewright import settings
from tilewright.dispatch.tables import table

pytestmark = pytest.mark.interp


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    settings.reload()
    table.forget()
    yield
    monkeypatch.undo()
    settings.reload()
    table.forget()


def test_a_triton_kernel_is_tuned_at_its_first_call(caplog):
    from tests.tuning.own_triton_kernel import check

    check("cpu")
    assert "BLOCK=64 num_warps=4: wrong: result 0" in caplog.text
