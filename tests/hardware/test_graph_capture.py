"""A capture that fails leaves torch as it was: its stream current, its generators out of capture state."""

from contextlib import contextmanager

import pytest
import torch

from tilewright.hardware.graph_capture import captured

DEVICE = torch.device("cuda")


class Graph:
    """Keeps the generators that are registered with it."""

    def __init__(self):
        self.generators = []

    def register_generator_state(self, generator):
        self.generators.append(generator)


class Torch:
    """What `captured` calls of torch: a failed capture leaves `stream` current and `capturing` true."""

    def __init__(self):
        self.stream, self.capturing, self.ended = "user's", False, []

    @contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        before, self.stream, self.capturing = self.stream, stream, True
        yield
        self.stream, self.capturing = before, False
        self.ended.append((graph, pool, capture_error_mode))

    def set_stream(self, stream):
        self.stream = stream


@pytest.fixture
def fake(monkeypatch):
    made = Torch()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", made.set_stream)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    return made


def test_a_capture_is_torchs(fake):
    graph = Graph()
    with captured(graph, DEVICE, stream="side", pool=3, error_mode="thread_local", generators=["own"]):
        assert (fake.stream, fake.capturing) == ("side", True)
    assert fake.ended == [(graph, 3, "thread_local")]
    assert graph.generators == ["own"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_another_capture_ends(fake, error):
    graph = Graph()
    with pytest.raises(error, match="in the block"), captured(graph, DEVICE, stream="side", generators=["own"]):
        raise error("in the block")
    assert (fake.stream, fake.capturing) == ("user's", False)
    ((another, pool, _),) = fake.ended
    assert another is not graph
    assert pool is None
    assert another.generators == ["own"]


@pytest.mark.gpu
def test_random_numbers_and_captures_after_a_failure():
    x, stream = torch.ones(64, device="cuda"), torch.cuda.current_stream()
    own = torch.Generator("cuda")
    with pytest.raises(RuntimeError), captured(torch.cuda.CUDAGraph(), x.device, generators=[own]):
        x.sum().item()
    assert torch.cuda.current_stream() == stream
    for generator in (None, own):
        assert torch.rand(64, device="cuda", generator=generator).isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with captured(graph, x.device):
        x += 1
    graph.replay()
    assert torch.equal(x.cpu(), torch.full((64,), 2.0))
