"""Models of transformers compute with "tilewright" what they compute with attention of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.models.zoo import build, checkpoint, tokens
from torch import Tensor, nn

from tilewright.dispatch import record
from tilewright.errors import InputError
from tilewright.generate import StaticDecoder
from tilewright.models import register_attention

NAME = register_attention()
EAGER = ("gemma2", "gpt_oss")  # for soft caps and sinks, which SDPA ignores
MODELS = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3")


def test_names() -> None:
    """Nothing of transformers' own is replaced, and nothing of ours added twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    registries = AttentionInterface(), AttentionMaskInterface()
    before = [dict(registry) for registry in registries]
    assert register_attention() == NAME
    assert [dict(registry) for registry in registries] == before
    assert {NAME, "tilewright_measured", "tilewright_triton"} <= before[0].keys() & before[1].keys()
    assert registries[0]["sdpa"] is sdpa_attention_forward


def both(name: str, run: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """What `run` makes of a model with its own attention, and of the same model with ours."""
    own = "eager" if name in EAGER else "sdpa"
    return run(build(name, attn_implementation=own, **options)), run(build(name, attn_implementation=NAME, **options))


def padded(side: str, length: int = 24, pads: int = 10) -> tuple[Tensor, Tensor]:
    """ids and attention_mask (2, length); `pads` of the second row are padding."""
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    if side != "none":
        mask[1, :pads] = 0
        mask = mask if side == "left" else mask.flip(1)
    return ids.masked_fill(mask == 0, 0), mask


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, side: str) -> None:
    ids, mask = padded(side)

    def run(model: Any) -> Tensor:
        with torch.no_grad(), record() as recording:
            logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
        ours = {plan.op for plan in recording.plans}
        assert ours == ({"fmha"} if model.config._attn_implementation == NAME else set())
        return logits[mask.bool()]

    expected, got = both(name, run)
    close(got, expected)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_generate(name: str, cache: str | None, side: str) -> None:
    """Past the window of 8, and into a cache that is longer than what it holds."""
    ids, mask = padded(side, 14, 5)

    def run(model: Any) -> Any:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True, eos_token_id=None,
            return_dict_in_generate=True, cache_implementation=cache,
        )  # fmt: skip

    expected, got = both(name, run)
    close(torch.stack(got.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama"])
def test_static_decoder(name: str) -> None:
    """Steps of a model with soft caps or sinks are eager, as they are before it runs "tilewright"."""
    ids, mask = padded("left", 14, 5)

    def run(model: Any) -> tuple[str, Tensor]:
        decoder = StaticDecoder(model, max_length=32, batch_size=2)
        return decoder.attention, decoder.generate(ids, mask, max_new_tokens=8)

    (form, expected), (our_form, got) = both(name, run)
    assert form == our_form == ("model" if name in EAGER else "sdpa")
    assert torch.equal(got, expected)


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["kept", "reentrant", "checkpointed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_gradients(name: str, checkpointed: bool | None) -> None:
    ids, mask = padded("left")
    labels = ids.masked_fill(mask.cumsum(-1) <= 1, -100)  # none is predicted by a token that sees nothing

    def run(model: Any) -> list[Tensor]:
        model.train()
        if checkpointed is not None:
            checkpoint(model, reentrant=checkpointed)
        model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for expected, got in zip(*both(name, run), strict=True):
        close(got, expected)


def test_packed_documents() -> None:
    positions = torch.cat((torch.arange(10), torch.arange(14)))[None]

    def run(model: nn.Module) -> Tensor:
        logits: Tensor = model(input_ids=tokens(1), position_ids=positions, use_cache=False).logits
        return logits

    expected, got = both("mistral", run)
    close(got, expected)


@pytest.mark.parametrize("blocked", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_of_ones_own(blocked: float | None) -> None:
    """bool, or numbers to be added to the scores."""
    seen = (torch.rand(2, 1, 24, 24) < 0.5) | torch.eye(24, dtype=torch.bool)
    mask = seen if blocked is None else torch.zeros(seen.shape).masked_fill(~seen, blocked)
    expected, got = both("llama", lambda model: model(input_ids=tokens(), attention_mask=mask, use_cache=False).logits)
    close(got, expected)


def test_dropout_drops() -> None:
    ids, mask = padded("left")
    model = build("llama", attn_implementation=NAME, attention_dropout=0.5).train()
    first, second = (model(input_ids=ids, attention_mask=mask).logits for _ in range(2))
    assert first.isfinite().all()
    assert not torch.equal(first, second)


def test_autocast() -> None:
    """Rotary embeddings leave q and k in float32 and v in bfloat16."""

    def run(model: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = model(input_ids=tokens()).logits
        return logits

    expected, got = both("llama", run)
    torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {**_SMALL, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 48}
_BART = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}


def encoder(name: str, own: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Runs the model of transformers twice, with its own attention and with ours."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()

    def run(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        made = []
        for implementation in (own, NAME):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                made.append(model(**inputs)[0])
        return made[0], made[1]

    return run


@pytest.mark.parametrize("name", ["ViT", "SiglipVision", "CLIPVision"])
def test_vision_encoder(name: str) -> None:
    """Not causal, 25 or 26 tokens."""
    run = encoder(name, "sdpa", **_SMALL, image_size=30, patch_size=6)
    close(*run(pixel_values=torch.randn(2, 3, 30, 30)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Bert", {}),
        ("ModernBert", {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
        ("Llama4Text", {"attention_chunk_size": 7, "num_key_value_heads": 2, "head_dim": 8, **_LLAMA4}),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_text_encoder(name: str, options: dict[str, Any], side: str) -> None:
    """Both ways, in a window both ways, and in chunks that begin behind the padding."""
    torch.manual_seed(0)
    config = getattr(transformers, name.replace("Text", "") + ("TextConfig" if "Text" in name else "Config"))
    model = getattr(transformers, f"{name}Model")(config(**_TEXT, **options)).eval()
    ids, mask = padded(side, 17, 6)
    made = []
    for implementation in ("sdpa", NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            made.append(model(input_ids=ids, attention_mask=mask)[0][mask.bool()])
    close(made[1], made[0])


@pytest.mark.parametrize("length", [1, 5, 17, 30])
def test_cross_attention(length: int) -> None:
    """Fewer and more queries than keys, some of which are padding."""
    ids, mask = padded("right", 17, 6)
    run = encoder("Bart", "sdpa", d_model=32, vocab_size=128, max_position_embeddings=64, **_BART)
    close(*run(input_ids=ids, attention_mask=mask, decoder_input_ids=tokens(2, length)))


def test_what_is_refused() -> None:
    model = build("llama", attn_implementation=NAME)
    ids = tokens()
    with pytest.raises(InputError, match="weights are never stored"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(InputError, match="other numbers than 0 and -inf"):
        model(input_ids=ids, attention_mask=torch.randn(2, 1, 24, 24))
    with pytest.raises(InputError, match="cu_seq_lens_q without a mask"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 10, 24]), use_cache=False)
    with pytest.raises(InputError, match="dropout goes with masks alone"):
        build("gpt_oss", attn_implementation=NAME, attention_dropout=0.5).train()(input_ids=ids)
    t5 = transformers.T5EncoderModel(transformers.T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=48))
    t5.set_attn_implementation(NAME)
    with pytest.raises(InputError, match="position_bias, a position bias"):
        t5(input_ids=ids)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_whole(name: str, side: str) -> None:
    torch._dynamo.reset()
    ids, mask = padded(side)

    def run(model: Any) -> Tensor:
        if model.config._attn_implementation == NAME:
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[mask.bool()]

    expected, got = both(name, run)
    close(got, expected)


def test_compiled_layers_take_every_mask() -> None:
    """The mask in closed form is an input of the graph: other padding and other lengths are other masks."""
    torch._dynamo.reset()
    own, ours = build("mistral"), build("mistral", attn_implementation=NAME)
    layers: Any = ours.get_submodule("model.layers")
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for length, pads in ((24, 10), (24, 3), (28, 5), (20, 0)):
        ids, mask = padded("left", length, pads)
        with torch.no_grad():
            expected, got = (m(input_ids=ids, attention_mask=mask, use_cache=False).logits for m in (own, ours))
        close(got[mask.bool()], expected[mask.bool()])
