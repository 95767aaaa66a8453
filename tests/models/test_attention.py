"""Masks, windows and dropout mean what they meant before the patch; eager attention becomes SDPA for one model only."""

import pytest
import torch
from tests.models.zoo import build, build_on_sdpa, tokens
from torch import Tensor, nn

from tilewright.models import patch


def logits(model: nn.Module, **kwargs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**kwargs).logits


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    """A padded batch gives each sequence what it gives alone, and the patch changes neither."""
    model = build(name)
    short = tokens(1, 14, seed=1)
    padding = torch.zeros(1, 10, dtype=torch.long)
    padded = torch.cat((padding, short) if side == "left" else (short, padding), dim=1)
    ids = torch.cat((tokens(1, 24), padded))
    mask = (ids != 0).long()
    expected = logits(model, input_ids=ids, attention_mask=mask)
    patch(model, verify=False)
    got = logits(model, input_ids=ids, attention_mask=mask)
    close(got[mask.bool()], expected[mask.bool()])
    if side == "right":
        close(got[1, :14], logits(model, input_ids=short)[0])


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_window_is_kept(name: str) -> None:
    """Two layers of window 4 see at most 6 tokens back: changing older ones must change nothing."""
    layers = {} if name == "mistral" else {"layer_types": ["sliding_attention"] * 2}
    model = build(name, sliding_window=4, **layers)
    patch(model, verify=False)
    ids = tokens(1, 24)
    other = ids.clone()
    other[:, :10] = tokens(1, 10, seed=9)
    got, changed = logits(model, input_ids=ids), logits(model, input_ids=other)
    assert torch.equal(got[:, -1], changed[:, -1])
    assert not torch.equal(got[:, 11], changed[:, 11])


def test_attention_dropout_still_drops() -> None:
    model = build("llama", attention_dropout=0.5).train()
    patch(model, verify=False)
    ids = tokens()
    assert not torch.equal(logits(model, input_ids=ids), logits(model, input_ids=ids))
    model.eval()
    assert torch.equal(logits(model, input_ids=ids), logits(model, input_ids=ids))


def test_eager_becomes_sdpa_for_this_model_alone() -> None:
    from transformers import LlamaForCausalLM

    model = build("llama", attn_implementation="eager")
    shared = model.config
    other = LlamaForCausalLM(shared)
    ids = tokens()
    expected = logits(model, input_ids=ids)
    p = patch(model, verify=False)
    assert p.report().counts()["attention"] == 1
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].self_attn.config is model.config
    assert model.config is not shared
    assert other.config is shared
    assert shared._attn_implementation == "eager"
    close(logits(model, input_ids=ids), expected)
    p.undo()
    assert all(m.config is shared for m in model.modules() if hasattr(m, "config"))
    assert torch.equal(logits(model, input_ids=ids), expected)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gemma2", {"attn_implementation": "eager"}, "runs eagerly for its logit soft-capping, which SDPA ignores"),
        ("llama", {"attn_implementation": "eager", "output_attentions": True}, "asks for attention weights"),
        ("llama", {}, "already runs 'sdpa'"),
    ],
)
def test_attention_is_left(name: str, options: dict[str, object], reason: str) -> None:
    model = build(name, **options)
    before = model.config
    rows = [row for row in patch(model, verify=False).report().rows if row.kind == "attention"]
    assert [row.status for row in rows] == ["left"]
    assert reason in rows[0].text
    assert model.config is before


def test_a_soft_capping_that_sdpa_ignores_stays_ignored() -> None:
    model = build_on_sdpa("gemma2")
    (row,) = [row for row in patch(model, verify=False).report().rows if row.kind == "attention"]
    assert (row.status, model.config._attn_implementation) == ("left", "sdpa")
    assert row.text == "already runs 'sdpa'; transformers ignores its logit soft-capping there"
