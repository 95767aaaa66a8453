"""`check` as its users meet it: arguments, selection of modes and cases, the report."""

import json

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import Sample, Workload, contract
from tilewright.errors import BackendError, InputError, VerificationError
from tilewright.validate import MODES, CheckReport, Result, check

SMALL = Workload("small", {"M": 6, "N": 40})
NAMES = {
    "eager",
    "backward",
    "compile_static",
    "compile_dynamic",
    "cuda_graph",
    "autocast",
    "inference_mode",
    "non_contiguous",
    "single_elements",
    "offset",
    "empty",
    "out",
    "opcheck",
    "symbolic_sizes",
    "determinism",
    "batch_invariance",
    "poison",
    "guard_bands",
    "inputs_unchanged",
    "bad_inputs",
    "grad_inputs",
    "checkpoint",
    "double_backward",
    "forward_ad",
    "negative_bit",
}


def quick(subject="rms_norm", sample=SMALL, **options):
    return check(subject, sample, **{"modes": ["eager"], "backend": "torch", "device": "cpu", **options})


def test_every_promised_mode_exists():
    assert set(MODES) >= NAMES
    assert all(mode.doc for mode in MODES.values())


@pytest.mark.parametrize(
    "subject", ["rms_norm", ops.rms_norm, contract("rms_norm")], ids=["name", "function", "contract"]
)
def test_an_op_by_name_function_or_contract(subject):
    made = quick(subject)
    assert made.op == "rms_norm"
    assert made.require() is made


def test_a_tuple_of_tensors_is_a_sample():
    made = check("rms_norm", (torch.randn(4, 8), torch.randn(8)), modes="quick", backend="torch")
    assert made.require().results[0].dtype == "float32"


def test_a_sample_keeps_its_layout_and_options():
    x = torch.randn(8, 6).t().expand(3, 6, 8)
    made = check(
        "rms_norm", Sample((x, torch.randn(8)), {"offset": 1.0}), modes=["eager", "changed_inputs"], backend="torch"
    )
    assert [r.status for r in made.require().results] == ["passed", "skipped"]  # expanded: cannot be overwritten
    assert x.stride() == (0, 1, 6)


def test_a_workload_by_the_first_words_of_its_name():
    assert quick(sample="odd_n").results[0].case == "odd_n: the tail of a row is masked"


def test_all_edge_cases_in_all_dtypes():
    subject = contract("rms_norm")
    made = check("rms_norm", modes=["eager"], backend="torch", device="cpu")
    assert len(made.require().results) == len(subject.edge_cases) * len(subject.dtypes)
    one = check("rms_norm", modes=["eager", "bad_inputs"], backend="torch", device="cpu", dtype=torch.float32)
    assert len(one.require().results) == len(subject.edge_cases) + 1


def test_heavy_modes_run_on_one_edge_case():
    made = check("rms_norm", modes=["opcheck"], backend="torch", device="cpu", dtype=torch.float32)
    assert [r.case for r in made.require().results] == ["odd_n: the tail of a row is masked"]


def test_the_seed_decides_the_numbers():
    errors = [[m.error for m in quick(seed=seed).results[0].measures] for seed in (3, 3, 4)]
    assert errors[0] == errors[1] != errors[2]


def test_seeds_are_fresh_and_reported():
    assert quick().seed != quick().seed
    assert f"seed {quick(seed=5).seed}" in str(quick(seed=5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subject": "no_such_op"}, "no op named 'no_such_op'"),
        ({"subject": print}, "not a public op"),
        ({"modes": ["eager", "sideways"]}, "no mode named sideways"),
        ({"modes": []}, "no mode named"),
        ({"sample": "no such case"}, "no workload named 'no such case'"),
        ({"sample": (torch.ones(2, 2), torch.ones(2)), "dtype": torch.float16}, "dtype= goes with a workload"),
    ],
    ids=str,
)
def test_wrong_arguments_raise(options, words):
    with pytest.raises(InputError, match=words):
        quick(**options)


def test_an_unknown_backend_raises():
    with pytest.raises(BackendError, match="no backend named"):
        quick(backend="abacus")


def test_a_report_in_which_nothing_ran_has_not_passed():
    made = quick(modes=["cuda_graph"])
    assert made.results[0].status == "skipped"
    assert not made.passed
    assert not made.failures
    with pytest.raises(VerificationError, match="needs a GPU"):
        made.require()


def test_a_backend_that_refuses_is_skipped_with_its_reason():
    made = quick(backend="triton")
    assert made.results[0].status == "skipped"
    assert "triton" in made.results[0].details[0]
    assert not made.passed


def test_an_exception_is_a_failure_with_its_text():
    """A sample that the op refuses where a result was expected."""
    made = check("rms_norm", (torch.randn(4, 8), torch.randn(8)), modes=["eager"], backend="torch")
    assert made.passed
    with pytest.raises(RuntimeError):
        check("rms_norm", (torch.randn(4, 8), torch.randn(7)), modes=["eager"], backend="torch")


def test_the_report_is_plain_data():
    data = json.loads(json.dumps(quick(modes=["eager", "backward", "cuda_graph"]).to_dict()))
    assert data["passed"] is True
    assert [r["status"] for r in data["results"]] == ["passed", "passed", "skipped"]
    measure = data["results"][0]["measures"][0]
    assert measure["tensor"] == "y"
    assert 0 < measure["error"] == measure["error_torch"] < 1e-2


def test_the_text_names_failures_first_and_counts_skips():
    failed = Result("odd_n", "bfloat16", "poison", "failed", ("y: 3 elements are NaN",), (), 0.1)
    skipped = [Result(c, "bfloat16", "out", "skipped", ("no out=",), (), 0.0) for c in ("a", "b")]
    report = CheckReport("rms_norm", "triton", "cuda", 7, (*skipped, failed))
    assert str(report) == (
        "rms_norm [triton] on cuda, seed 7: FAILED; 0 passed, 1 failed, 2 skipped\n"
        "FAILED poison: odd_n, bfloat16\n"
        "    y: 3 elements are NaN\n"
        "skipped out (2x): no out="
    )
    assert report.failed_modes == ("poison",)


@pytest.mark.parametrize("mode", ["compile_static", "compile_dynamic"])
def test_compiled_by_what_was_asked_for(mode):
    made = quick(modes=[mode], compiler="aot_eager")
    assert "compiled by aot_eager" in str(made.require())
