"""On a GPU: captured decoding equals eager decoding and Transformers, waits for nothing, survives streams, changes."""

import copy

import pytest
import torch
from tests.generate.tiny import build, prompts

from tilewright.generate import StaticDecoder, attach_generate

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen3", "gemma2", "mistral")
ATTENTION = ("split_kv", "sdpa", "grouped", "model")


class Recorder:
    """A streamer that remembers; None marks the end."""

    def __init__(self):
        self.got = []

    def put(self, tokens):
        self.got.append(tokens)

    def end(self):
        self.got.append(None)


def on_gpu(name: str, **overrides):
    return build(name, **overrides).to("cuda")


def gpu_prompts(batch: int, length: int, pads: int = 0):
    return tuple(t.to("cuda") for t in prompts(batch, length, pads))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_equals_eager_equals_transformers(family, attention):
    """fp32, left padding; 600 positions cross a bucket boundary at 512 and wrap a ring of 64 several times."""
    model = on_gpu(family)
    ids, mask = gpu_prompts(2, 450, pads=5)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=130, do_sample=False)
    options = {"max_length": 640, "batch_size": 2, "attention": attention}
    captured = StaticDecoder(model, **options)
    assert torch.equal(captured.generate(ids, mask, max_new_tokens=130), expected)
    assert len(captured._graphs) == (1 if attention == "split_kv" else 2)
    eager = StaticDecoder(model, **options, graphs=False)
    assert torch.equal(eager.generate(ids, mask, max_new_tokens=130), expected)


def test_compiled_layers_are_captured():
    """Inductor takes the attention kernel into its graph, and passes its scale as float64."""
    model = on_gpu("llama")
    ids, _ = gpu_prompts(1, 40)
    expected = StaticDecoder(model, max_length=64).generate(ids, max_new_tokens=16)
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    assert torch.equal(StaticDecoder(model, max_length=64).generate(ids, max_new_tokens=16), expected)


@pytest.mark.parametrize("attention", ATTENTION)
def test_bf16_captured_equals_eager(attention):
    """The same kernels on the same inputs: bit for bit. Room for one bucket only, so that both read the same slots."""
    model = on_gpu("llama").to(torch.bfloat16)
    ids, _ = gpu_prompts(1, 40)
    outputs = []
    for graphs in (True, False):
        decoder = StaticDecoder(model, max_length=128, attention=attention, graphs=graphs)
        decoder._visible = lambda position: 128
        outputs.append(decoder.generate(ids, max_new_tokens=60))
    assert torch.equal(*outputs)


def test_one_decoder_many_prompts():
    model = on_gpu("mistral")
    decoder = StaticDecoder(model, max_length=256)
    for length in (150, 3, 64, 1):
        ids, mask = gpu_prompts(1, length)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
        assert torch.equal(decoder.generate(ids, max_new_tokens=40), expected)
    assert len(decoder._graphs) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_end_of_text(rows):
    """Noticed late by the host, exact in the result, with a streamer and without."""
    model = on_gpu("llama")
    ids, mask = gpu_prompts(rows, 12)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=60, do_sample=False)
    eos = [int(free[row, 12 + 5 * (row + 1)]) for row in range(rows)]
    options = {"max_new_tokens": 60, "eos_token_id": eos, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    decoder = StaticDecoder(model, max_length=128, batch_size=rows)

    recorder = Recorder()
    assert torch.equal(decoder.generate(ids, **options), expected)
    assert torch.equal(decoder.generate(ids, **options, streamer=recorder), expected)
    assert recorder.got.pop() is None
    assert torch.equal(torch.stack(recorder.got[1:], dim=1), expected[:, 12:].cpu())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_p": 0.9, "seed": 0}], ids=["greedy", "sampled"])
def test_no_token_waits_for_the_host(monkeypatch, sampling):
    model = on_gpu("llama")
    ids, _ = gpu_prompts(1, 12)
    decoder = StaticDecoder(model, max_length=128)
    first = decoder.generate(ids, max_new_tokens=50, **sampling)
    decode = decoder._decode

    def guarded(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return decode(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(decoder, "_decode", guarded)
    assert torch.equal(decoder.generate(ids, max_new_tokens=50, **sampling), first)


def test_streams():
    """Calls follow each other on different streams without any waiting of the caller."""
    model = on_gpu("llama")
    ids, mask = gpu_prompts(1, 100)
    other, other_mask = gpu_prompts(1, 30)
    want = model.generate(ids, attention_mask=mask, max_new_tokens=50, do_sample=False)
    want_other = model.generate(other, attention_mask=other_mask, max_new_tokens=50, do_sample=False)
    decoder = StaticDecoder(model, max_length=256)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(3):
        for stream, prompt in zip(streams, (ids, other), strict=True):
            with torch.cuda.stream(stream):
                results.append(decoder.generate(prompt, max_new_tokens=50))
    torch.cuda.synchronize()
    for at, got in enumerate(results):
        assert torch.equal(got, (want, want_other)[at % 2])


def test_two_decoders_of_one_model_take_turns():
    model = on_gpu("llama")
    first, second = (StaticDecoder(model, max_length=128) for _ in range(2))
    ids, _ = gpu_prompts(1, 30)
    want = first.generate(ids, max_new_tokens=30)
    for decoder in (second, first, second):
        assert torch.equal(decoder.generate(ids, max_new_tokens=30), want)


def test_sampling_in_the_graph_equals_eager_sampling():
    model = on_gpu("llama")
    ids, _ = gpu_prompts(2, 12)
    options = {"max_new_tokens": 60, "do_sample": True, "temperature": 2.0, "top_k": 40, "top_p": 0.95}
    captured = StaticDecoder(model, max_length=128, batch_size=2)
    eager = StaticDecoder(model, max_length=128, batch_size=2, graphs=False)
    for seed in (1, 2):
        assert torch.equal(captured.generate(ids, **options, seed=seed), eager.generate(ids, **options, seed=seed)), (
            "replays draw other numbers than eager steps"
        )
    graphs = len(captured._graphs)
    captured.generate(ids, **options | {"temperature": 0.7, "top_p": 0.5}, seed=1)
    assert len(captured._graphs) == graphs, "temperature and top_p are read from the device"


def test_draws_differ_from_replay_to_replay():
    """Uniform logits: 200 draws of 256 tokens repeat less than half of the time, unless the generator stands still."""
    model = on_gpu("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    ids, _ = gpu_prompts(1, 4)
    out = StaticDecoder(model, max_length=256).generate(ids, max_new_tokens=200, do_sample=True, top_k=0, seed=0)
    assert len(set(out[0, 4:].tolist())) > 100


def test_a_changed_model_is_captured_again():
    model = on_gpu("llama")
    ids, mask = gpu_prompts(1, 20)
    decoder = StaticDecoder(model, max_length=128)
    decoder.generate(ids, max_new_tokens=20)
    replacement = build("llama", rms_norm_eps=1e-2).to("cuda").model.layers[0].input_layernorm
    model.model.layers[0].input_layernorm = replacement
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().mul_(1.1)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), expected)
    model.to(torch.bfloat16)
    assert decoder.generate(ids, max_new_tokens=20).shape == expected.shape


def test_prepare_captures_ahead():
    model = on_gpu("llama")
    decoder = StaticDecoder(model, max_length=1024, attention="sdpa")
    assert decoder.prepare(500, 30) > 0
    assert len(decoder._graphs) == 2
    ids, mask = gpu_prompts(1, 500)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=30), expected)
    assert len(decoder._graphs) == 2


def test_a_patched_model():
    """Custom ops are recorded like any other; the patched step equals the patched model run eagerly."""
    import tilewright

    model = on_gpu("llama")
    patch = tilewright.patch(model, verify=False)
    ids, mask = gpu_prompts(1, 20)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert torch.equal(StaticDecoder(model, max_length=128).generate(ids, max_new_tokens=40), expected)
    patch.undo()


def test_a_step_that_waits_is_refused():
    from tilewright.errors import BackendError

    model = on_gpu("llama")
    model.model.norm.register_forward_hook(lambda module, args, output: output * float(output.flatten()[0] > -1e9))
    with pytest.raises(BackendError, match="graphs=False"):
        StaticDecoder(model, max_length=64).generate(gpu_prompts(1, 4)[0], max_new_tokens=4)
    torch.rand(1, device="cuda")  # no capture was left half done
    assert StaticDecoder(model, max_length=64, graphs=False).generate(gpu_prompts(1, 4)[0], max_new_tokens=4).shape == (
        1,
        8,
    )


def test_attached():
    model = on_gpu("gemma2")
    ids, mask = gpu_prompts(2, 20, pads=4)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    attachment = attach_generate(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False), expected)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False), expected)
    attachment.undo()


@pytest.mark.parametrize(
    "wait", [lambda t: float(t.flatten()[0]), lambda t: torch.cuda.synchronize()], ids=["read", "sync"]
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_attached_to_a_model_that_cannot_be_captured(wait, do_sample, caplog):
    """The model does it itself, also with torch's own generator, which a capture that broke off leaves unusable."""
    model = on_gpu("llama")
    ids, mask = gpu_prompts(2, 20, pads=4)
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": do_sample}
    torch.manual_seed(5)
    expected = model.generate(ids, **options)
    handle = model.model.norm.register_forward_hook(lambda module, args, output: (wait(output), output)[1])
    attachment = attach_generate(model)
    for _ in range(2):
        got = model.generate(ids, **options)
        assert got.shape == expected.shape
        assert do_sample or torch.equal(got, expected)
    assert [record.levelname for record in caplog.records if record.name == "tilewright"] == ["WARNING"]
    assert "cannot be captured" in caplog.text
    handle.remove()
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())  # another model now: tried again
    assert model.generate(ids, **options).shape == expected.shape
    assert len(attachment._decoders) == 1
    attachment.undo()


def test_attached_where_the_cache_does_not_fit(caplog):
    model = on_gpu("llama")
    ids, mask = gpu_prompts(1, 20)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)

    def huge(model, batch_size, max_length):
        return StaticDecoder(model, batch_size=batch_size, max_length=1 << 40)

    attachment = attach_generate(model, huge)
    for _ in range(2):
        got = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert torch.equal(got, expected)
    assert [record.levelname for record in caplog.records if record.name == "tilewright"] == ["WARNING"]
    attachment.undo()
