"""What `warmup --model` prepares without a GPU is all that the patched model needs: every compiler is made to raise."""

import logging
import os
from pathlib import Path

import pytest
import torch
from tests.harness import model_bundle
from tests.harness.compilers import raise_in_every_compiler

from tilewright import settings
from tilewright.generate import attach_generate
from tilewright.jit import bundle, cache
from tilewright.models.patching import plan_patch

pytestmark = pytest.mark.gpu
ELSEWHERE = "TILEWRIGHT_TEST_BUNDLES"
"""A folder with bf16.zip and fp8.zip of another machine, for the model of `model_bundle`; else they are made here."""


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_prompt_and_32_tokens_without_a_compiler(fp8, tmp_path, monkeypatch, caplog):
    from transformers import AutoConfig, AutoModelForCausalLM

    given = os.environ.get(ELSEWHERE)
    file = Path(given) / f"{'fp8' if fp8 else 'bf16'}.zip" if given else model_bundle.make(tmp_path, fp8=fp8)
    config = AutoConfig.for_model(**model_bundle.LLAMA)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.randint(1, 1000, (1, model_bundle.PROMPT), device="cuda")
    planned = plan_patch(model, torch.device("cuda", 0), fp8)  # its probes have sizes of their own

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    settings.reload()
    cache.forget()
    bundle.load(file)
    missed = raise_in_every_compiler(monkeypatch)
    try:
        planned.apply()  # with fp8 the weights are cast here
        attachment = attach_generate(model)
        with caplog.at_level(logging.INFO, "tilewright"):
            made = model.generate(ids, max_new_tokens=model_bundle.NEW, do_sample=False)
        assert made.shape == (1, model_bundle.PROMPT + model_bundle.NEW)
        assert list(attachment._decoders) == [1], caplog.text  # nothing fell back
        attachment.undo()
        again = model.generate(ids, max_new_tokens=model_bundle.NEW, do_sample=False)
        assert again.shape == made.shape
        assert missed == []
    finally:
        monkeypatch.undo()
        settings.reload()
        cache.forget()
