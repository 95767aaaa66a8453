"""Few queries behind many keys: `fmha` and `fmha_varlen` go to the kernels of attention over a KV cache."""

from itertools import accumulate

import pytest
import torch
from tests.ops.attention.test_fmha_cuda import on_hopper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright import mask as masks
from tilewright import ops
from tilewright.dispatch import record
from tilewright.hardware import arch
from tilewright.jit.collect import collect
from tilewright.ops.attention import fmha_fp8
from tilewright.ops.attention.kernels.sm90 import few_queries as cuda
from tilewright.ops.attention.kernels.triton.paged import places
from tilewright.ops.quant.numbers import E4M3
from tilewright.warmup.calls import RawCall

KEYS = (300, 0, 5, 600, 64, 1, 77)  # 1024 are rounded up to
QUERIES = (1, 1, 1, 1, 0, 1, 2)


def boundaries(lengths, device="cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed(heads=4, kv_heads=2, d=16, by_head=False) -> tuple[Tensor, ...]:
    """q, k, v and both boundaries, with tokens behind the last sequence."""
    generator = torch.Generator().manual_seed(3)

    def made(tokens, count):
        shape = (count, tokens, d) if by_head else (tokens, count, d)
        t = torch.randn(shape, generator=generator)
        return t.transpose(0, 1) if by_head else t

    q, k, v = made(sum(QUERIES) + 1, heads), made(sum(KEYS) + 3, kv_heads), made(sum(KEYS) + 3, kv_heads)
    return q, k, v, boundaries(QUERIES), boundaries(KEYS)


def dense(batch=2, heads=4, kv_heads=2, s_q=3, s_k=600, d=16, by_token=False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def made(rows, count):
        shape = (batch, rows, count, d) if by_token else (batch, count, rows, d)
        t = torch.randn(shape, generator=generator)
        return t.transpose(1, 2) if by_token else t

    return made(s_q, heads), made(s_k, kv_heads), made(s_k, kv_heads)


def exact(op, tensors, **options):
    """(o, lse) in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    options = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
    return op(*wide, return_lse=True, backend="torch", **options)


def check(op, tensors, kernel, **options):
    with record() as recording:
        o, lse = op(*tensors, return_lse=True, backend=kernel.partition(".")[0], **options)
    assert [plan.kernel for plan in recording.plans] == [kernel]
    expected_o, expected_lse = exact(op, tensors, **options)
    torch.testing.assert_close(o.double(), expected_o, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-5)
    assert torch.equal(op(*tensors, backend=kernel.partition(".")[0], **options), o)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("by_head", "options"),
    [
        (False, {"causal": True, "window": (20, 0), "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])}),
        (True, {"window": (3, 2), "softcap": 3.0, "scale": 0.3}),
    ],
    ids=["window", "both_sides"],
)
def test_packed_queries_read_their_keys_where_they_lie(by_head, options):
    check(ops.fmha_varlen, packed(by_head=by_head), "triton.few_queries", **options)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"causal": True, "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])}),
        ({"by_token": True, "s_k": 1100}, {"mask": masks.window(1030), "softcap": 2.0}),
        ({"batch": 1, "s_q": 2}, {}),
        ({"s_q": 1, "heads": 2}, {"causal": True}),
    ],
    ids=["by_head", "by_token", "one_sequence", "one_query"],
)
def test_keys_of_few_queries_are_a_cache(sizes, options):
    check(ops.fmha, dense(**sizes), "triton.few_queries", **options)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"causal": True, "sinks": torch.tensor([0.5, -3.0, 2.0, 9.0])}),
        ({"by_token": True, "s_k": 1100}, {"window": (1030, 0), "softcap": 2.0}),
        ({"s_q": 1, "heads": 2}, {"scale": -0.3}),
    ],
    ids=["by_head", "by_token", "one_query"],
)
def test_keys_in_e4m3_are_a_cache_with_scales_of_sequences(sizes, options):
    tensors = [t.to(E4M3) for t in dense(**sizes)]
    scales = [2 * torch.rand(t.shape[:2]) + 0.1 for t in tensors]
    with record() as recording:
        o, lse = ops.fmha_fp8(*tensors, *scales, return_lse=True, out_dtype=torch.float32, backend="triton", **options)
    assert [plan.kernel for plan in recording.plans] == ["triton.few_queries"]
    wide = [t.double() for t in (*tensors, *scales)]
    options = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
    expected_o, expected_lse = fmha_fp8.reference(*wide, return_lse=True, **options)
    torch.testing.assert_close(o.double(), expected_o, atol=2e-3, rtol=2e-3)  # probabilities in float16
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-5)


# ----------------------------------------------------------------------------------------------- what is chosen

HALF = torch.bfloat16


def planned(op, *tensors, mode="default", **options):
    """The kernel that an H200 would run; "" for torch.   tensors: fake ones."""
    if arch("cuda") != "sm_90":
        pytest.skip("a GPU of another architecture is present, and plans are made for it")
    with record() as recording:
        op(*tensors, **options)
    raw, args, *_ = recording.calls[0]
    return raw.plan(RawCall(raw, args).on("cuda"), "auto", mode).kernel


@pytest.mark.parametrize(
    ("queries", "keys", "sequences", "heads", "d", "kernel"),
    [
        (27, 30000, 27, (4, 4), 256, "sm90.few_queries"),
        (39, 32000, 39, (10, 10), 128, "sm90.few_queries"),
        (64, 60000, 64, (32, 32), 128, "sm90.few_queries"),
        (128, 60000, 32, (16, 2), 128, "sm90.few_queries"),
        (128, 60000, 32, (32, 32), 128, "sm90.forward"),
        (64, 60000, 1, (8, 8), 64, "sm90.forward"),
        (64, 600, 64, (8, 8), 64, "sm90.forward"),
        (2000, 2000, 2000, (8, 8), 64, "sm90.forward"),
        (39, 32000, 39, (10, 10), 80, "sm90.forward"),
    ],
    ids=["gemma", "llama", "many", "drafts", "drafts_of_many_heads", "chunk", "few_keys", "own_keys", "d_80"],
)
def test_packed_decoding_divides_the_keys(queries, keys, sequences, heads, d, kernel):
    with FakeTensorMode():
        q, k = (torch.empty(n, h, d, dtype=HALF) for n, h in zip((queries, keys), heads, strict=True))
        cu_q, cu_k = (torch.empty(sequences + 1, dtype=torch.int32) for _ in range(2))
        assert planned(ops.fmha_varlen, q, k, k, cu_q, cu_k, causal=True) == kernel


@pytest.mark.parametrize(
    ("sizes", "options", "kernel"),
    [
        ((1, 8, 1, 2, 16384, 64), {"causal": True, "sinks": True}, "sm90.few_queries"),
        ((1, 8, 1, 2, 16384, 64), {"mask": masks.window(4096)}, "sm90.few_queries"),
        ((1, 8, 1, 2, 16384, 64), {"mask": masks.window(128)}, "sm90.forward"),
        ((1, 8, 1, 2, 16384, 64), {"mask": masks.window(128, 1)}, "sm90.forward"),
        ((4, 32, 8, 1, 8192, 128), {}, ""),
        ((4, 32, 8, 1, 8192, 128), {"softcap": 30.0}, "sm90.few_queries"),
        ((16, 40, 8, 5, 1500, 128), {"causal": True}, "sm90.few_queries"),
        ((1, 8, 1, 2, 32768, 256), {"causal": True}, "sm90.few_queries"),
        ((4, 16, 16, 8, 300, 128), {"causal": True}, "sm90.forward"),
    ],
    ids=["sinks", "window", "narrow_window", "window_ahead", "cudnn", "softcap", "row_tiles", "gemma", "few_keys"],
)
def test_decoding_divides_the_keys_where_cudnn_does_not(sizes, options, kernel):
    batch, heads, kv_heads, s_q, s_k, d = sizes
    with FakeTensorMode():
        q = torch.empty(batch, heads, s_q, d, dtype=HALF)
        k = torch.empty(batch, kv_heads, s_k, d, dtype=HALF)
        sinks = {"sinks": torch.empty(heads)} if options.get("sinks") else {}
        assert planned(ops.fmha, q, k, k, **{**options, **sinks}) == kernel


@pytest.mark.parametrize("mode", ["default", "batch_invariant"])
def test_other_sequences_may_decide_how_keys_are_divided(mode):
    """So under batch_invariant the kernel for prefill runs, which divides none."""
    with FakeTensorMode():
        q, k = torch.empty(1, 8, 2, 64, dtype=HALF), torch.empty(1, 8, 4096, 64, dtype=HALF)
        kernel = planned(ops.fmha, q, k, k, mode=mode, causal=True)
    assert kernel == ("sm90.few_queries" if mode == "default" else "sm90.forward")


# ------------------------------------------------------------------------------------------------- what is launched


def raw_call(op, *tensors, **options):
    """The raw arguments of a call in bf16, and their bucket."""
    with record() as recording:
        op(*(t.to(HALF) if t.is_floating_point() else t for t in tensors), **options)
    raw, args, *_ = recording.calls[0]
    return raw.pack(args), raw.bucket_of(args, "default")


def test_the_pages_of_packed_keys_begin_at_every_token():
    k = torch.randn(2, 40, 16)[:, 3:][None]  # (1, H_kv, T, D), a view
    cache = places._from_every_token(k)
    (page, slot, head, _), start = cache.stride(), cache.storage_offset()
    for first, i in ((0, 0), (5, 7), (36, 0)):
        found = cache.as_strided((2, 16), (head, 1), start + first * page + i * slot)
        assert torch.equal(found, k[0, :, first + i])


@pytest.mark.parametrize(
    ("op", "tensors", "names"),
    [
        (ops.fmha_varlen, packed(d=64), ["_lengths_kernel", "sm90_decode", "sm90_decode_combine", "_rows_kernel"]),
        (ops.fmha, dense(d=64, s_q=1), ["_lengths_kernel", "sm90_decode"]),
        (ops.fmha, dense(d=64, by_token=True), ["_lengths_kernel", "sm90_decode", "_rows_kernel"]),
        (ops.fmha, dense(d=64), ["_lengths_kernel", "_rows_kernel", "sm90_decode", "_rows_kernel"]),
    ],
    ids=["packed", "one_query", "by_token", "by_head"],
)
def test_launches_of_cuda(op, tensors, names):
    args, bucket = raw_call(op, *tensors)
    o = torch.empty_like(args.q)
    with collect("sm_90") as collector:
        cuda.launch((o, torch.empty(o.shape[:3])), args, cuda.configure(bucket, HALF))
    assert [job.name for job in collector.jobs] == names


@pytest.mark.compile
def test_the_launches_beside_it_are_small():
    for op, tensors in ((ops.fmha_varlen, packed(d=64)), (ops.fmha, dense(d=64))):
        args, _ = raw_call(op, *tensors)
        outs = torch.empty_like(args.q), torch.empty(args.q.shape[:3])
        with collect("sm_90") as collector:
            places.end(outs, places.begin(outs, args))
        for job in collector.jobs:
            job.compile()


# ----------------------------------------------------------------------------------------------- what it computes

DEVICE_CASES = {
    "decode": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0), "sinks": True},
    "both_sides": {"window": (30, 20), "softcap": 4.0},
}


def judged(op, tensors, **options):
    """At most twice as far from float64 as the reference in bf16, the same bits again, by the kernel for decoding."""
    with record() as recording:
        o, lse = op(*tensors, return_lse=True, backend="cuda", **options)
    assert [plan.kernel for plan in recording.plans] == ["sm90.few_queries"]
    wanted, wanted_lse = exact(op, tensors, **options)
    rounded = op(*tensors, backend="torch", **options)
    allowed = 2 * (rounded.double() - wanted).abs().amax() + 2e-3 * wanted.abs().amax()
    assert bool((o.double() - wanted).abs().amax() <= allowed)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=3e-3)
    assert torch.equal(op(*tensors, backend="cuda", **options), o)


def on_gpu(tensors):
    return tuple(t.to("cuda", HALF) if t.is_floating_point() else t.to("cuda") for t in tensors)


def with_sinks(options, heads=8):
    return {**options, "sinks": torch.linspace(-3, 4, heads, device="cuda")} if options.get("sinks") else options


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("case", DEVICE_CASES)
def test_packed_queries_on_hopper(case, d):
    on_hopper()
    for kv_heads in (1, 8):
        tensors = on_gpu(packed(8, kv_heads, d, by_head=kv_heads == 8))
        judged(ops.fmha_varlen, tensors, **with_sinks(DEVICE_CASES[case]))


@pytest.mark.gpu
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 8])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "sinks": True}, {"mask": masks.window(1030), "softcap": 4.0}], ids=str
)
def test_few_queries_on_hopper(options, s_q, by_token):
    on_hopper()
    for batch, kv_heads, s_k, d in ((1, 1, 16384, 64), (3, 4, 1100, 128), (2, 2, 2000, 256)):
        tensors = on_gpu(dense(batch, 8, kv_heads, s_q, s_k, d, by_token))
        judged(ops.fmha, tensors, **with_sinks(options))


@pytest.mark.gpu
def test_gradients_go_through_its_lse():
    on_hopper()
    q, k, v, cu_q, cu_k = on_gpu(packed(8, 2, 64))
    grads = []
    for dtype, backend in ((HALF, "cuda"), (torch.float64, "torch")):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        o, lse = ops.fmha_varlen(*leaves, cu_q, cu_k, causal=True, return_lse=True, backend=backend)
        sees = ~lse.isinf()
        grads.append(torch.autograd.grad(o.double().sum() + lse[sees].double().sum(), leaves))
    for made, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(made.double(), wanted, rtol=0.03, atol=0.03)


@pytest.mark.gpu
def test_a_graph_serves_other_lengths():
    on_hopper()
    q, k, v, cu_q, cu_k = on_gpu(packed(8, 2, 64))

    def call():
        return ops.fmha_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, backend="cuda")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call()
    for lengths_q, lengths_k in ((QUERIES, KEYS), ((0, 3, 0, 1, 1, 1, 1), (7, 900, 2, 0, 1, 90, 50))):
        cu_q.copy_(boundaries(lengths_q, "cuda"))
        cu_k.copy_(boundaries(lengths_k, "cuda"))
        graph.replay()
        for made, wanted in zip(outs, exact(ops.fmha_varlen, (q, k, v, cu_q, cu_k), causal=True), strict=True):
            torch.testing.assert_close(made.double(), wanted, rtol=0.02, atol=0.02)
