"""`tune_model`: which sizes of a model are found, in which order they are tuned, and which are left out."""

import json
from pathlib import Path

import pytest
import torch
from tests.models.fake_table import planted_backend
from torch import nn

from tilewright.bench.tables import users_table
from tilewright.dispatch import contracts, explain, record, register_impl, unregister_impl
from tilewright.dispatch.tables import table
from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.models.cpu_sizes import every_size_on_ops
from tilewright.tuning import recorded, tune_model
from tilewright.tuning.model import sizes_of
from tilewright.tuning.problem import Problem, fake_call
from tilewright.tuning.recorded import on_raw_arguments, recorded_call
from tilewright.tuning.subject import Subject

X = torch.randn(64, 64)


def tiny_llama(device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256}
    config = AutoConfig.for_model("llama", **common | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)


@pytest.fixture
def doubling(fake_op):
    """A module that calls the fake op at three sizes: (8, 8) once, (64, 64) once, then (1, 4096) twenty times."""

    class Doubling(nn.Module):
        def forward(self, x):
            total = fake_op.double(x[:8, :8]).sum() + fake_op.double(x).sum()
            for _ in range(20):
                fake_op.double(x.reshape(1, -1))
            return total

    return Doubling()


@pytest.fixture
def two_right(fake_op, monkeypatch):
    """Only right candidates of the fake op, so that tuning is quick."""
    register_impl(fake_op.NAME, **fake_op.options(fake_op.FAST))(fake_op.launch)
    yield
    unregister_impl(fake_op.NAME, backend="cpu")


# ------------------------------------------------------------------------------------------------------------- recorded


def test_a_model_shows_its_prefills_and_decoding_steps_by_how_often_they_run(cache_folder):
    model = tiny_llama()
    classes = [type(m) for m in model.modules()]
    with every_size_on_ops():  # a CPU computes such short inputs without them
        sizes = {(size.raw.op, size.plan.bucket): size for size in sizes_of(model, tokens=(64, 50), new_tokens=32)}
    assert [type(m) for m in model.modules()] == classes
    assert {op for op, _ in sizes} == {"rms_norm", "add_rms_norm", "swiglu", "apply_rope"}
    assert sizes["swiglu", "M=64,N=128,plain=1"].calls == 2 * 2, "layers, prompts"
    assert sizes["swiglu", "M=1,N=128,plain=1"].calls == 2 * 2 * 32, "and the steps of which 16 were run"
    assert sizes["swiglu", "M=64,N=128,plain=1"].largest.args[0].shape[1] == 64
    assert sizes["swiglu", "M=64,N=128,plain=1"].smallest.args[0].shape[1] == 50


def test_token_ids_take_the_place_of_lengths_and_long_prompts_are_cut_to_the_positions(cache_folder):
    model = tiny_llama()
    with every_size_on_ops():
        given = {size.plan.bucket for size in sizes_of(model, torch.ones(2, 5, dtype=torch.long), new_tokens=1)}
        cut = {size.plan.bucket for size in sizes_of(model, tokens=(1024, 1000), new_tokens=300)}
    assert {"M=16,N=64,plain=1", "M=2,N=64,plain=1"} <= given
    assert "M=256,N=64,plain=1" in cut, "240 tokens"


def test_other_models_run_on_their_inputs(doubling):
    found = {size.plan.bucket: size.calls for size in sizes_of(doubling, X)}
    assert found == {"M=1,N=4096": 20, "M=64,N=64": 1, "M=8,N=8": 1}
    with pytest.raises(InputError, match="Doubling is no language model; pass inputs="):
        sizes_of(doubling)


def test_linear_layers_count_although_nothing_was_measured(monkeypatch, tmp_path):
    with planted_backend(monkeypatch, tmp_path), every_size_on_ops():
        found = {
            size.plan.bucket for size in sizes_of(tiny_llama(), tokens=(64,), new_tokens=1) if size.raw.op == "matmul"
        }
    products = {bucket.split(",layout")[0] for bucket in found}
    assert {"M=64,N=128,K=64", "M=64,N=64,K=128", "M=1,N=256,K=64", "M=1,N=32,K=64"} <= products


def test_a_recorded_call_of_every_op_has_the_same_bucket_and_can_be_made_again():
    import tilewright.ops  # noqa: F401 - binds every contract

    for subject in contracts().values():
        workload = subject.edge_cases[0] if subject.edge_cases else None
        if workload is None or subject.name.startswith("test_") or subject.forward.compose is not None:
            continue  # of a composed op the parts are tuned
        sample = subject.inputs(workload.params, workload.dtypes[0], torch.device("cpu"), 0)
        with torch.no_grad(), record() as notes:
            subject.function(*sample.args, **sample.kwargs)
            raw, args, _, _ = notes.calls[0]
            form = recorded_call(subject, args)
            again = on_raw_arguments(subject, form)
            made = again.inputs({}, workload.dtypes[0], torch.device("cpu"), 1)
            bucket = raw.bucket_of(args, "default")
            assert raw.bucket_of(made.args, "default") == bucket, subject.name
            again.function(*made.args, backend="torch")
        problem = Problem(subject.name, "fwd", {}, workload.dtypes[0], "cpu", 0, ("tilewright.ops",), True, form)
        with fake_call(problem) as call:
            assert call.raw.bucket_of(call.args, "default") == bucket, subject.name


def test_operands_are_drawn_and_what_has_a_meaning_is_kept():
    subject = contracts()["apply_rope"]
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 16)
    angles = torch.rand(6, 8).repeat(1, 2)
    form = recorded_call(subject, (q, k, angles.cos(), angles.sin(), torch.arange(6)[None], False, 0))
    one, two = form.on("cpu", 1), form.on("cpu", 2)
    assert not torch.equal(one[0], two[0])
    assert not torch.equal(one[0], q)
    assert torch.equal(one[2], angles.cos())
    assert torch.equal(one[4], torch.arange(6)[None])
    assert torch.equal(one[0], form.on("cpu", 1)[0]), "the seed repeats them"


def test_strides_gaps_and_alignment_are_those_of_the_call():
    base = torch.randn(40, 50)
    x = base[1:33, 3:19].T
    (made,) = recorded_call(contracts()["softmax"], (x,)).on("cpu", 0)
    assert (made.shape, made.stride(), made.data_ptr() % 16) == (x.shape, x.stride(), x.data_ptr() % 16)
    (wide,) = recorded_call(contracts()["softmax"], (torch.randn(1, 8).expand(4, 8),)).on("cpu", 0)
    assert wide.stride() == (0, 1)


def test_data_too_large_to_keep_is_a_reason_and_no_failure(doubling, monkeypatch, at_home):
    monkeypatch.setattr(recorded, "LARGEST_DATA", 1 << 20)
    with pytest.raises(InputError, match="int64.*holds 2 MiB of data, more than the tuner keeps"):
        recorded_call(contracts()["groups_of_rows"], (torch.zeros(1 << 18, dtype=torch.int64), 4))

    def refuse(subject, args):
        raise InputError("too large")

    monkeypatch.setattr("tilewright.tuning.model.recorded_call", refuse)
    report = tune_model(doubling, X)
    assert report.ok
    assert [each.reason for each in report.untuned] == ["too large"] * 3


def test_candidates_of_a_recorded_call_are_held_to_the_same_rules(fake_op):
    form = recorded_call(fake_op.CONTRACT, (torch.randn(64, 4096),))
    modules = ("tests.tuning.fake_op",)
    subject = Subject(Problem(fake_op.NAME, "fwd", {}, torch.float32, "cpu", 0, modules, True, form))
    expected = {
        "wrong": "wrong (eager)",
        "partial": "wrong (",
        "outside": "wrong: wrote",
        "writes_input": "wrong (inputs",
    }
    assert subject.check("cpu", fake_op.FAST) is None
    for kind, reason in expected.items():
        assert subject.check("cpu", fake_op.Config(kind)).startswith(reason), kind
    assert subject.cost.bytes_read == subject.cost.bytes_written == 64 * 4096 * 4


def test_a_large_call_is_judged_as_a_whole_alone(fake_op, monkeypatch):
    monkeypatch.setattr("tilewright.tuning.subject.LARGEST_CHECKED", 1)
    form = recorded_call(fake_op.CONTRACT, (torch.randn(64, 4096),))
    subject = Subject(Problem(fake_op.NAME, "fwd", {}, torch.float32, "cpu", 0, ("tests.tuning.fake_op",), True, form))
    assert subject.check("cpu", fake_op.FAST) is None
    assert subject.check("cpu", fake_op.Config("wrong")).startswith("wrong: ")
    assert subject.check("cpu", fake_op.Config("outside")) == "wrong: wrote outside its outputs"


# ---------------------------------------------------------------------------------------------------------------- tuned


def test_the_most_time_comes_first_and_a_second_run_goes_on(fake_op, doubling, two_right, at_home, cache_folder):
    said = []

    def note(number, cases, case, *step):
        said.append((number, cases, case.key))

    first = tune_model(doubling, X, backend="cpu", progress=note)
    assert [tuned.bucket for tuned in first.tuned] == ["M=1,N=4096", "M=64,N=64", "M=8,N=8"]
    assert said[0] == (0, 3, (fake_op.NAME, "M=1,N=4096", "float32", "fwd"))
    assert all(tuned.after.config == fake_op.FAST for tuned in first.tuned)
    assert fake_op.FORWARD.plan((X,), "auto", "default").config == fake_op.FAST
    assert first.fresh == 0

    file = table.file_of(first.table, fake_op.NAME)
    before = file.read_bytes()
    second = tune_model(doubling, X)
    assert (second.tuned, second.fresh, file.read_bytes()) == ([], 3, before)
    assert "0 tuned, 0 changed, 3 left out: their rows are fresh" in str(second)
    assert json.loads(json.dumps(second.to_dict()))["fresh"] == 3


def test_what_the_budget_left_is_tuned_by_the_next_run(fake_op, doubling, two_right, at_home):
    first = tune_model(doubling, X, budget=1e-6)
    assert [tuned.bucket for tuned in first.tuned] == ["M=1,N=4096"]
    assert [left.reason for left in first.untuned] == ["the budget was used up"] * 2
    second = tune_model(doubling, X)
    assert (len(second.tuned), second.fresh) == (2, 1)


@pytest.mark.parametrize("name", ["torch", pytest.param("tilewright", marks=pytest.mark.exhaustive)])
def test_a_stale_row_is_measured_again(fake_op, doubling, two_right, at_home, name):
    report = tune_model(doubling, X)
    file = table.file_of(report.table, fake_op.NAME)
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "versions": {**data["versions"], name: "0.1"}}))
    table.forget()
    assert f"{name} 0.1 (now " in explain(fake_op.NAME, X).stale
    again = tune_model(doubling, X, budget=1e-6)
    assert (len(again.tuned), again.fresh) == (1, 0)
    (tuned,) = again.tuned
    assert not tuned.changed, "the same choice, whose row is of today's versions now"
    versions = {row.bucket: row.versions[name] for row in table.read(file)[1]}
    assert versions.pop(tuned.bucket) != "0.1"
    assert set(versions.values()) == {"0.1"}, "the others are stale until it is their turn"
    assert tune_model(doubling, X).fresh == 1


@pytest.mark.exhaustive
def test_rows_of_another_gpu_are_not_fresh(fake_op, doubling, two_right, at_home):
    report = tune_model(doubling, X)
    file = table.file_of(report.table, fake_op.NAME)
    file.write_text(json.dumps({**json.loads(file.read_text()), "gpu": "another"}))
    assert len(tune_model(doubling, X).tuned) == 3
    assert tune_model(doubling, X).fresh == 3, "the same choices, and rows of this machine now"


def test_a_model_without_our_ops_has_nothing_to_tune(at_home, cache_folder):
    report = tune_model(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4))
    assert report.ok
    assert (report.tuned, report.untuned, report.fresh) == ([], [], 0)
    assert str(report).startswith("nothing to tune: at these sizes no op is called that has kernels of ours for ")
    assert not users_table(device_info("cpu").name).exists()


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
def test_a_model_on_a_gpu_gets_rows_of_its_own_sizes(cache_folder: Path, fp8):
    model = tiny_llama("cuda", torch.bfloat16, hidden_size=1024, intermediate_size=2048, max_position_embeddings=1024)
    options = {"tokens": (64, 50), "new_tokens": 2, "fp8": fp8, "seed": 0}
    sizes = sizes_of(model, **{name: options[name] for name in ("tokens", "new_tokens", "fp8")})
    ops = {size.raw.op for size in sizes}
    assert {"rms_norm", "fmha", "scaled_matmul" if fp8 else "matmul"} <= ops
    report = tune_model(model, budget=120.0, **options)
    assert report.ok, [vars(each) for each in report.untuned]
    assert report.tuned
    again = tune_model(model, budget=1.0, **options)
    assert again.fresh == len(report.tuned)
