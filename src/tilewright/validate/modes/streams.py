"""GPU only: work goes to the current stream, can be captured into a graph, and reads its inputs at replay."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from tilewright.hardware.graph_capture import captured
from tilewright.validate.case import Case, Findings, NotApplicable, Other, overwrite, tensors
from tilewright.validate.modes.registry import mode

T = TypeVar("T")
REPLAYS = 3
DELAY = 40_000_000  # clock cycles by which the stream is delayed: about 20 ms, longer than launching takes


@mode("cuda_graph")
def cuda_graph(case: Case, findings: Findings) -> None:
    """Forward, and forward with backward, captured once and replayed three times, on new data each time."""
    _needs_gpu(case)
    sample = case.sample()
    outputs, replay = _captured(lambda: case.call(sample), case)
    for prefix, other in _replays(case):
        overwrite(sample, other.sample)
        replay()
        findings.outputs(outputs, f"{prefix}: ", other.truth)
        case.call(case.sample())  # an eager call between two replays shares no memory with the graph
    if not case.positions:
        return
    sample = case.sample()
    cotangents = [c.clone() for c in case.truth.cotangents]
    captured, replay = _captured(lambda: case.differentiate(sample, None, cotangents), case)
    for prefix, other in _replays(case):
        overwrite(sample, other.sample)
        for c, value in zip(cotangents, other.truth.cotangents, strict=True):
            c.copy_(value)
        replay()
        findings.outputs(captured[0], f"{prefix}, with gradients: ", other.truth)
        findings.gradients(captured[1], f"{prefix}: ", other.truth)
        case.differentiate(case.sample())


def _replays(case: Case) -> Iterator[tuple[str, Other]]:
    """The name of each replay, and its values."""
    for number in range(1, REPLAYS + 1):
        yield f"replay {number}", case.other(number)


@mode("side_stream")
def side_stream(case: Case, findings: Findings) -> None:
    """On another stream, after inputs that arrive late: a launch on the default stream would read NaN."""
    _needs_gpu(case)
    truth = case.truth.cotangents if case.positions else []
    cotangents = [torch.full_like(c, torch.nan if c.is_floating_point() else 0) for c in truth]
    late, arrived = case.sample(), case.sample()
    case.call(arrived)  # compiles, which would take longer than the delay
    if case.positions:
        case.differentiate(arrived)
    for t in tensors(late):
        if t.is_floating_point():
            t.fill_(torch.nan)
    torch.cuda.synchronize(case.device)
    grads = None
    with torch.cuda.stream(torch.cuda.Stream(case.device)):
        torch.cuda._sleep(DELAY)
        overwrite(late, arrived)
        for c, value in zip(cotangents, truth, strict=True):
            c.copy_(value)
        outputs = case.call(late)
        if case.positions:
            _, grads = case.differentiate(late, None, cotangents)
    torch.cuda.synchronize(case.device)
    findings.outputs(outputs)
    if grads is not None:
        findings.gradients(grads)


def _needs_gpu(case: Case) -> None:
    if case.device.type != "cuda":
        raise NotApplicable("needs a GPU")


def _captured(run: Callable[[], T], case: Case) -> tuple[T, Callable[[], None]]:
    """Capture `run`: (its result, the function that replays it)."""
    side = torch.cuda.Stream(case.device)
    side.wait_stream(torch.cuda.current_stream(case.device))
    with torch.cuda.stream(side):
        run()  # compiles and loads; neither can happen during capture
    torch.cuda.current_stream(case.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with captured(graph, case.device):
        result = run()
    return result, graph.replay
