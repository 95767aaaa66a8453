"""int8_matmul: exact sums, the order of its roundings, the limit of K, and what its Triton kernel makes of tiles."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.dispatch import contract
from tilewright.errors import InputError
from tilewright.ops.gemm.int8_matmul import MOST_K, Int8MatmulArgs, Int8MatmulBucket, cublas_sums, sums

interp = pytest.mark.interp
POISON = -77.0


def problem(m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8, generator=g) for rows in (m, n))
    return a, b, *(torch.exp2(4 * torch.rand(rows, 1, generator=g) - 8) for rows in (m, n))


def exact(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """In integers, then in float64."""
    return (a.long()[:, None] * b.long()).sum(-1).double() * scale_a.double() * scale_b.double().T


@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 3), (7, 9, 4096), (2, 1, MOST_K), (0, 3, 8), (3, 2, 0), (1, 1, 1)])
def test_a_float32_result_is_off_by_three_roundings(m, n, k):
    """Of the sum, and of two products by scales: also where float32 sums of products would lose digits."""
    a, b, scale_a, scale_b = problem(m, n, k)
    if k == MOST_K:
        a.fill_(-128), b.fill_(-128)
    wanted = exact(a, b, scale_a, scale_b)
    got = ops.int8_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32)
    assert got.shape == (m, n) and got.dtype == torch.float32
    assert ((got.double() - wanted).abs() <= 3.1 * 2**-24 * wanted.abs()).all()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 3), (16, 8, 8), (17, 16, 32), (33, 30, 40)])
def test_cublas_gets_sizes_that_it_takes(m, n, k, monkeypatch):
    def int_mm(x, y):
        assert x.shape[0] > 16 and x.shape[1] % 8 == y.shape[1] % 8 == 0
        return (x.long() @ y.long()).int()

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    a, b, _, _ = problem(m, n, k)
    assert torch.equal(cublas_sums(a, b).double(), sums(a, b))


def test_a_sum_that_int32_may_not_hold_is_refused():
    a, scale = torch.full((1, MOST_K + 1), -128, dtype=torch.int8), torch.ones(1, 1)
    with pytest.raises(InputError, match="K is 131072; at most 131071"):
        ops.int8_matmul(a, a, scale, scale)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", ["a", "scale_a", "bias"])
@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_without_strides_are_refused_before_anything_reads_them(name, kind):
    a, b, scale_a, scale_b = problem(4, 6, 8)
    arguments = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": torch.ones(6)}
    t = arguments[name]
    arguments[name] = t.to_sparse() if kind == "sparse" else torch.nested.nested_tensor(list(t[:2, None]))
    with pytest.raises(InputError, match=rf"{name} is (a )?{kind}"):
        ops.int8_matmul(**arguments)


def test_the_epilogue_rounds_once():
    one = torch.ones(1, 1, dtype=torch.int8)
    bias = torch.tensor([2.0**-8 + 2.0**-9])  # 1 + this is between two bfloat16; rounding twice would lose it
    assert ops.int8_matmul(one, one, torch.ones(1, 1), torch.ones(1, 1), bias=bias).item() == 1 + 2.0**-7


def test_a_scale_that_is_not_finite_stays_in_its_row():
    a, b, scale_a, scale_b = problem(3, 4, 16)
    scale_a[1] = torch.nan
    got = ops.int8_matmul(a, b, scale_a, scale_b)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_linear_layers_of_w8a8():
    """Casts and product together are the float layer to within the rounding of 8 bits."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 5, 64), torch.randn(48, 64), torch.randn(48)
    (q, scales), (weight, channels) = ops.per_token_cast_to_int8(x), ops.per_token_cast_to_int8(w)
    got = ops.int8_matmul(q, weight, scales, channels, bias=bias, activation="silu", out_dtype=torch.float32)
    assert got.shape == (2, 5, 48)
    torch.testing.assert_close(got, F.silu(F.linear(x, w, bias)), rtol=0.03, atol=0.25)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interp)])
def test_views_leading_dimensions_and_one_scale_for_all(backend):
    a, b, _, scale_b = problem(12, 16, 32)
    scale = torch.tensor([[0.5]])
    wanted = ops.int8_matmul(a, b, scale.expand(12, 1).contiguous(), scale_b, backend=backend)
    folded = ops.int8_matmul(a.view(3, 4, 32), b, scale.expand(3, 4, 1), scale_b, backend=backend)
    assert torch.equal(folded, wanted.view(3, 4, 16))
    wide = torch.zeros(12, 40, dtype=torch.int8)
    wide[:, 3:35] = a
    views = wide[:, 3:35], b.T.contiguous().T, scale.expand(12, 1), scale_b.repeat(1, 2)[:, :1]
    assert torch.equal(ops.int8_matmul(*views, backend=backend), wanted)
    out = torch.full((12, 24), POISON, dtype=torch.bfloat16)
    ops.int8_matmul(*views, out=out[:, 2:18], backend=backend)
    assert torch.equal(out[:, 2:18], wanted) and (out[:, :2] == POISON).all() and (out[:, 18:] == POISON).all()


# What the kernel does.


@pytest.fixture
def engine():
    from tilewright.ops.gemm.kernels.triton import int8

    return int8


def run(engine, operands, config, bias=None, activation="", out_dtype=torch.float32):
    """The engine's result, which lies inside a larger, poisoned tensor."""
    m, n = operands[0].shape[0], operands[1].shape[0] // (2 if activation == "swiglu" else 1)
    around = torch.full((m + 3, n + 8), POISON, dtype=out_dtype)
    d = around[:m, :n]
    d.fill_(torch.nan)
    engine.launch((d,), Int8MatmulArgs(*operands, bias, activation, out_dtype), config)
    made = d.clone()
    d.fill_(POISON)
    assert (around == POISON).all(), "written beside the result"
    return made


CONFIGS = {
    "tma": (16, 32, 64, 4, 3, 2, True, 1),
    "tma_parts": (32, 64, 128, 4, 3, 8, True, 2),
    "pointers_parts": (16, 64, 64, 4, 3, 8, False, 3),
    "wide: the epilogue takes four parts of the columns": (16, 256, 64, 8, 3, 8, True, 1),
}


@interp
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_gives_the_bits_of_the_reference(engine, name, out_dtype):
    """Tiles, orders, loads, parts of K: sums are integers, and every rounding has its place."""
    for m, n, k in ((21, 96, 272), (5, 40, 77), (1, 16, 640)):
        operands, bias = problem(m, n, k), torch.randn(n)
        made = run(engine, operands, engine.Config(*CONFIGS[name]), bias, out_dtype=out_dtype)
        wanted = ops.int8_matmul(*operands, bias=bias, out_dtype=out_dtype, backend="torch")
        assert torch.equal(made, wanted)


@interp
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
def test_an_activation_follows_the_sum_of_all_parts(engine, activation):
    operands, bias = problem(9, 72, 300), torch.randn(72)
    for splits in (1, 2):
        config = engine.Config(16, 64, 64, 4, 3, 8, True, splits)
        made = run(engine, operands, config, bias, activation)
        wanted = ops.int8_matmul(*operands, bias=bias, activation=activation, out_dtype=torch.float32, backend="torch")
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


@interp
def test_any_number_of_programs_and_any_order_of_tiles_gives_the_same_bits(engine, monkeypatch):
    operands = problem(72, 272, 64)
    wanted = ops.int8_matmul(*operands, out_dtype=torch.float32, backend="torch")
    for processors, group_m in ((1, 1), (7, 8), (1000, 2)):
        monkeypatch.setattr(engine, "usable_sms", lambda _, n=processors: n)
        assert torch.equal(run(engine, operands, engine.Config(16, 64, 64, 4, 3, group_m, True, 1)), wanted)


@interp
def test_extreme_sums_in_every_part(engine):
    """Partial sums beyond 2^24 would be rounded in float32, before they cancel."""
    a = torch.full((1, 4096), -128, dtype=torch.int8)
    b = torch.full((16, 4096), -128, dtype=torch.int8)
    b[:, 2048:] = 127
    a[:, 1], b[:, 1] = 1, 1
    ones = torch.ones(1, 1), torch.ones(16, 1)
    for splits in (1, 2, 4):
        made = run(engine, (a, b, *ones), engine.Config(16, 32, 128, 4, 3, 8, False, splits))
        assert torch.equal(made.double(), exact(a, b, *ones))


def test_few_rows_split_a_long_k_and_no_others(engine):
    splits = [engine.configure(Int8MatmulBucket(m, 4096, 4096, 1, 16, 0), torch.int8).splits for m in (16, 64, 128)]
    assert splits == [2, 2, 1]


def test_a_bucket_tells_what_tma_refuses():
    bucket = contract("int8_matmul").forward.bucket
    a, b, scale_a, scale_b = problem(4, 32, 64)

    def is_aligned(a, b, activation=""):
        return bucket(*Int8MatmulArgs(a, b, scale_a, scale_b, None, activation, torch.bfloat16)).aligned

    odd = torch.zeros(4, 65, dtype=torch.int8)
    assert is_aligned(a, b) == is_aligned(a, b, "swiglu") == 1
    assert is_aligned(odd[:, :64], b) == is_aligned(a, b[:20]) == is_aligned(a, b[:24], "swiglu") == 0


@pytest.mark.compile
def test_many_rows_run_on_hopper_s_int8_units_from_tma(engine):
    from tests.harness.fake_driver import target

    def meta(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    size = 4096
    matrices, scales = (meta(size, size, of=torch.int8),) * 2, (meta(size, 1, of=torch.float32),) * 2
    config = engine.configure(Int8MatmulBucket(size, size, size, 1, 16, 0), torch.int8)
    with target("sm_90") as compiled:
        d = meta(size, size, of=torch.bfloat16)
        engine.launch((d,), Int8MatmulArgs(*matrices, *scales, None, "", torch.bfloat16), config)
    (kernel,) = compiled
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
