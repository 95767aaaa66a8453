"""`tilewright.tune` on a GPU: device times from CUDA graphs, captures, functions that cannot be captured, streams."""

import pytest
import torch

import tilewright
from tilewright.dispatch.tables import table

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

SPACE = {"PARTS": (64, 1, 16)}


def by_parts(**options):
    """y += x in so many launches: one is the fastest."""

    @tilewright.tune(space=SPACE, key=lambda x, y: {"N": x.shape[0]}, restore=("y",), **options)
    def add(x, y, *, PARTS):
        if options.get("name") == "synchronous":
            x.sum().item()
        for ours, theirs in zip(y.chunk(PARTS), x.chunk(PARTS), strict=True):
            ours += theirs
        return PARTS

    return add


def test_a_triton_kernel_is_tuned_at_its_first_call(caplog):
    from tests.tuning.own_triton_kernel import check

    check("cuda")
    assert "BLOCK=64 num_warps=4: wrong: result 0" in caplog.text


@pytest.mark.parametrize("elements", [1 << 14, 1 << 24])
def test_the_fastest_wins_and_the_arguments_see_one_call(elements):
    add = by_parts(name="add")
    x, y = torch.randn(elements, device="cuda"), torch.ones(elements, device="cuda")
    assert add(x, y) == 1
    assert torch.equal(y, 1 + x)
    assert table.lookup("user.add", "fwd", f"N={elements}", "x=float32,y=float32", "default", _info()).us < 200


def _info():
    from tilewright.hardware import device_info

    return device_info("cuda")


def test_a_capture_never_measures_and_takes_what_is_stored():
    add, x = by_parts(name="captured"), torch.randn(1 << 14, device="cuda")
    y = torch.zeros_like(x)
    graph, parts = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        parts.append(add(x, y))
    graph.replay()
    assert parts == [64], "the default"
    assert torch.equal(y, x)
    assert add(x, y) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts.append(add(x, y))
    assert parts == [64, 1]


def test_a_function_that_cannot_be_captured_is_timed_without_graphs(caplog):
    caplog.set_level("INFO", "tilewright")
    add, x = by_parts(name="synchronous"), torch.randn(1 << 14, device="cuda")
    y = torch.zeros_like(x)
    stream = torch.cuda.current_stream()
    assert add(x, y) in SPACE["PARTS"], "which is fastest is a matter of wall time"
    assert torch.equal(y, x)
    assert "is timed without CUDA graphs" in caplog.text
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").isfinite().all(), "a failed capture leaves torch's generator in capture state"
    graph = torch.cuda.CUDAGraph()  # and captures work afterwards
    with torch.cuda.graph(graph):
        y += x
    graph.replay()
    assert torch.equal(y, 2 * x)


def test_a_first_call_on_a_side_stream():
    add, stream = by_parts(name="streamed"), torch.cuda.Stream()
    x = torch.randn(1 << 14, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = torch.zeros_like(x)
        assert add(x, y) == 1
    stream.synchronize()
    assert torch.equal(y, x)
