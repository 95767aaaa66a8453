"""What a suite or a model needs is found without a GPU, without weights, and compiled in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewright import settings
from tilewright.bench.cases import select
from tilewright.dispatch import register_impl, unregister_impl
from tilewright.errors import BackendError, UsageError
from tilewright.models.cpu_sizes import every_size_on_ops
from tilewright.warmup import architectures
from tilewright.warmup.absent import _index
from tilewright.warmup.needed import trace_case, trace_model, trace_suite
from tilewright.warmup.planning import plan

SOURCE = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def by_op(calls):
    found = {}
    for call in calls:
        found.setdefault(call.op.key, []).append(call)
    return found


# ---------------------------------------------------------------------------------------------------- what is needed


def test_a_suite_needs_its_workloads_forward_and_backward():
    found = by_op(trace_suite("norm", None, "cuda"))
    assert {"rms_norm", "rms_norm_bwd", "add_rms_norm", "add_rms_norm_bwd", "layer_norm"} <= set(found)
    shapes = [tuple(call.args[0].shape) for call in found["rms_norm"]]
    assert (8192, 4096) in shapes
    assert (1, 4096) in shapes
    assert (1, 4096) not in [tuple(call.args[0].shape) for call in found["rms_norm_bwd"]]  # decoding needs none


def test_a_suite_in_another_dtype():
    assert {call.args[0].dtype for call in trace_suite("norm", "fp16", "cuda")} == {torch.float16}


def test_the_workloads_of_a_cpu_are_its_own():
    found = by_op(trace_suite("norm", None, "cpu"))
    assert {call.args[0].shape[0] for call in found["rms_norm"]} == {512}


def test_a_model_needs_its_prefills_and_one_decode_step(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    before = resident_bytes()
    with every_size_on_ops():  # a CPU computes short inputs without them
        found = by_op(trace_model(str(tmp_path), None, 2, (64, 7), arch="cpu").calls)
    assert set(found) == {"rms_norm", "add_rms_norm", "swiglu", "apply_rope"}
    for calls in (found["rms_norm"], found["add_rms_norm"]):
        assert sorted(tuple(call.args[0].shape) for call in calls) == [(2, 1, 4096), (2, 7, 4096), (2, 64, 4096)]
    assert {call.args[0].dtype for calls in found.values() for call in calls} == {torch.bfloat16}
    assert resident_bytes() - before < 1 << 30  # its weights would be 3.9 GB


def test_a_model_in_another_dtype_and_by_its_file(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "vocab_size": 64}))
    calls = trace_model(str(tmp_path / "small.json"), "fp16", 1, (16,), arch="cpu").calls
    assert {call.args[0].dtype for call in calls} == {torch.float16}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("absent", None, "Give a model folder, its config.json, or one of: tiny-llama"),
        ("broken.json", "{", "cannot be read as JSON"),
        ("list.json", "[]", "model_type None"),
        ("other.json", '{"model_type": "abacus"}', "model_type 'abacus', which this transformers does not know"),
        ("vision.json", '{"model_type": "vit"}', "Unrecognized configuration class"),
    ],
)
def test_what_is_no_model_is_told(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says):
        trace_model(str(tmp_path / name), None, 1, (16,), arch="cpu")


# --------------------------------------------------------------------------------------------------- what is compiled


def test_repeated_calls_and_equal_kernels_are_planned_once():
    calls = list(trace_suite("norm", None, "cuda"))
    once, twice = plan(calls, "sm_90", ()), plan(calls * 2, "sm_90a", ())
    assert once.failures == []
    assert once.calls == twice.calls == len(calls)
    assert [job.key for job in once.jobs] == [job.key for job in twice.jobs]
    assert len({job.key for job in once.jobs}) == len(once.jobs) < len(calls)
    assert {job.key.arch for job in once.jobs if job.key.kind == "triton"} <= {"sm_90"}


def test_only_the_backends_that_were_named():
    calls = [call for call in trace_suite("norm", None, "cuda") if call.op.key == "rms_norm"]
    assert plan(calls, "sm_90", ("torch",)).by_torch == len(calls)
    both = plan(calls, "sm_90", ("triton", "torch"))
    assert both.by_torch == len(calls)
    assert {job.key.kind for job in both.jobs} == {"triton"}
    assert plan(calls, "sm_90", ("cpu",)).calls == 0
    with pytest.raises(BackendError, match="no backend named 'abacus'"):
        plan(calls, "sm_90", ("abacus",))


def test_tensors_in_a_list_are_on_the_device_that_is_planned_for():
    (call,) = [call for call in trace_suite("grouped", None, "cuda") if call.op.key == "group_gemm"]
    assert {t.device.type for t in call.on("meta")[2]} == {"meta"}
    planned = plan([call], "sm_90", ("cuda",))
    assert (planned.failures, planned.calls) == ([], 1)
    assert {job.name for job in planned.jobs} == {"few_rows_gemm", "sm90_gemm"}


def test_signatures_see_the_strides_of_tensors_in_a_list():
    (call,) = [call for call in trace_suite("grouped", None, "cuda") if call.op.key == "group_gemm"]
    square, others = torch.empty(4, 4, device="meta"), call.args[3:]
    rows, columns = ([*call.args[2][1:], last] for last in (square, square.mT))
    calls = [call._replace(args=(*call.args[:2], more, *others)) for more in (rows, columns)]
    assert calls[0].signature != calls[1].signature
    assert len({each.signature for each in (*calls, *calls)}) == 2


def test_launch_code_that_fails_is_reported_and_the_rest_goes_on():
    @register_impl("rms_norm", backend="faulty")
    def launch(outs, *args, config):
        raise ZeroDivisionError("on purpose")

    try:
        planned = plan(trace_suite("norm", "fp32", "cuda"), "sm_90", ())  # unmeasured: other packages' come first
    finally:
        unregister_impl("rms_norm", backend="faulty")
    assert {failure.reason for failure in planned.failures} == {"ZeroDivisionError: on purpose"}
    assert planned.failures[0].what.startswith("rms_norm[faulty] M=8192,N=4096")
    assert planned.jobs


def test_one_kernel_that_kills_its_compiler_is_one_failure():
    """In a process of its own, because the compiling ones are forked."""
    script = """
import os, time
from pathlib import Path
from tilewright.jit.artifact import Artifact, BuildKey
from tilewright.jit.collect import Job
from tilewright.warmup.planning import Planned
from tilewright.warmup.processes import _compile_all

def compiled(name, path=Path("kernel.cubin")):
    return Artifact(BuildKey(name, "cuda", "sm_90a", (), ""), b"", {"registers": 7}, path)

jobs = [
    Job("slow", lambda: time.sleep(0.5) or compiled("slow")),
    Job("killed", lambda: os.kill(os.getpid(), 9)),
    Job("left", lambda: os._exit(3)),
    Job("raises", lambda: 1 / 0),
    Job("unkept", lambda: compiled("unkept", None)),
    Job("quick", lambda: compiled("quick")),
]
for event in _compile_all(Planned("sm_90", jobs, [], 6, 0), 2):
    print(type(event).__name__, getattr(event, "name", None) or event.what, getattr(event, "reason", ""), sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=SOURCE / "src", check=True
    )
    assert sorted(done.stdout.splitlines()) == [
        "Failure|killed|its compiler's process died (signal 9, perhaps for want of memory)",
        "Failure|left|its compiler's process died (exit code 3)",
        "Failure|raises|ZeroDivisionError: division by zero",
        "Failure|unkept|compiled, but the kernel cache cannot be written; see TILEWRIGHT_CACHE_DIR",
        "Kernel|quick|",
        "Kernel|slow|",
    ]
    assert done.stdout.splitlines()[0] != "Kernel|slow|"  # the others did not wait for it


def test_architectures_are_machines_each_once():
    assert architectures(["sm_90a", "sm_90", "gfx942", "cpu"]) == ["sm_90", "gfx942", "cpu"]
    with pytest.raises(UsageError, match="sm_75: known are sm_80"):
        architectures(["sm_75"])


# ------------------------------------------------------------------------------------------ models on a GPU elsewhere


@pytest.fixture
def on_sm_90(monkeypatch):
    """Plans for a GPU that is not here, by the tables that are shipped."""
    monkeypatch.setenv("TILEWRIGHT_ARCH", "sm_90")
    settings.reload()
    yield
    monkeypatch.undo()
    settings.reload()


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for a GPU that is not here")
@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
def test_a_model_on_a_gpu_needs_products_attention_casts_and_the_step(on_sm_90, tmp_path, fp8):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    calls, jobs = trace_model(str(tmp_path), None, 1, (2048,), arch="sm_90", new_tokens=32, fp8=fp8)
    found = by_op(calls)
    common = {"rms_norm", "add_rms_norm", "apply_rope", "fmha", "matmul", "kv_append_", "fmha_decode"}
    narrow = {"scaled_matmul", "scaled_matmul_fp8", "per_token_cast_to_fp8", "per_block_cast_to_fp8"}
    assert set(found) == common | (narrow if fp8 else {"swiglu"})
    rows = {call.args[0].shape[0] for call in found["scaled_matmul" if fp8 else "matmul"]}
    assert rows == {1, 2048}
    assert {call.args[0].device.type for call in calls} == {"cuda"}
    assert jobs == []  # the step launches nothing but ops
    planned = plan(calls, "sm_90", (), jobs)
    assert planned.failures == []
    assert planned.by_torch == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for a GPU that is not here")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma2", "tiny-mistral"])
def test_every_kind_of_model_is_planned_with_its_step(on_sm_90, name, caplog):
    """Windows, soft caps and norms of heads."""
    calls, jobs = trace_model(name, None, 2, (64, 50), arch="sm_90")
    assert {"kv_append_", "fmha_decode"} <= {call.op.op for call in calls}
    assert "no decoding with a static cache" not in caplog.text
    assert jobs == []


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, None),
        (Ellipsis, 0),
        (None, slice(None, 2), Ellipsis),
        (slice(None), None, [1, 0], slice(0, 4, 2)),
    ],
    ids=str,
)
def test_indexing_in_other_words_is_indexing(index):
    x = torch.arange(24).view(2, 3, 4)
    made = _index(x, index)
    assert torch.equal(made, x[index])
    assert made.stride() == x[index].stride()


def test_indexing_by_tensors_and_masks():
    x = torch.arange(24).view(2, 3, 4)
    rows, mask = torch.tensor([1, 0, 1]), torch.tensor([[True, False, True], [False, True, True]])
    for index in (rows, mask, (mask, slice(1, 3)), (slice(None), torch.tensor([2, 0])), (rows, slice(None), 1)):
        assert torch.equal(_index(x, index), x[index])


@pytest.mark.exhaustive
def test_the_program_of_packed_sequences_is_prepared():
    def first(device):
        cases = select("attention", ops=["fmha_varlen"], device=torch.device(device))
        return map(trace_case, cases[:1])

    names = {job.name for job in plan(first("cuda"), "sm_90", ()).jobs}
    assert {"_packed_kernel", "_carry_kernel"} <= names
    assert "_packed_kernel" not in {job.name for job in plan(first("cpu"), "cpu", ()).jobs}
