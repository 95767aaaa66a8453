"""A tiny Llama patched with the Triton kernels themselves, in Triton's CPU interpreter.

Accuracy rule: 2x the unpatched model's error for logits, 3x for gradients, both against float64.
"""

import copy

import pytest
import torch
from tests.models.zoo import build, tokens

pytestmark = pytest.mark.interp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "cohere", "glm", "deepseek_v2", "deepseek_v3"])
def test_patched_model_runs_triton(name: str, dtype: torch.dtype) -> None:
    """DeepSeek without its experts: a router's near-tie falls one way or the other with any rounding."""
    from tests.models.test_replaced import logits, relative_error

    from tilewright.dispatch import record
    from tilewright.models import patch

    ids = tokens(1, 12)
    model = build(name, **({"first_k_dense_replace": 2} if "deepseek" in name else {})).to(dtype)
    exact, unpatched = logits(copy.deepcopy(model).double(), ids), logits(model, ids)
    patch(model, verify=False, backend="triton")
    with record() as recording:
        got = logits(model, ids)
    assert {plan.backend for plan in recording.plans} == {"triton"}
    assert "fmha" in {plan.op for plan in recording.plans}
    assert relative_error(got, exact) <= 2 * relative_error(unpatched, exact) + 1e-6


def test_training_step_runs_triton() -> None:
    from tests.models.test_training import gradients, relative_error

    from tilewright.dispatch import record
    from tilewright.models import patch

    ids = tokens(1, 12)
    model = build("llama")
    exact, unpatched = gradients(copy.deepcopy(model).double(), ids), gradients(model, ids)
    patch(model, mode="train", verify=False, backend="triton")
    with record() as recording:
        patched = gradients(model, ids)
    assert {plan.backend for plan in recording.plans} == {"triton"}
    assert {plan.direction for plan in recording.plans} == {"fwd", "bwd"}
    assert relative_error(patched, exact) <= 3 * relative_error(unpatched, exact) + 1e-6


def test_every_parameter_of_a_mixture_runs_triton() -> None:
    from tests.models.test_training import errors_by_parameter, judge_parameters

    judge_parameters(errors_by_parameter(range(3), "cpu", backend="triton"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_padded_attention_runs_triton(name: str, side: str) -> None:
    """Windows, soft caps and sinks, and a program for the padding."""
    from tests.models.test_attention import close

    from tilewright.dispatch import record
    from tilewright.models import patch

    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, slice(6) if side == "left" else slice(-6, None)] = 0
    model = build(name, attn_implementation="sdpa" if name == "mistral" else "eager")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        patch(model, verify=False, ops=["attention"], backend="triton")
        with record() as recording:
            got = model(input_ids=ids, attention_mask=mask).logits
    assert {(plan.op, plan.backend) for plan in recording.plans} == {("fmha", "triton")}
    close(got[mask.bool()], expected[mask.bool()])
