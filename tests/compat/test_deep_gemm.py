"""`tilewright.compat.deep_gemm`: what DeepGEMM's names compute here, what they refuse, and that its programs run."""

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch

from tilewright.compat import deep_gemm
from tilewright.compat.deep_gemm import absent
from tilewright.dispatch.registry import GENERATION
from tilewright.errors import BackendError, InputError
from tilewright.hardware import device_info
from tilewright.hardware.sm_budget import usable_sms

LAYOUTS = ("nt", "nn", "tn", "tt")
M, N, K = 24, 40, 56
PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))


def operands(layout: str, m: int = M, n: int = N, k: int = K) -> tuple[torch.Tensor, ...]:
    """a and b as `layout` has them, both contiguous; and A @ B in float64."""
    g = torch.Generator().manual_seed(1)
    a = torch.randn((k, m) if layout[0] == "t" else (m, k), generator=g).bfloat16()
    b = torch.randn((n, k) if layout[1] == "t" else (k, n), generator=g).bfloat16()
    product = (a.T if layout[0] == "t" else a).double() @ (b.T if layout[1] == "t" else b).double()
    return a, b, product


def gemm(layout: str):
    return getattr(deep_gemm, f"bf16_gemm_{layout}")


def assert_rounded(d: torch.Tensor, exact: torch.Tensor) -> None:
    """d is `exact` up to float32 sums and one rounding to its dtype."""
    relative = 2**-8 if d.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(d.double(), exact, rtol=relative, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d_is_overwritten_with_the_product(layout, dtype):
    a, b, product = operands(layout)
    d = torch.full((M, N), float("nan"), dtype=dtype)
    assert gemm(layout)(a, b, d) is None
    assert_rounded(d, product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c_is_added_and_kept(layout, dtype):
    a, b, product = operands(layout)
    c = torch.randn(M, N).to(dtype)
    before, d = c.clone(), torch.full((M, N), float("nan"), dtype=dtype)
    gemm(layout)(a, b, d, c)
    assert_rounded(d, c.double() + product)
    assert torch.equal(c, before)


@pytest.mark.parametrize("alias", [lambda d: d, lambda d: d.view(M, N)], ids=["same tensor", "a view of it"])
def test_d_as_c_accumulates(alias):
    a, b, product = operands("tn")
    d = torch.randn(M, N)
    before = d.double()
    deep_gemm.bf16_gemm_tn(a, b, d, c=alias(d))
    assert_rounded(d, before + product)


def test_alpha_scales_the_product_alone():
    a, b, product = operands("nt")
    c, d = torch.randn(M, N), torch.empty(M, N)
    deep_gemm.bf16_gemm_nt(a, b, d, c, alpha=-0.5)
    assert_rounded(d, c.double() - 0.5 * product)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_stand_for_the_other_layouts(layout):
    """DeepGEMM's tests pass a transposed view to `nt` and expect what the named layout gives."""
    a, b, _ = operands(layout)
    named, viewed = torch.empty(M, N), torch.empty(M, N)
    gemm(layout)(a, b, named)
    deep_gemm.bf16_gemm_nt(a.T if layout[0] == "t" else a, b if layout[1] == "t" else b.T, viewed)
    assert torch.equal(named, viewed)


def test_d_may_be_columns_of_a_wider_tensor():
    a, b, product = operands("nt")
    wide = torch.full((M, 2 * N), 7.0)
    deep_gemm.bf16_gemm_nt(a, b, wide[:, :N])
    assert_rounded(wide[:, :N].contiguous(), product)
    assert (wide[:, N:] == 7.0).all()


@pytest.mark.parametrize("same", [True, False], ids=["d is c", "c"])
def test_compiled_code_may_call_it(same):
    def step(a, b, c, d):
        deep_gemm.bf16_gemm_nt(a, b, d, d if same else c)
        return d + 1

    a, b, _ = operands("nt")
    c, d, eager = torch.randn(M, N), torch.ones(M, N), torch.ones(M, N)
    made = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, c, d)
    assert torch.equal(made, step(a, b, c, eager))
    assert torch.equal(d, eager)


@pytest.mark.parametrize("c", [None, torch.full((M, N), 3.0)], ids=["zero", "c"])
def test_an_empty_sum(c):
    d = torch.full((M, N), float("nan"))
    deep_gemm.bf16_gemm_nt(torch.empty(M, 0).bfloat16(), torch.empty(N, 0).bfloat16(), d, c)
    assert torch.equal(d, torch.zeros(M, N) if c is None else c)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["bf16_gemm", "cublaslt_gemm"])
def test_an_empty_sum_of_columns_of_wider_tensors(form, layout):
    """Rows that begin at multiples of 16 bytes, which kernels would take if there were anything to add."""
    a, b, _ = operands(layout, k=64)
    a = a[:0] if layout[0] == "t" else a[:, :0]
    b = b[:, :0] if layout[1] == "t" else b[:0]
    d = torch.full((M, N), float("nan"))
    getattr(deep_gemm, f"{form}_{layout}")(a, b, d)
    assert (d == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_torchs_own_product(layout, accumulate):
    a, b, product = operands(layout)
    d = torch.randn(M, N)
    before = d.double()
    getattr(deep_gemm, f"cublaslt_gemm_{layout}")(a, b, d, c=d if accumulate else None)
    assert_rounded(d, product + before if accumulate else product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_own_product_of_float8_without_scales(layout, accumulate, dtype):
    """What DeepGEMM's tests compare the time of scaled products with."""
    a, b, _ = operands(layout)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    product = (a.T if layout[0] == "t" else a).double() @ (b.T if layout[1] == "t" else b).double()
    d = torch.randn(M, N).to(dtype)
    before = d.double()
    getattr(deep_gemm, f"cublaslt_gemm_{layout}")(a, b, d, c=d if accumulate else None)
    assert_rounded(d, product + before if accumulate else product)


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0)])
def test_an_empty_result_is_left_alone(m, n):
    deep_gemm.bf16_gemm_nt(torch.empty(m, K).bfloat16(), torch.empty(n, K).bfloat16(), torch.empty(m, n))


def test_a_gradient_that_would_be_lost_is_refused():
    a, b, product = operands("nt")
    b.requires_grad_()
    with pytest.raises(InputError, match="no gradient"):
        deep_gemm.bf16_gemm_nt(a, b, torch.empty(M, N))
    with torch.no_grad():
        d = torch.empty(M, N)
        deep_gemm.bf16_gemm_nt(a, b, d)
    assert_rounded(d, product)


def _a(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


F32 = torch.float32
BAD = {
    "a is float16": ((_a(8, 16, dtype=torch.float16), _a(4, 16), _a(8, 4)), {}, "a is torch.float16; needs torch.bf"),
    "b is float32": ((_a(8, 16), _a(4, 16, dtype=F32), _a(8, 4)), {}, "b is torch.float32; needs torch.bfloat16"),
    "d is float16": ((_a(8, 16), _a(4, 16), _a(8, 4, dtype=torch.float16)), {}, "d is torch.float16; needs"),
    "a has three dimensions": ((_a(1, 8, 16), _a(4, 16), _a(8, 4)), {}, r"a is \(1, 8, 16\); needs two"),
    "K differs": ((_a(8, 16), _a(4, 24), _a(8, 4)), {}, "K is 16 in one and 24 in the other"),
    "d is transposed": ((_a(8, 16), _a(4, 16), _a(4, 8)), {}, r"d is \(4, 8\); needs \(M, N\) = \(8, 4\)"),
    "d is column-major": ((_a(8, 16), _a(4, 16), _a(4, 8).T), {}, r"d has strides \(1, 8\)"),
    "rows of d overlap": (
        (_a(8, 16), _a(4, 16), torch.as_strided(_a(64), (8, 4), (2, 1))),
        {},
        r"d has strides \(2, 1\)",
    ),
    "a has no unit stride": ((_a(16, 32)[::2, ::2], _a(4, 16), _a(8, 4)), {}, r"a has strides \(64, 2\)"),
    "c of another dtype": (
        (_a(8, 16), _a(4, 16), _a(8, 4, dtype=F32)),
        {"c": _a(8, 4)},
        "c is .* torch.bfloat16, d is .* torch.float32; they need one shape and dtype",
    ),
    "c of another shape": ((_a(8, 16), _a(4, 16), _a(8, 4)), {"c": _a(1, 4)}, r"c is \(1, 4\)"),
    "c is a number": ((_a(8, 16), _a(4, 16), _a(8, 4)), {"c": 1.0}, "c is a float; needs a torch.Tensor"),
    "d is None": ((_a(8, 16), _a(4, 16), None), {}, "d is a NoneType"),
    "compiled_dims": ((_a(8, 16), _a(4, 16), _a(8, 4)), {"compiled_dims": "nx"}, "needs letters of"),
    "two devices": ((_a(8, 16), _a(4, 16).to("meta"), _a(8, 4)), {}, "b is on meta, a on cpu"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_refused(args, options, message):
    with pytest.raises(InputError, match=message):
        deep_gemm.bf16_gemm_nt(*args, **options)


def test_c_that_begins_at_d_must_lie_like_it():
    a, b, _ = operands("nt")
    storage = torch.zeros(M * 2 * N)
    d, c = storage.as_strided((M, N), (2 * N, 1)), storage.as_strided((M, N), (N, 1))
    with pytest.raises(InputError, match="Pass d as c"):
        deep_gemm.bf16_gemm_nt(a, b, d, c)


# ----------------------------------------------------------------------------------------------------- multiprocessors


@pytest.fixture
def all_sms():
    yield device_info("cuda").sm_count
    deep_gemm.set_num_sms(0)


def test_sms_are_all_until_they_are_set(all_sms):
    assert deep_gemm.get_num_sms() == all_sms > 8


def test_a_budget_is_what_persistent_kernels_read(all_sms):
    before = GENERATION[0]
    deep_gemm.set_num_sms(8)
    assert deep_gemm.get_num_sms() == usable_sms("cuda") == 8
    assert GENERATION[0] > before  # or launches on tape would keep their grid
    assert device_info("cuda").sm_count == all_sms
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == all_sms


@pytest.mark.parametrize("odd", [1, 7, 131])
def test_odd_numbers_are_kept_as_they_are(all_sms, odd):
    deep_gemm.set_num_sms(odd)
    assert deep_gemm.get_num_sms() == usable_sms("cuda") == odd


@pytest.mark.parametrize("wrong", [-2, 100_000, 8.0, None])
def test_a_wrong_budget_changes_nothing(all_sms, wrong):
    with pytest.raises(InputError, match=f"needs a number up to {all_sms}"):
        deep_gemm.set_num_sms(wrong)
    assert deep_gemm.get_num_sms() == all_sms


# --------------------------------------------------------------------------------------------------- names and programs


def test_a_name_that_is_not_here_says_which_are():
    with pytest.raises(AttributeError, match=r"deep_gemm has no 'gemm_of_nothing'. It has: .*bf16_gemm_nt.*"):
        _ = deep_gemm.gemm_of_nothing
    with pytest.raises(AttributeError, match=r"testing has no 'check'. It has: .*bench_kineto, calc_diff"):
        _ = deep_gemm.testing.check
    with pytest.raises(AttributeError, match=r"utils has no 'cast'. It has: align, .*per_token_cast"):
        _ = deep_gemm.utils.cast


@pytest.mark.parametrize("name", ["per_token_cast_to_fp4", "transpose_packed_fp4", "cast_back_from_fp4"])
def test_casts_of_fp4_may_be_imported_and_are_refused(name):
    with pytest.raises(BackendError, match=f"{name}: Hopper's tensor cores have no FP4"):
        getattr(deep_gemm.utils, name)(torch.ones(2, 32), use_ue8m0=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fp8_mqa_logits", "an index logit of sparse attention: it comes with a later version"),
        ("fp8_fp4_paged_mqa_logits", "an index logit of sparse attention: it comes with a later version"),
        ("get_paged_mqa_logits_metadata", "an index logit of sparse attention: it comes with a later version"),
        ("tf32_hc_prenorm_gemm", "a hyperconnection kernel: it comes with a later version"),
        ("fp4_gemm_nt", "a product of FP4, which Hopper's tensor cores do not have"),
        ("fp8_fp4_mega_moe", "one kernel of a whole layer of experts"),
    ],
)
def test_what_is_not_here_says_why(name, reason):
    with pytest.raises(AttributeError, match=f"has no {name!r}: {reason}.* It has: align"):
        getattr(deep_gemm, name)
    assert not hasattr(deep_gemm, name)


def test_knobs_are_kept_and_checked():
    assert deep_gemm.get_pdl() is False
    assert deep_gemm.get_tc_util() == 100
    try:
        deep_gemm.set_pdl(True)
        deep_gemm.set_tc_util(60)
        assert deep_gemm.get_pdl() is True
        assert deep_gemm.get_tc_util() == 60
    finally:
        deep_gemm.set_pdl(False)
        deep_gemm.set_tc_util(100)
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of(16)
    deep_gemm.set_block_size_multiple_of((16, 32))
    for call, wrong in (
        (deep_gemm.set_tc_util, 101),
        (deep_gemm.set_pdl, "on"),
        (deep_gemm.set_ignore_compile_dims, None),
        (deep_gemm.set_block_size_multiple_of, 0),
        (deep_gemm.set_block_size_multiple_of, (1, 2, 3)),
    ):
        with pytest.raises(InputError, match="needs"):
            call(wrong)


@pytest.mark.parametrize(("layout", "dims"), [("nt", "nk"), ("nn", "nk"), ("tn", "mn"), ("tt", "mn")])
def test_arguments_and_defaults_are_those_of_deep_gemm(layout, dims):
    """As its bindings declare them (csrc/apis/gemm.hpp): callers may pass any by position."""
    found = inspect.signature(gemm(layout)).parameters.values()
    names, defaults = [p.name for p in found], [p.default for p in found if p.default is not p.empty]
    assert names == ["a", "b", "d", "c", "compiled_dims", "alpha"]
    assert defaults == [None, dims, None]


def test_the_page_lists_every_name():
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
    table = page.partition("## What differs")[0]
    assert {name for name in deep_gemm.__all__ if not re.search(rf"`{name}\b", table)} == set()
    for module in ("testing", "utils", "legacy"):
        names = importlib.import_module(f"tilewright.compat.deep_gemm.{module}").__all__
        assert {name for name in names if not re.search(rf"`{name}\b", table)} == set()
    assert {name for name in absent._WHY if f"`{name}`" not in page} == set()


def run_program(program: Path, folder: Path) -> None:
    """A program of `programs`, with the library's name in its imports changed and nothing else."""
    text = program.read_text()
    changed = re.sub(r"^import deep_gemm$", "import tilewright.compat.deep_gemm as deep_gemm", text, flags=re.MULTILINE)
    changed = re.sub(r"^from deep_gemm\b", "from tilewright.compat.deep_gemm", changed, flags=re.MULTILINE)
    different = [line for line in changed.splitlines() if line not in text.splitlines()]
    assert different
    assert all(re.match(r"(import|from) ", line) for line in different)
    (folder / "program.py").write_text(changed)
    runpy.run_path(str(folder / "program.py"), run_name="__main__")


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
def test_a_program_written_for_deep_gemm_runs(program, tmp_path, capfd, all_sms):
    run_program(program, tmp_path)
    assert re.search(r": \d+\.\d us, \d+\.\d+ (TFLOPS|GB/s)", capfd.readouterr().out)
    assert deep_gemm.get_num_sms() == all_sms
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128


def test_there_are_programs():
    assert {program.stem for program in PROGRAMS} == {"bf16", "einsum", "fp8", "k_grouped", "m_grouped", "scales"}
