"""`warmup`: kernels for a GPU that is not here, in the cache and in a bundle."""

import json

import pytest

from tilewright import settings
from tilewright.jit import bundle, cache


@pytest.fixture
def tilewright(tilewright, place, monkeypatch):
    """With Triton's own cache empty too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "triton"))
    yield tilewright
    cache.forget()


def test_a_bundle_holds_what_a_model_needs(tilewright, place, monkeypatch):
    done = tilewright(
        "warmup", "--model", "tiny-llama", "--arch", "sm_90a", "--tokens", "64", "--out", "kernels.zip", "--json", "-"
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    (machine,) = found["machines"]
    assert (machine["arch"], machine["kernels"]) == ("sm_90", len(found["kernels"]))
    assert found["failed"] == []
    assert {kernel["name"] for kernel in found["kernels"]} >= {"_rms_norm_kernel", "_rope_kernel", "_gated_kernel"}
    assert all(kernel["info"]["registers"] > 0 for kernel in found["kernels"])

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(place / "elsewhere"))
    settings.reload()
    assert bundle.load(place / "kernels.zip") == len(found["kernels"])
    assert {entry.folder.name for entry in cache.entries()} == {kernel["folder"] for kernel in found["kernels"]}


@pytest.mark.exhaustive
def test_what_does_not_compile_is_listed_and_leaves_no_bundle(tilewright, place, monkeypatch):
    broken = place / "ptxas"
    broken.write_text("#!/bin/sh\ncase $1 in --version) echo 'Cuda release 12.8, V12.8.93';; *) exit 7;; esac\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    done = tilewright(
        "warmup", "--model", "tiny-llama", "--arch", "sm_90", "--backend", "triton", "--tokens", "64", "--out", "k.zip"
    )
    assert done.exit_code == 1
    assert "FAILED _rms_norm_kernel for sm_90: PTXASError" in done.stderr
    assert "sm_90: 0 kernels" in done.stdout
    assert not (place / "k.zip").exists()


def test_what_planning_refuses_is_told_in_one_line(tilewright):
    done = tilewright("warmup", "--suite", "nope", "--arch", "sm_90")
    assert done.exit_code == 2
    assert "no bench suite named 'nope'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("warmup", "one of --suite NAME (e.g. norm, or all) and --model CONFIG"),
        ("warmup --suite norm --model tiny-llama", "one of --suite NAME"),
        ("warmup --suite norm --arch sm_75", "--arch sm_75: known are sm_80"),
        ("warmup --model tiny-llama --tokens 8,many", "--tokens 8,many: write lengths as 1024,1000"),
        ("warmup --suite norm --jobs 0", "--jobs"),
        ("warmup --suite norm --out ./", ". is a folder"),
    ],
)
def test_wrong_input_is_refused_before_any_work(tilewright, place, words, says):
    done = tilewright(*words.split())
    assert done.exit_code == 2
    assert says in done.stderr
    assert list(place.iterdir()) == []


def test_the_planning_process_imports_nothing_from_the_current_folder(tilewright, place, monkeypatch):
    (place / "selectors.py").write_text("raise SystemExit('a file of the current folder was imported')")
    monkeypatch.chdir(place)
    done = tilewright("warmup", "--suite", "softmax", "--arch", "sm_90", "--backend", "torch")
    assert "a file of the current folder" not in done.stderr
    assert "nothing to prepare" in done.stderr or done.exit_code == 0, done.stderr
