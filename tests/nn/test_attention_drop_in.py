"""Attention layers against transformers' modules: one state_dict, the same numbers and gradients."""

import copy
import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.nn.attention_problems import (
    BATCH,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOKENS,
    D,
    Maker,
    additive,
    assert_as_exact,
    assert_same,
    problem,
    randomised,
    run,
)
from torch import Tensor, nn

from tilewright import mask
from tilewright.mask import Mask
from tilewright.nn import Attention, DifferentialAttention


@dataclass(frozen=True)
class Model:
    """A module of transformers and what to call ours with."""

    name: str
    prefix: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    seen: Mask = field(default_factory=mask.causal)  # what its model would let a query see
    layer_idx: int = 0
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    maker: Maker = Attention

    def theirs(self) -> nn.Module:
        return getattr(self._file(), f"{self.prefix}Attention")(self._config(), layer_idx=self.layer_idx)

    def ours(self, **more: Any) -> Any:
        return self.maker(HIDDEN, self.heads, self.kv_heads, D, **{**self.options, **more})

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the rotary module of the model gives."""
        rotary = getattr(self._file(), f"{self.prefix}RotaryEmbedding")(self._config())
        by_layer = {"layer_type": self._config().layer_types[self.layer_idx]} if self.name == "gemma3" else {}
        return rotary(x, torch.arange(x.shape[1])[None], **by_layer)

    def _file(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")

    def _config(self) -> Any:
        file = importlib.import_module(f"transformers.models.{self.name}.configuration_{self.name}")
        made = getattr(file, f"{self.prefix}{'Text' if self.name == 'gemma3' else ''}Config")(
            hidden_size=HIDDEN,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=D,
            num_hidden_layers=2,
            max_position_embeddings=64,
            **self.config,
        )
        made._attn_implementation = "eager"  # the one that honours softcap and sinks
        return made


GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
DIFFERENTIAL = {"layer_idx": 3, "norm_eps": 1e-5}
MODELS = {
    "llama": Model("llama", "Llama"),
    "llama/bias": Model("llama", "Llama", {"bias": True}, {"attention_bias": True}),
    "mistral": Model("mistral", "Mistral", {"sliding_window": 4}, {"sliding_window": 4}, mask.window(3)),
    "qwen2": Model("qwen2", "Qwen2", {"bias": True, "o_bias": False}),
    "qwen3": Model("qwen3", "Qwen3", {"qk_norm": True}),
    "gemma2": Model("gemma2", "Gemma2", {"scale": 24**-0.5, "softcap": 1.5}, {**GEMMA, "attn_logit_softcapping": 1.5}),
    "gemma3/window": Model(
        "gemma3",
        "Gemma3",
        {"qk_norm": True, "norm_offset": 1.0, "scale": 24**-0.5, "sliding_window": 4},
        GEMMA,
        mask.window(3),
    ),
    "gemma3/full": Model(
        "gemma3", "Gemma3", {"qk_norm": True, "norm_offset": 1.0, "scale": 24**-0.5}, GEMMA, layer_idx=1
    ),
    "gpt_oss": Model(
        "gpt_oss",
        "GptOss",
        {"sinks": True, "bias": True, "rotary_dim": D, "sliding_window": 4},
        {"attention_bias": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        mask.window(3),
    ),
    "glm": Model("glm", "Glm", {"interleaved": True, "bias": True, "o_bias": False}, {"attention_bias": True}),
    "diffllama": Model("diffllama", "DiffLlama", DIFFERENTIAL, layer_idx=3, maker=DifferentialAttention),
    "diffllama/groups": Model(
        "diffllama", "DiffLlama", DIFFERENTIAL, layer_idx=3, heads=8, kv_heads=4, maker=DifferentialAttention
    ),
    "diffllama/bias": Model(
        "diffllama",
        "DiffLlama",
        {"layer_idx": 0, "bias": True},
        {"attention_bias": True, "rms_norm_eps": 1e-5},
        maker=DifferentialAttention,
    ),
}


def pair(case: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(ours, theirs) with the same parameters."""
    model = MODELS[case]
    theirs = randomised(model.theirs()).to(dtype)
    ours = model.ours(dtype=dtype)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize("case", MODELS)
def test_drop_in(case: str) -> None:
    ours, theirs = pair(case)
    x, cotangent = problem()
    tables = MODELS[case].tables(x)
    expected = run(theirs, x, cotangent, position_embeddings=tables, attention_mask=additive(MODELS[case].seen))
    assert_same(run(ours, x, cotangent, tables), expected)


@pytest.mark.parametrize("case", MODELS)
def test_in_bf16_no_less_exact(case: str) -> None:
    """Against their module in float64."""
    ours, theirs = pair(case, torch.bfloat16)
    exact = copy.deepcopy(theirs).double()
    x, cotangent = problem(torch.bfloat16)
    tables, seen = MODELS[case].tables(x), MODELS[case].seen
    wide = tuple(t.double() for t in tables)
    wanted = run(
        exact, x.double(), cotangent.double(), position_embeddings=wide, attention_mask=additive(seen).double()
    )
    theirs_found = run(theirs, x, cotangent, position_embeddings=tables, attention_mask=additive(seen, torch.bfloat16))
    found = run(ours, x, cotangent, tables)
    assert_as_exact(found, theirs_found, wanted)


IDS = torch.arange(TOKENS) // 4
SEEN = {
    "prefix": mask.causal() | mask.prefix(3),
    "documents": mask.causal() & mask.document(IDS),
    "both_sides": mask.window(2, 1),
    "everything": mask.window(None, None),
    "padding": mask.causal() & ~mask.prefix(torch.tensor([0, 4])),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("case", ["gpt_oss", "diffllama"])
def test_a_mask_stands_for_all_that_is_seen(case: str, seen: str) -> None:
    """In place of the layer's own, as attention_mask is; the window of gpt_oss is gone."""
    ours, theirs = pair(case)
    x, cotangent = problem()
    tables = MODELS[case].tables(x)
    allowed = SEEN[seen].dense(BATCH, 1, TOKENS, TOKENS)
    rows = allowed.any(-1).transpose(1, 2)  # what a row without any key gets is transformers' own affair
    cotangent = cotangent * rows
    expected = run(theirs, x, cotangent, position_embeddings=tables, attention_mask=additive(SEEN[seen]))
    found = run(ours, x, cotangent, tables, mask=SEEN[seen])
    for made in (expected, found):
        made["y"] = made["y"] * rows
    assert_same(found, expected)


@pytest.mark.parametrize("case", ["qwen3", "gemma3/window", "gpt_oss", "diffllama"])
def test_autocast(case: str) -> None:
    """Projections and what lies between them in bf16, gradients as wide as their parameters; as exact as theirs."""
    ours, theirs = pair(case)
    x, cotangent = problem()
    tables, seen = MODELS[case].tables(x), MODELS[case].seen
    exact = run(theirs, x, cotangent, position_embeddings=tables, attention_mask=additive(seen))
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(theirs, x, cotangent.bfloat16(), position_embeddings=tables, attention_mask=additive(seen))
        found = run(ours, x, cotangent.bfloat16(), tables)
    assert found["y"].dtype == torch.bfloat16
    assert all(found[name].dtype == torch.float32 for name in exact if name != "y")
    assert_as_exact(found, expected, exact)
