"""`patch` moves attention to `ops.fmha` by evidence, call by call, or to a backend that was named; else not at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.fake_table import Planted
from tests.models.zoo import build, build_on_sdpa, tokens
from torch import Tensor, nn

from tilewright import settings
from tilewright.dispatch import backends, contract, register_impl, unregister_impl
from tilewright.dispatch.tables import table
from tilewright.errors import VerificationError
from tilewright.models import attention, patch
from tilewright.ops.attention.bucket import BAND, CAUSAL, SOFTCAP
from tilewright.ops.attention.fmha import FORWARD

HEADS = {"group": 2, "D": 8, "D_v": 8, "aligned": 1}


def row(
    mask: int, *, batch: int = 2, extras: int = 0, backend: str = "planted", direction: str = "fwd"
) -> dict[str, Any]:
    """A measured row for the zoo's four heads and 24 tokens."""
    sizes = {**HEADS, "BH": 4 * batch, "S_q": 32, "S_k": 32, "mask": mask, "extras": extras}
    bucket = FORWARD.bucket_text(tuple(sizes[name] for name in FORWARD.bucket_names))
    return {
        "op": "fmha", "direction": direction, "bucket": bucket, "dtype": "float32", "numerics": "default",
        "backend": backend, "config": None, "us": 5.0, "noise": 0.01, "torch_us": 9.0,
    }  # fmt: skip


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Planted]:
    """A backend of fmha that counts its launches; `measure` writes the only tables."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(backends, "CHOICES", (*backends.CHOICES, "planted"))
    found = Planted(monkeypatch, tmp_path)
    found.measure()
    reference = contract("fmha").forward.reference

    @register_impl("fmha", backend="planted")
    def launch(outs: Any, *args: Any, config: None) -> None:
        found.launches.append((args[0].shape[2], args[1].shape[2], args[6]))
        for out, made in zip(outs, reference(*args), strict=True):
            out.copy_(found.factor * made)

    yield found
    unregister_impl("fmha", backend="planted")
    monkeypatch.undo()
    settings.reload()
    table.forget()


def logits(model: nn.Module, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(**kwargs).logits
    return made


def said(model: nn.Module, **options: Any) -> tuple[str, str]:
    (found,) = (r for r in patch(model, verify=False, **options).report().rows if r.kind == "attention")
    return found.status, found.text


def test_each_call_asks_the_tables(planted: Planted) -> None:
    """A causal batch of this size was won; with padding, or longer, SDPA runs as before."""
    planted.measure(row(CAUSAL))
    model = build("llama")
    shared, ids, mask = model.config, tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :10] = 0
    calls = {"plain": {"input_ids": ids}, "padded": {"input_ids": ids, "attention_mask": mask}}
    calls["long"] = {"input_ids": tokens(2, 40)}
    expected = {name: logits(model, **call) for name, call in calls.items()}
    p = patch(model, verify=False, ops=["attention"])
    assert "measured faster (sizes with these heads: 1), else sdpa as before" in str(p.report())
    got = {name: logits(model, **call) for name, call in calls.items()}
    assert planted.launches == [(24, 24, "")] * 2
    assert torch.equal(got["long"], expected["long"])
    assert torch.equal(got["padded"], expected["padded"])
    torch.testing.assert_close(got["plain"], expected["plain"], rtol=1e-4, atol=1e-5)
    p.undo()
    assert model.config is shared
    assert all(m.config is shared for m in model.modules() if hasattr(m, "config"))
    assert torch.equal(logits(model, input_ids=ids), expected["plain"])


def test_a_gradient_asks_for_the_backward(planted: Planted) -> None:
    planted.measure(row(CAUSAL))
    model = build("llama")
    patch(model, verify=False, ops=["attention"])
    model(input_ids=tokens()).logits.sum().backward()
    assert planted.launches == []


def test_a_window_is_a_band(planted: Planted) -> None:
    planted.measure(row(BAND))
    model = build("mistral")
    expected = logits(model, input_ids=tokens())
    patch(model, verify=False, ops=["attention"])
    torch.testing.assert_close(logits(model, input_ids=tokens()), expected, rtol=1e-4, atol=1e-5)
    assert planted.launches == [(24, 24, "")] * 2


def test_soft_caps_move_where_they_were_measured(planted: Planted) -> None:
    """Unmeasured calls stay eager; without a row of soft caps all do."""
    planted.measure(row(CAUSAL))
    assert said(build("gemma2", attn_implementation="eager"))[0] == "left"
    planted.measure(row(CAUSAL, extras=SOFTCAP))
    model = build("gemma2", attn_implementation="eager", sliding_window=64)
    ids, mask = tokens(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :10] = 0
    plain, padded = logits(model, input_ids=ids), logits(model, input_ids=ids, attention_mask=mask)
    p = patch(model, verify=False, ops=["attention"])
    assert "else eager as before" in str(p.report())
    torch.testing.assert_close(logits(model, input_ids=ids), plain, rtol=1e-4, atol=1e-5)
    assert planted.launches == [(24, 24, "")] * 2
    again = logits(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(again[mask.bool()], padded[mask.bool()], rtol=1e-6, atol=1e-6)
    assert len(planted.launches) == 2


def test_generation_goes_on_as_before(planted: Planted) -> None:
    planted.measure(row(CAUSAL), row(CAUSAL, extras=SOFTCAP))
    for name, own in (("llama", "sdpa"), ("gemma2", "eager")):
        model: Any = build(name, attn_implementation=own)
        kwargs = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        for cache in (None, "static"):
            expected = model.generate(tokens(), cache_implementation=cache, **kwargs)
            with patch(model, verify=False, ops=["attention"]):
                assert torch.equal(model.generate(tokens(), cache_implementation=cache, **kwargs), expected)
    assert planted.launches


def test_verification_sees_attention(planted: Planted) -> None:
    planted.measure(row(CAUSAL))
    patch(build("llama"), ops=["attention"], inputs=tokens())
    assert planted.launches
    planted.factor = 1.01
    with pytest.raises(VerificationError):
        patch(build("llama"), ops=["attention"], inputs=tokens())


def test_a_named_backend_takes_every_call(planted: Planted) -> None:
    """Padding too, which is a program; a softcap that SDPA ignores stays ignored."""
    model = build("llama")
    assert said(model, ops=["attention"], backend="planted") == ("replaced", "ops.fmha[planted] instead of sdpa")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :10] = 0
    logits(model, input_ids=tokens(), attention_mask=mask)
    assert planted.launches == [(24, 24, "band:0 block.b:2 &")] * 2
    assert attention.switch(build_on_sdpa("gemma2"), True, "planted")[1] == []
    assert attention.switch(build("gemma2", attn_implementation="eager"), True, "planted")[1]
    assert attention.switch(build("llama"), False, "planted")[1] == []


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({}, None, "already runs 'sdpa'"),
        ({}, "torch", "already runs 'sdpa'"),
        ({}, "cutile", "ops.fmha[cutile] does not take it: fmha[cutile] runs on cuda tensors, got cpu"),
        ({"attn_implementation": "flex_attention"}, "planted", "does not take it: it runs 'flex_attention'"),
    ],
)
def test_what_stays(planted: Planted, options: dict[str, Any], backend: str | None, reason: str) -> None:
    """A row that torch won is no evidence either."""
    planted.measure(row(CAUSAL, backend="torch"))
    found, rebindings = attention.switch(build("llama", **options), True, backend)
    assert found is not None
    assert found.status == "left"
    assert reason in found.text
    assert rebindings == []


def test_a_position_bias_stays(planted: Planted) -> None:
    from transformers import T5Config, T5EncoderModel

    planted.measure(row(CAUSAL))
    config = T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48, attn_implementation="sdpa")
    found, rebindings = attention.switch(T5EncoderModel(config), True, "planted")
    assert found is not None
    assert "it passes a position bias" in found.text
    assert rebindings == []
