"""The kernels of `kernels/sm90` on a Hopper GPU: every cluster size and block size gives the reference's results.

Rows are random, full of ties, flat, equal, of one number, sorted (the largest all in one block) and spoilt; they begin
at odd elements, between numbers that would be chosen.
"""

import pytest
import torch
from torch import Tensor

from tilewright import ops
from tilewright.ops.sampling import checks
from tilewright.ops.sampling.greedy import GreedyArgs
from tilewright.ops.sampling.kernels.sm90 import greedy, sample, top_k, top_k_short
from tilewright.ops.sampling.sample import raw_arguments
from tilewright.ops.sampling.sample_reference import draw_tokens
from tilewright.ops.sampling.top_k import TopKArgs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 16
KINDS = {
    "random": lambda n: torch.randn(ROWS, n, device="cuda") * 3,
    "ties": lambda n: (torch.randn(ROWS, n, device="cuda") * 2).round(),
    "flat": lambda n: torch.randn(ROWS, n, device="cuda") * 0.1,
    "equal": lambda n: torch.full((ROWS, n), -2.5, device="cuda"),
    "one": lambda n: torch.full((ROWS, n), -torch.inf, device="cuda").index_fill(
        1, torch.tensor([n // 2], device="cuda"), 1.0
    ),
    "sorted": lambda n: (torch.randn(ROWS, n, device="cuda") * 3).sort(-1).values,
}
SIZES = [1, 2, 333, 50257, 131072, 151936, 262144]


def rows(kind: str, n: int, dtype: torch.dtype) -> Tensor:
    """A view (ROWS, n) with +inf around each row."""
    x = torch.full((ROWS, n + 5), torch.inf, dtype=dtype, device="cuda")[:, 1 : n + 1]
    x.copy_(KINDS[kind](n))
    if kind == "random":
        checks.spoil(x[4:9])
    return x


def pick(values, dtype):
    return torch.tensor([values[i % len(values)] for i in range(ROWS)], dtype=dtype, device="cuda")


PARAMETERS = {
    "temperature": ((1.0, 0.5, 2.0, 0.0, 1.0, 0.8, 1e-3), torch.float32),
    "top_k": ((0, 5, 1, 50, 200, 9, 5000, 0, 100000), torch.int32),
    "top_p": ((0.9, 1.0, 0.3, 1e-8, 0.99), torch.float32),
    "min_p": ((0.0, 0.0, 0.05, 0.0, 0.3), torch.float32),
}


def arguments(x: Tensor, names: tuple[str, ...], logprobs: int):
    positions = torch.arange(ROWS, device="cuda") + 7
    given = (pick(*PARAMETERS[name]) if name in names else None for name in PARAMETERS)
    return raw_arguments(x, positions * 5, positions, *given, logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_sample(n, dtype):
    for kind in KINDS if n < 200000 else ("random", "ties", "sorted"):
        x = rows(kind, n, dtype)
        for logprobs, names in enumerate((("temperature", "top_p"), tuple(PARAMETERS), ("top_k", "top_p"))):
            args = arguments(x, names, logprobs)
            wanted, wanted_logs = draw_tokens(args)
            for config in sample.candidates(sample.SampleBucket(ROWS, n, 3), dtype):
                tokens = torch.full((ROWS,), -7, device="cuda")
                logs = torch.full((ROWS if logprobs else 0,), torch.nan, device="cuda")
                sample.launch((tokens, logs), args, config)
                assert torch.equal(tokens, wanted), (kind, names, config)
                torch.testing.assert_close(logs, wanted_logs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [*SIZES, 8, 9, 4097])
def test_greedy(n, dtype):
    for kind in KINDS:
        x = rows(kind, n, dtype)
        x[-1, -1:], x[-2, :1] = torch.inf, torch.inf
        wanted = ops.greedy(x, backend="torch")
        for config in greedy.CONFIGS:
            tokens = torch.full((ROWS,), -7, device="cuda")
            greedy.launch((tokens,), GreedyArgs(x), config)
            assert torch.equal(tokens, wanted), (kind, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (300, 8), (1024, 32), (700, 500), (5000, 64), (65536, 2048), (131072, 20)]
)
def test_top_k(n, k, dtype):
    for kind in KINDS:
        x = rows(kind, n, dtype)
        _, wanted = ops.top_k(x, k, backend="torch")
        runs = [(top_k, config) for config in top_k.candidates(top_k.TopKBucket(ROWS, n, k), dtype)]
        if top_k_short.why_not(TopKArgs(x, k)) is None:
            runs += [(top_k_short, config) for config in top_k_short.candidates(top_k.TopKBucket(ROWS, n, k), dtype)]
        for module, config in runs:
            values = torch.zeros((ROWS, k), dtype=dtype, device="cuda")
            indices = torch.full((ROWS, k), -7, device="cuda")
            module.launch((values, indices), TopKArgs(x, k), config)
            assert torch.equal(indices, wanted), (kind, module.__name__, config)
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(values.view(bits), x.view(bits).gather(1, wanted))


def test_repeats_streams_and_single_rows():
    """A thousand calls, one on another stream, and each row alone give the same bits; so does Triton."""
    n = 131072
    x = rows("random", n, torch.float32)
    args = arguments(x, tuple(PARAMETERS), 2)
    parameters = dict(zip(PARAMETERS, args[3:7], strict=True))

    def call(chosen, backend):
        own = {name: parameter[chosen] for name, parameter in parameters.items()}
        return ops.sample(*(t[chosen] for t in args[:3]), **own, logprobs="model", backend=backend)

    everything = slice(0, ROWS)
    tokens, logs = (t.clone() for t in call(everything, "cuda"))
    assert torch.equal(call(everything, "triton")[0], tokens)
    for _ in range(1000):
        again = call(everything, "cuda")
        assert torch.equal(again[0], tokens)
        assert torch.equal(again[1], logs)
        again[0].fill_(-7)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = call(everything, "cuda")
    stream.synchronize()
    assert torch.equal(there[0], tokens)
    for i in range(ROWS):
        assert torch.equal(call(slice(i, i + 1), "cuda")[0], tokens[i : i + 1])


def test_a_graph_serves_other_parameters():
    x = rows("random", 50257, torch.bfloat16)
    args = arguments(x, tuple(PARAMETERS), 1)
    parameters = dict(zip(PARAMETERS, args[3:7], strict=True))

    def call(backend):
        return ops.sample(*args[:3], **parameters, logprobs="sampled", backend=backend)

    call("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = call("cuda")
    for _ in range(5):
        x.copy_(rows("random", 50257, torch.bfloat16))
        args.positions.add_(1)
        for parameter in parameters.values():
            parameter.copy_(parameter.roll(1))
        tokens.fill_(-7)
        graph.replay()
        assert torch.equal(tokens, call("torch")[0])
