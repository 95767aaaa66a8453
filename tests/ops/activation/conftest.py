"""What is said here of an op holds for its reference; kernels, which only come close, are named in their tests."""

from collections.abc import Iterator

import pytest

from tilewright import use_backend


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with use_backend("torch"):
        yield
