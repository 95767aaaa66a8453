"""Steps over transformers' static cache attend by `fmha_decode` where a length says all, and by masks elsewhere."""

from typing import Any

import pytest
import torch
import transformers
from tests.models.zoo import build, tokens
from torch import Tensor

from tilewright.dispatch import record
from tilewright.models import register_attention
from tilewright.models.attention import step

NAME = register_attention()
OWN = {"llama": "sdpa", "mistral": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the reference computes."""
    monkeypatch.setattr(step, "is_served", lambda device: True)


def generated(model: Any, pads: int, new: int = 8) -> tuple[Tensor, list[str]]:
    """Logits of new tokens over a static cache that is longer than what it holds, and the ops that ran."""
    ids, mask = tokens(2, 14), torch.ones(2, 14, dtype=torch.long)
    mask[1, :pads] = 0
    with record() as recording:
        got = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, output_logits=True, eos_token_id=None,
            return_dict_in_generate=True, cache_implementation="static", disable_compile=True,
        )  # fmt: skip
    return torch.stack(got.logits), [call[0].op for call in recording.calls]


@pytest.mark.parametrize("pads", [0, 5])
@pytest.mark.parametrize("name", OWN)
def test_tokens_over_a_static_cache(name: str, pads: int, served: None) -> None:
    """Sliding layers, and all layers where there is padding, keep masks of elements."""
    expected, _ = generated(build(name, attn_implementation=OWN[name]), pads)
    model: Any = build(name, attn_implementation=NAME)
    got, ops = generated(model, pads)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    full = 0 if name == "mistral" else sum(kind == "full_attention" for kind in kinds)
    assert ops.count("fmha_decode") == (0 if pads else 7 * full)
    assert ops.count("fmha") == len(kinds) * 8 - ops.count("fmha_decode")


def test_a_patched_model_steps_over_a_static_cache(served: None) -> None:
    """Whatever the tables say of `fmha`: torch would read all of the cache."""
    from tilewright.models.attention.interface import MEASURED

    model: Any = build("llama")
    expected, _ = generated(model, 0)
    model.set_attn_implementation(MEASURED)
    got, ops = generated(model, 0)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert ops.count("fmha_decode") == 7 * model.config.num_hidden_layers


def test_a_compiled_step(served: None) -> None:
    """As transformers compiles it: masks are made outside, so that a length goes into the graph."""
    model: Any = build("llama", attn_implementation=NAME)
    expected, _ = generated(model, 0, 4)
    cache = transformers.StaticCache(model.config, max_cache_len=24)
    ids = tokens(2, 14)
    with torch.no_grad():
        logits = [model(input_ids=ids, past_key_values=cache).logits[:, -1]]
        compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        for position in range(14, 17):
            mask = step.step_mask(2, 24, torch.tensor(position), None, ids.device)
            out = compiled(
                input_ids=logits[-1].argmax(-1)[:, None], attention_mask=mask, past_key_values=cache,
                position_ids=torch.full((2, 1), position),
            )  # fmt: skip
            logits.append(out.logits[:, -1])
    torch.testing.assert_close(torch.stack(logits), expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_through_a_step(served: None) -> None:
    """`fmha_decode` has none."""
    q, k, v = (torch.randn(2, heads, n, 16, requires_grad=True) for heads, n in ((4, 1), (2, 9), (2, 9)))
    from tilewright.models.attention.interface import attend

    mask = step.step_mask(2, 9, torch.tensor(4), None, q.device)
    o, _ = attend(torch.nn.Module(), q, k, v, mask)
    o.sum().backward()
    assert v.grad is not None
    assert v.grad[:, :, :5].any()
    assert not v.grad[:, :, 5:].any()


def test_the_elements_of_a_step_mask(served: None) -> None:
    mask = step.step_mask(3, 7, torch.tensor(2), torch.ones(3, 3, dtype=torch.bool), torch.device("cpu"))
    assert step.is_step(mask)
    assert torch.equal(step.elements(mask), (torch.arange(7) < 3).expand(3, 1, 1, 7))
    holes = torch.ones(3, 3, dtype=torch.bool)
    holes[0, 0] = False
    assert step.step_mask(3, 7, torch.tensor(2), holes, torch.device("cpu")) is None
    assert step.step_mask(3, 7, torch.tensor(3), torch.ones_like(holes), torch.device("cpu")) is None  # a key too few


@pytest.mark.interp
def test_interpreted() -> None:
    expected, _ = generated(build("llama"), 0, 4)
    got, ops = generated(build("llama", attn_implementation=NAME), 0, 4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert "fmha_decode" in ops


@pytest.mark.gpu
def test_one_graph_serves_a_growing_cache() -> None:
    """A user's own capture: lengths stay on the device."""
    model: Any = build("llama").cuda()
    ids = tokens(2, 14).cuda()
    new = model.generate(ids, max_new_tokens=9, min_new_tokens=9, do_sample=False, eos_token_id=None)
    model.set_attn_implementation(NAME)
    cache = transformers.StaticCache(model.config, max_cache_len=64)
    token, place = (
        torch.zeros(2, 1, dtype=torch.long, device="cuda"),
        torch.zeros(2, 1, dtype=torch.long, device="cuda"),
    )

    def forward() -> Tensor:
        return model(input_ids=token, past_key_values=cache, position_ids=place).logits[:, -1].argmax(-1)

    with torch.inference_mode():
        token.copy_(model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1))
        got, place[:] = [token[:, 0].clone()], 14
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = forward()  # compiles; a step like others
        torch.cuda.current_stream().wait_stream(stream)
        got.append(first.clone())
        token.copy_(first[:, None])
        place += 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chosen = forward()
        for _ in range(7):
            graph.replay()
            got.append(chosen.clone())
            token.copy_(chosen[:, None])
            place += 1
    assert torch.equal(torch.stack(got, 1), new[:, 14:])
