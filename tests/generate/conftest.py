"""Fixtures of the decoding tests."""

import pytest
import torch
from tests.generate.tiny import build


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models():
    """`models(name)`: built once a session."""
    built = {}

    def get(name: str):
        if name not in built:
            built[name] = build(name)
        return built[name]

    return get
