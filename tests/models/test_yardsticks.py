"""What every accuracy rule stands on: the wide copy, the relative error, the tensor that is compared."""

import math

import pytest
import torch
from tests.models.zoo import build, tokens
from torch import nn

from tilewright.errors import InputError
from tilewright.models.agreement import Agreement, logits_of, relative_error
from tilewright.models.wide import wide_copy, wide_dtype

CPU = torch.device("cpu")


def test_the_wide_copy_is_wide_keeps_ties_and_leaves_the_original() -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    wide = wide_copy(model, wide_dtype(model), CPU)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(wide(tokens()).logits.float(), model(tokens()).logits, rtol=1e-4, atol=1e-5)
    assert wide_dtype(model.to(torch.bfloat16)) == torch.float32


def test_floating_inputs_are_cast_on_entry() -> None:
    model = nn.Linear(4, 4)
    assert wide_copy(model, torch.float64, CPU)(torch.randn(2, 4)).dtype == torch.float64


def test_a_wide_copy_with_experts_runs() -> None:
    """The grouped products behind transformers' default experts take no float64."""
    model = build("mixtral")
    torch.testing.assert_close(
        wide_copy(model, torch.float64, CPU)(tokens()).logits.float(), model(tokens()).logits, rtol=1e-3, atol=1e-4
    )


def test_relative_error_is_the_frobenius_ratio_of_all_tensors() -> None:
    exact = [torch.randn(3000, 7), torch.tensor(2.0), None]
    norm = math.hypot(float(exact[0].norm()), 2.0)
    assert relative_error([exact[0], torch.tensor(2.5), None], exact) == pytest.approx(0.5 / norm)
    assert relative_error([exact[0], None, None], exact) == pytest.approx(2.0 / norm)  # a gradient that is missing


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_value_is_infinitely_wrong(bad: float) -> None:
    assert relative_error([torch.tensor([1.0, bad])], [torch.ones(2)]) == math.inf


def test_agreement_counts_first_choices() -> None:
    reference = torch.eye(4)
    assert Agreement.of(reference.roll(1, 0) + 2 * reference, reference) == Agreement(4, 4)
    assert Agreement.of(reference[:, [1, 0, 2, 3]], reference) == Agreement(2, 4)


def test_an_output_without_a_tensor_is_refused() -> None:
    x = torch.ones(1)
    assert logits_of({"hidden": x}) is x
    assert logits_of((None, x)) is x
    with pytest.raises(InputError, match="no tensor"):
        logits_of({"text": "hello"})
