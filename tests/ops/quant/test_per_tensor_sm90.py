"""per_tensor_cast_to_fp8 in CUDA C++: which x it takes, how blocks divide it, its bits where they keep just enough."""

from types import SimpleNamespace

import pytest
import torch

from tilewright import ops
from tilewright.hardware.sm_budget import set_sm_budget
from tilewright.ops.quant.kernels.sm90 import per_tensor_cast as cuda
from tilewright.ops.quant.per_tensor_cast_to_fp8 import PerTensorCastArgs, bucket_of, reference

FP8 = torch.float8_e4m3fn
SMS = 132
FIRST = cuda.CONFIGS[0]
KEPT = FIRST.register_rows + FIRST.shared_rows


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cuda, "device_info", lambda _: SimpleNamespace(arch="sm_90"))


def elements(rows, sms, itemsize):
    """Elements of x that give every block so many rows."""
    return rows * sms * FIRST.threads * cuda.VECTOR // itemsize


# ------------------------------------------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.empty(3, 40, 8, dtype=torch.bfloat16), True),
        (torch.empty(1, 4), True),
        (torch.empty(37, 333, dtype=torch.bfloat16), False),  # 12321 elements are no whole vectors
        (torch.empty(8, 9, dtype=torch.bfloat16)[:, 1:], False),  # rows with gaps
        (torch.empty(65, dtype=torch.bfloat16)[1:].view(8, 8), False),  # begins at 2 bytes
        (torch.empty(8, 16, dtype=torch.bfloat16).mT, False),
        (torch.empty(0, 128), False),
    ],
    ids=["whole", "one vector", "ragged", "gaps", "misaligned", "transposed", "empty"],
)
def test_it_takes_runs_of_whole_vectors(hopper, x, taken):
    args = PerTensorCastArgs(x)
    assert (cuda.why_not(args) is None) == taken
    if x.numel():
        assert bucket_of(args).vectors == taken


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "device_info", lambda _: SimpleNamespace(arch="sm_80"))
    assert "sm_80" in cuda.why_not(PerTensorCastArgs(torch.empty(8, 8)))


def test_a_small_x_is_left_to_triton():
    small, large = (bucket_of(PerTensorCastArgs(torch.empty(m, 4096, dtype=torch.bfloat16))) for m in (64, 4096))
    assert cuda.configure(small, torch.bfloat16) is None
    assert cuda.configure(large, torch.bfloat16) in cuda.candidates(large, torch.bfloat16)


@pytest.mark.parametrize("config", cuda.CONFIGS, ids=str)
@pytest.mark.parametrize("sms", [SMS, 7])
@pytest.mark.parametrize("vectors", [1, 511, 512, 513, 512 * 132, 512 * 132 + 1, 3 * 512 * 132 + 5, 10**7])
def test_no_more_blocks_than_run_at_once_and_none_without_rows(monkeypatch, vectors, sms, config):
    calls = []
    monkeypatch.setattr(cuda, "usable_sms", lambda _: sms)
    for name in ("KERNEL", "PREPARE"):
        monkeypatch.setattr(cuda, name, lambda grid, args, params, **options: calls.append((grid, args, options)))
    x = torch.empty(vectors, 8, dtype=torch.bfloat16, device="meta")
    q, scale = torch.empty(vectors, 8, dtype=FP8, device="meta"), torch.empty(1, 1, device="meta")
    cuda.launch((q, scale), PerTensorCastArgs(x), config)
    (prepared_by, prepared, _), ((blocks,), args, options) = calls
    assert args.vectors == vectors
    assert 1 <= blocks <= max(1, min(sms, vectors // options["block"]))
    assert prepared_by == (1,)
    assert prepared.meeting is args.meeting


# -------------------------------------------------------------------------------------------------------- on a Hopper


def assert_reference_bits(x, config=FIRST):
    q, scale = torch.full_like(x, 77, dtype=FP8), torch.full((1, 1), torch.nan, device="cuda")
    cuda.launch((q, scale), PerTensorCastArgs(x), config)
    expected, expected_scale = reference(x)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    number = ~expected.float().isnan()
    assert torch.equal(~q.float().isnan(), number)
    assert torch.equal(q.view(torch.uint8)[number], expected.view(torch.uint8)[number])


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    yield
    set_sm_budget(None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, FIRST.register_rows, KEPT, KEPT + 1, 2 * KEPT + 3, 4 * KEPT])
@pytest.mark.parametrize("more", [-16, 16, 4096])
@pytest.mark.parametrize("config", cuda.CONFIGS, ids=str)
def test_bits_around_what_blocks_keep(on_hopper, rows, more, dtype, config):
    set_sm_budget(3)
    x = torch.randn(max(16, elements(rows, 3, dtype.itemsize) + more), device="cuda").mul_(50).to(dtype)
    assert_reference_bits(x.view(-1, 16), config)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 1, -1, 4_000_003])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3e4])
def test_one_element_decides_the_scale(on_hopper, place, value):
    """It lies in the first vector, in the last one, or in another block."""
    x = torch.randn(4096 * 4096, device="cuda", dtype=torch.bfloat16)
    x[place] = value
    assert_reference_bits(x.view(4096, 4096))


@pytest.mark.gpu
def test_two_streams_at_once(on_hopper):
    """Blocks of two launches wait for those of their own: neither may hold the places of the other for ever."""
    x = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * (i + 1) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()
    made = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made[i].append(ops.per_tensor_cast_to_fp8(x[i], backend="cuda"))
    torch.cuda.synchronize()
    for i, results in enumerate(made):
        expected, expected_scale = reference(x[i])
        for q, scale in results:
            assert torch.equal(scale, expected_scale)
            assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
