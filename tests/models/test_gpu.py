"""Patched models on a GPU: the kernels that `auto` chooses, whole and compiled."""

import copy

import pytest
import torch
from tests.models.test_replaced import REPLACED, logits, relative_error
from tests.models.zoo import build, tokens

from tilewright.models import patch
from tilewright.models.experts import run_plainly

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("name", REPLACED)
def test_accuracy(name: str, backend: str | None, dtype: torch.dtype) -> None:
    ids = tokens(2, 200).cuda()
    options = {"head_dim": 64} if name in ("qwen3", "gemma2", "gemma3") else {}
    model = build(name, **{**WIDE, **options}).cuda().to(dtype)
    wide = copy.deepcopy(model).double()
    run_plainly(wide)
    exact, unpatched = logits(wide, ids), logits(model, ids)
    p = patch(model, verify=False, backend=backend)
    assert p.report().counts() == REPLACED[name]
    assert relative_error(logits(model, ids), exact) <= 2 * relative_error(unpatched, exact) + 1e-6
    p.undo()
    assert torch.equal(logits(model, ids), unpatched)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_verify_by_default(name: str) -> None:
    model = build(name, **WIDE).cuda().bfloat16()
    assert patch(model, mode="train").verify(tokens(4, 256)).passed


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()
    model = build("llama", **WIDE).cuda().bfloat16()
    patch(model, verify=False)
    ids = tokens(2, 64).cuda()
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(3):
            got = compiled(input_ids=ids, use_cache=False).logits.clone()
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        truth = exact(input_ids=ids, use_cache=False).logits.double()
    assert relative_error(got, truth) <= 2 * relative_error(eager, truth) + 1e-6
