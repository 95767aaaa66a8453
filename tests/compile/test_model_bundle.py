"""A bundle for a model of the sizes of Llama-3.1-8B, made here, holds every kernel that the model asks for."""

import zipfile

import pytest
from tests.harness import model_bundle
from tests.harness.compilers import raise_in_every_compiler

from tilewright import settings
from tilewright.errors import KernelMissingError
from tilewright.jit import bundle, cache
from tilewright.jit.compilers import nvrtc, tileiras
from tilewright.warmup.needed import trace_model
from tilewright.warmup.planning import plan

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(nvrtc.compiler.version() is None, reason="NVRTC is not installed"),
    pytest.mark.skipif(tileiras.compiler.version() is None, reason="tileiras is not installed"),
]

KERNELS = {
    False: {"_rms_norm_kernel", "_rope_kernel", "_gated_kernel", "sm90_gemm", "sm90_fmha", "few_rows_gemm"},
    True: {
        "_rms_norm_kernel",
        "_rope_kernel",
        "_strip_kernel",
        "_group_kernel",
        "sm90_fp8_gemm",
        "few_rows_scaled_gemm",
    },
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_kernel_is_in_the_bundle(fp8, tmp_path, monkeypatch):
    file = model_bundle.make(tmp_path, fp8=fp8)
    with zipfile.ZipFile(file) as archive:
        made = {name.partition("-")[0] for name in archive.namelist() if "/" in name}
    assert made >= KERNELS[fp8] | {"sm90_decode", "_kv_append_kernel"}

    monkeypatch.setenv("TILEWRIGHT_ARCH", "sm_90")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "user"))
    settings.reload()
    cache.forget()
    try:
        bundle.load(file)
        missed = raise_in_every_compiler(monkeypatch)
        calls, jobs = trace_model(
            str(tmp_path), None, 1, (model_bundle.PROMPT,), arch="sm_90", new_tokens=model_bundle.NEW, fp8=fp8
        )
        planned = plan(calls, "sm_90", (), jobs)
        assert planned.failures == []
        assert {job.compile().path.parent.name for job in planned.jobs} == {e.folder.name for e in cache.entries()}
        assert missed == []
        [entry, *_] = [e for e in cache.entries() if e.kind == "cuda"]
        cache.store().drop(entry.folder.name)  # one that is missing is noticed
        cache.forget()
        with pytest.raises(KernelMissingError):
            [job.compile() for job in planned.jobs]
        assert missed
    finally:
        monkeypatch.undo()
        settings.reload()
        cache.forget()
