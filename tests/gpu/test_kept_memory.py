"""Device memory that is kept between calls: every cache on another stream, in captures, and after its owner's end.

The device is kept busy while a value is made, and the memory around it full of other numbers, so that what is read too
early, or too late, is wrong.
"""

import gc

import pytest
import torch
from tests.harness.kept_values import CASES

from tilewright import mask, ops
from tilewright.errors import InputError
from tilewright.hardware import graph_capture
from tilewright.nn import FP8Linear

pytestmark = pytest.mark.gpu

BUILDERS = [builder for builders in CASES.values() for builder in builders]
each_cache = pytest.mark.parametrize("builder", BUILDERS, ids=lambda b: b.__name__.strip("_"))
HALF = torch.bfloat16
BUSY = 100_000_000  # cycles: 50 ms


def expected_of(builder) -> torch.Tensor:
    """What a fresh owner gives; compiles what a capture may not."""
    made = builder()()
    torch.cuda.synchronize()
    return made


def overwrite_free_memory(stream: torch.cuda.Stream | None = None) -> list[torch.Tensor]:
    """A hundred allocations of many sizes, full of numbers no value has."""
    with torch.cuda.stream(stream):
        return [torch.full((1 << (9 + i % 12),), 0x7B, dtype=torch.uint8, device="cuda") for i in range(100)]


def graph_of(use) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = use()
    return graph, made


@each_cache
def test_first_in_a_capture(builder):
    expected, use = expected_of(builder), builder()
    torch.cuda.synchronize()
    first, in_first = graph_of(use)
    assert torch.equal(use(), expected), "a call before any replay"
    second, in_second = graph_of(use)
    second.replay()
    assert torch.equal(in_second, expected), "another graph, replayed first"
    first.replay()
    assert torch.equal(in_first, expected)


@each_cache
def test_two_captures_and_no_call(builder):
    expected, use = expected_of(builder), builder()
    torch.cuda.synchronize()
    (_first, _), (second, made) = graph_of(use), graph_of(use)
    second.replay()
    assert torch.equal(made, expected)


@each_cache
def test_first_on_another_stream(builder):
    expected, use = expected_of(builder), builder()
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    del overwrite_free_memory(one)[:]
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(BUSY)
        use()
    with torch.cuda.stream(other):
        made = use()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)


@each_cache
def test_first_on_another_stream_and_then_in_a_capture(builder):
    """A graph waits for nothing that was queued before its replay, on any stream."""
    expected, use = expected_of(builder), builder()
    torch.cuda.synchronize()
    one, capturing = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(BUSY)
        use()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capturing):  # `torch.cuda.graph` would wait for the device
        graph.capture_begin()
        made = use()
        graph.capture_end()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)


@each_cache
@pytest.mark.parametrize("before", [False, True], ids=["made in the capture", "made before"])
def test_a_graph_outlives_the_owner(builder, before):
    expected, use = expected_of(builder), builder()
    if before:
        use()
    graph, made = graph_of(use)
    del use
    gc.collect()
    taken = [overwrite_free_memory(), overwrite_free_memory(torch.cuda.Stream())]
    for _ in range(2):
        graph.replay()
        assert torch.equal(made, expected)
    del taken


@each_cache
def test_the_owner_ends_while_another_stream_reads(builder):
    expected, use = expected_of(builder), builder()
    use()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(BUSY)
        made = use()
    del use
    gc.collect()
    taken = overwrite_free_memory()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)
    del taken


@each_cache
def test_what_a_graph_holds_ends_with_it(builder):
    expected_of(builder)
    gc.collect()
    torch.cuda.synchronize()
    others = graph_capture.release()
    use = builder()
    use()
    graph, made = graph_of(use)
    graph.replay()
    torch.cuda.synchronize()
    held = graph_capture.release()
    assert held > 0
    del graph, made
    gc.collect()
    wait_for_release(min(others, held - 1))


def wait_for_release(count: int) -> None:
    """CUDA runs destructors on a thread of its own."""
    for _ in range(1000):
        torch.cuda.synchronize()
        if graph_capture.release() <= count:
            return
        torch.cuda._sleep(1_000_000)
    assert graph_capture.release() <= count


def test_layers_of_one_capture_share_a_program():
    """A model makes its mask once a forward, also while it is captured."""
    mask.document(torch.zeros(64, dtype=torch.int32, device="cuda")).program("cuda")
    ids = torch.arange(64, device="cuda") // 10
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mask.document(ids)
        programs = [made.program("cuda")[1] for _ in range(3)]
    assert len({p.data_ptr() for p in programs}) == 1
    graph.replay()
    assert torch.equal(programs[0].cpu(), mask.document(ids.cpu()).program("cpu")[1])


def test_a_mask_of_a_capture_is_refused_outside_of_it():
    ids = torch.arange(64, device="cuda") // 10
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = mask.document(ids)
        made.program("cuda")
    with pytest.raises(InputError, match="was made while a CUDA graph was captured"):
        made.program("cuda")


def test_attention_whose_mask_is_first_used_in_a_capture():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda").to(HALF) for _ in range(3))
    ids = torch.arange(512, device="cuda") // 100

    def call(m):
        return ops.fmha(q, k, v, mask=m, causal=True)

    expected = call(mask.document(ids))
    torch.cuda.synchronize()
    made = mask.document(ids)
    torch.cuda.synchronize()
    graph, inside = graph_of(lambda: call(made))
    assert torch.equal(call(made), expected)
    graph.replay()
    assert torch.equal(inside, expected)


def trained(**options) -> FP8Linear:
    torch.manual_seed(0)
    return FP8Linear(512, 512, dtype=torch.float32, device="cuda", **options).eval()


def test_a_step_of_another_model_leaves_a_graph_right():
    layer, x = trained(), torch.randn(16, 512, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        graph, made = graph_of(lambda: layer(x))
    stranger = torch.nn.Linear(8, 8, device="cuda")
    stranger(torch.ones(1, 8, device="cuda")).sum().backward()
    torch.optim.AdamW(stranger.parameters(), fused=True).step()
    with torch.no_grad():
        layer(x)
    taken = overwrite_free_memory()
    graph.replay()
    assert torch.equal(made, expected)
    del taken


WRITES = {
    "a fused step": lambda layer: torch.optim.AdamW([layer.weight], lr=0.5, fused=True).step(),
    "a step": lambda layer: torch.optim.SGD([layer.weight], lr=0.5).step(),
    "a state_dict": lambda layer: layer.load_state_dict({k: 2 * v for k, v in layer.state_dict().items()}),
    "uncounted": lambda layer: (layer.weight.data.mul_(2), layer.requantise()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_replays_see_weights_that_were_written(write):
    layer, x = trained(), torch.randn(16, 512, device="cuda")
    with torch.no_grad():
        before = layer(x)
        graph, made = graph_of(lambda: layer(x))
    layer.weight.grad = torch.randn_like(layer.weight)
    write(layer)
    taken = overwrite_free_memory()
    graph.replay()
    with torch.no_grad():
        expected = layer(x)
    assert not torch.equal(before, expected)
    assert torch.equal(made, expected)
    del taken


def test_weights_that_a_graph_trains_are_cast_in_every_call():
    layer = trained().train()
    x = torch.randn(16, 512, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=5.0)

    def step():
        optimizer.zero_grad(set_to_none=False)
        layer(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    layer.eval()
    with torch.no_grad():
        for _ in range(3):
            graph.replay()
            made = layer(x)
            fresh = FP8Linear.from_linear(torch.nn.Linear(512, 512, device="cuda")).eval()
            fresh.load_state_dict(layer.state_dict())
            assert torch.equal(made, fresh(x))
