"""Llama-3.1-8B's shape with random weights, and the ways to run it that `model_8b.py` compares.

Every variant is a `Variant`: two callables on one prompt and the seconds it took to get ready. Variants that only
replace modules share the weights of the model; merged projections move weights, so that variant has a copy of its
own.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from tilewright.generate import StaticDecoder

WEIGHT_STD = 0.02
SHAPES = {
    "8b": {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 128256,
        "context": 2048,
    },
    "tiny": {
        "hidden": 64,
        "intermediate": 192,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 512,
        "context": 48,
    },
}


@dataclass
class Variant:
    """prefill() -> logits (1, V) of the last prompt token; generate(n) -> ids (1, S + n)."""

    name: str
    prefill: Callable[[], torch.Tensor]
    generate: Callable[[int], torch.Tensor]
    preparation_s: float
    facts: dict[str, Any] = field(default_factory=dict)


def build(shape: dict[str, int], dtype: torch.dtype, device: torch.device) -> Any:
    """The model, initialised where it will live: no copy on the host, no second dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=WEIGHT_STD)
    model.generation_config.eos_token_id = None  # every call produces as many tokens as it was asked for
    model.generation_config.pad_token_id = 0
    return model


def variants(
    model: Any, prompt: torch.Tensor, *, attentions: list[str], compiled: bool, new_tokens: int
) -> Iterator[Variant]:
    """Every way to run `model`, made ready one after another; the peer first."""
    yield transformers_eager(model, prompt)
    if compiled:
        yield transformers_compiled(model, prompt)
    for attention in attentions:
        yield static("static" if attention == "auto" else f"static_{attention}", model, prompt, new_tokens, attention)
    yield static("static_patched", shared_copy(model), prompt, new_tokens, attentions[0], [patched])
    yield static("static_patched_merged", copy.deepcopy(model), prompt, new_tokens, attentions[0], [patched, merged])


def transformers_eager(model: Any, prompt: torch.Tensor) -> Variant:
    """Transformers as it comes: SDPA, a growing cache, every launch from Python."""

    def prefill() -> torch.Tensor:
        with torch.inference_mode():
            return model(prompt, use_cache=True, logits_to_keep=1).logits[:, -1]

    return ready("transformers_eager", prefill, lambda n: _generate(model, prompt, n), perf_counter())


def transformers_compiled(model: Any, prompt: torch.Tensor) -> Variant:
    """Transformers' own answer to slow decoding: its static cache with torch.compile, which it turns on by itself."""
    own = shared_copy(model)
    begin = perf_counter()

    def prefill() -> torch.Tensor:
        with torch.inference_mode():
            return own(prompt, use_cache=True, logits_to_keep=1).logits[:, -1]

    def generate(n: int) -> torch.Tensor:
        return _generate(own, prompt, n, cache_implementation="static")

    return ready("transformers_static_compile", prefill, generate, begin)


def static(
    name: str,
    model: Any,
    prompt: torch.Tensor,
    new_tokens: int,
    attention: str,
    changes: list[Callable[[Any, torch.Tensor], str]] | None = None,
) -> Variant:
    """Ours, after `changes` to the model; each returns what it did."""
    begin = perf_counter()
    done = {change.__name__: change(model, prompt) for change in changes or []}
    decoder = StaticDecoder(model, max_length=prompt.shape[1] + new_tokens, attention=attention)
    captured = decoder.prepare(prompt.shape[1], new_tokens)
    variant = ready(name, lambda: decoder.prefill(prompt), lambda n: decoder.generate(prompt, max_new_tokens=n), begin)
    variant.facts = {"attention": decoder.attention, "capture_s": captured, **done}
    return variant


def ready(
    name: str, prefill: Callable[[], torch.Tensor], generate: Callable[[int], torch.Tensor], begin: float
) -> Variant:
    """First calls belong to the preparation: they compile, plan and allocate."""
    prefill()
    generate(4)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Variant(name, prefill, generate, perf_counter() - begin)


def patched(model: Any, prompt: torch.Tensor) -> str:
    """Our ops in place of norms, rotary embeddings, gates and residual sums."""
    import tilewright

    rows = tilewright.patch(model, verify=False).report().counts()
    return str(rows)


def merged(model: Any, prompt: torch.Tensor) -> str:
    """One product for Q, K and V, and one for gate and up."""
    from tilewright.assistant.changes import MERGED_GATE_UP, MERGED_QKV
    from tilewright.assistant.workload import workload

    work = workload(model, prompt[:, :16])
    return "; ".join(change.apply(model, work).detail for change in (MERGED_QKV, MERGED_GATE_UP))


def shared_copy(model: Any) -> Any:
    """A second model, modules and configuration of its own, on the same weights."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _generate(model: Any, prompt: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)
