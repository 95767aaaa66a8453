"""`ops`, `explain`, `check`: what exists, what would run, and whether it is right."""

import json

import pytest

from tilewright.dispatch import contracts


def test_ops_lists_every_op_with_its_backends(tilewright):
    done = tilewright("ops")
    assert done.exit_code == 0
    for name, contract in contracts().items():
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
        assert contract.summary in line
        assert "torch" in line


def test_columns_of_ops_stand_apart(tilewright):
    """No text runs into that of the next column, whatever backends there are."""
    header, *lines = tilewright("ops").stdout.splitlines()
    starts = [header.index(word) for word in header.split()]
    for line in lines:
        assert all(line[start - 1] == " " != line[start] for start in starts[1:]), line


def test_ops_as_json(tilewright):
    found = json.loads(tilewright("ops", "--json", "-").stdout)
    assert [each["op"] for each in found] == list(contracts())
    assert all("torch" in each["backends"]["fwd"] for each in found)


def test_explain_takes_the_first_workload_unless_told(tilewright):
    first = contracts()["rms_norm"].workloads[0].params
    said = tilewright("explain", "rms_norm", "--device", "cpu").stdout
    assert f"M={first['M']},N={first['N']},plain=1 bfloat16 on cpu" in said


@pytest.mark.parametrize(
    ("case", "bucket"),
    [
        ("M=5,N=96", "M=8,N=96,plain=1"),
        ("M=5", "M=8,N=4096,plain=1"),  # the other sizes are those of the first workload
        ("odd_n", "M=8,N=333,plain=1"),
        ("decode_4", "M=4,N=4096,plain=1"),
    ],
)
def test_a_case_is_a_name_or_sizes(tilewright, case, bucket):
    done = tilewright("explain", "rms_norm", "--case", case, "--device", "cpu", "--json", "-")
    assert json.loads(done.stdout)["bucket"] == bucket


def test_explain_reads_options_of_every_type(tilewright):
    case = "M=4,N=64,offset=1.0,fp32_weight=true"
    found = json.loads(tilewright("explain", "rms_norm", "--case", case, "--dtype", "fp16", "--json", "-").stdout)
    assert found["dtype"] == "float16"
    assert found["backend"] in {verdict["backend"] for verdict in found["verdicts"] if verdict["chosen"]}


def test_explain_plans_for_a_gpu_that_is_not_there(tilewright):
    done = tilewright("explain", "rms_norm", "--device", "cuda")
    assert done.exit_code == 0
    assert "on cuda:0" in done.stdout
    assert "triton" in done.stdout


def test_explain_of_a_huge_case_allocates_nothing(tilewright):
    case = "M=1000000000,N=8192"  # 16 TB
    assert tilewright("explain", "rms_norm", "--case", case).exit_code == 0


def test_check_of_one_edge_case(tilewright, place):
    words = (
        "--case",
        "odd_n",
        "--modes",
        "eager",
        "--seed",
        "7",
        "--device",
        "cpu",
        "--json",
        "new/folder/report.json",
    )
    done = tilewright("check", "rms_norm", *words)
    assert done.exit_code == 0
    assert "passed" in done.stdout
    report = json.loads((place / "new/folder/report.json").read_text())
    assert (report["passed"], report["seed"], [r["mode"] for r in report["results"]]) == (True, 7, ["eager"])


def test_check_of_sizes_and_dtype(tilewright):
    words = ("--case", "M=3,N=40", "--dtype", "fp32", "--modes", "eager", "--device", "cpu", "--json", "-")
    [result] = json.loads(tilewright("check", "swiglu", *words).stdout)["results"]
    assert (result["case"], result["dtype"], result["status"]) == ("custom", "float32", "passed")


def test_a_check_that_fails_exits_with_1_and_keeps_its_report(tilewright, place, broken_kernel):
    words = (
        "--case",
        "odd_n",
        "--modes",
        "eager",
        "--backend",
        broken_kernel,
        "--device",
        "cpu",
        "--json",
        "report.json",
    )
    done = tilewright("check", "rms_norm", *words)
    assert done.exit_code == 1
    assert "FAILED eager" in done.stdout
    assert json.loads((place / "report.json").read_text())["passed"] is False


def test_a_check_in_which_nothing_could_run_has_not_passed(tilewright):
    words = ("--case", "odd_n", "--modes", "eager", "--backend", "cpu", "--device", "cpu")
    done = tilewright("check", "layer_norm", *words)
    assert done.exit_code == 1
    assert "is not a registered backend of this op" in done.stdout
