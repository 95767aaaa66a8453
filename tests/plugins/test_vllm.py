"""Our classes in vLLM's own registries, and a model of vLLM's made of them: needs vLLM, no GPU.

vLLM 0.33 without a GPU chooses no platform, and sends an enabled op to `forward_cuda`.  The one thing that is put in
its place here is the platform's choice of attention, which asks the backend what the platform of NVIDIA's GPUs asks it.
"""

from importlib.metadata import EntryPoint

import pytest
import torch
from tests.plugins.paged import HEADS, KV_HEADS, PAGE, D, attention, batch
from torch.testing import assert_close

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import plugins
from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tilewright.plugins.vllm.functions import Step

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "UserWarning")]
ENTRY = EntryPoint("tilewright", "tilewright.plugins.vllm:register", plugins.DEFAULT_PLUGINS_GROUP)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """As vLLM does it when it starts; twice, as in processes that load plug-ins again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.entry_points", lambda group: [ENTRY] if group == ENTRY.group else [])
        for _ in range(2):
            patch.setattr(plugins, "plugins_loaded", False)
            plugins.load_general_plugins()
    yield
    for name in [name for name, own in op_registry_oot.items() if own.__module__.startswith("tilewright.")]:
        del op_registry_oot[name]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """vLLM's groups of processes, of one."""
    with set_current_vllm_config(config()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('ranks')}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def config(custom_ops="all", model=None):
    options = {} if model is None else {"model_config": model}
    return VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(custom_ops=[custom_ops], mode=0),
        cache_config=CacheConfig(block_size=PAGE),
        **options,
    )


@pytest.fixture
def enabled():
    with set_current_vllm_config(config()):
        yield


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(layer, *args):
    """What the layer computes, and vLLM's own code in plain torch."""
    assert type(layer).__module__ == "tilewright.plugins.vllm.layers"
    assert layer._forward_method == layer.forward_cuda
    theirs = layer.forward_native(*(x.clone() if isinstance(x, torch.Tensor) else x for x in args))
    return layer(*args), theirs


@pytest.mark.parametrize("cls", [RMSNorm, GemmaRMSNorm])
def test_norms(enabled, cls):
    layer = cls(64).bfloat16()
    layer.weight.data += draw(64)
    x, residual = draw(5, 64, seed=1), draw(5, 64, seed=2)
    assert_close(*both(layer, x), atol=0, rtol=1e-2)
    # vLLM's plain torch takes the norm of a sum that was not rounded; its kernel, and ours, of a rounded one
    ours, theirs = both(layer, x, residual)
    assert_close(ours[0], theirs[0], atol=3e-2, rtol=3e-2)
    assert torch.equal(ours[1], theirs[1])


def test_norms_that_stay_vllms(enabled):
    for layer in (RMSNorm(64, var_hidden_size=32).bfloat16(), RMSNorm(64, dtype=torch.float32)):
        assert torch.equal(*both(layer, draw(5, 64)))


def test_gates(enabled):
    x = draw(2, 3, 64)
    for layer in (SiluAndMul(), GeluAndMul(), GeluAndMul(approximate="tanh")):
        assert torch.equal(*both(layer, x))


@pytest.mark.parametrize("scaling", [None, "linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embeddings(enabled, scaling, neox):
    numbers = {"factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {"rope_type": scaling or "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **numbers}
    layer = get_rope(32, 64, neox, parameters, torch.float32)
    qkv = draw(6, 5 * 32, dtype=torch.float32)
    query, key, _ = qkv.split([3 * 32, 32, 32], dim=-1)
    ours, theirs = both(layer, torch.tensor([3, 0, 63, 7, 7, 1]), query, key)
    assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert both(layer, torch.arange(6), query)[0][1] is None


def test_options_that_leave_vllm_alone():
    with set_current_vllm_config(config("none")):
        layer = RMSNorm(64)
        assert layer._forward_method == layer.forward_native


def test_layers_in_a_compiled_graph(enabled):
    norm, gate, rope = RMSNorm(64), SiluAndMul(), get_rope(32, 64, True, None, torch.float32)

    def step(x, residual, positions):
        x, residual = norm(x, residual)
        q, k = rope(positions, x, x)
        return gate(torch.cat([q, k], -1)), residual

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        args = (
            draw(tokens, 64, dtype=torch.float32),
            draw(tokens, 64, seed=1, dtype=torch.float32),
            torch.arange(tokens),
        )
        for ours, theirs in zip(compiled(*args), step(*args), strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize(("name", "tolerance"), [("tilewright", 1e-5), ("tilewright_fp8", 8e-2)])
@pytest.mark.parametrize("size", [512, 48])
def test_linear_layers(ranks, enabled, name, tolerance, size):
    layer = ReplicatedLinear(
        size,
        size,
        quant_config=get_quantization_config(name).from_config({}),
        params_dtype=torch.float32,
        disable_tp=True,
    )
    weight, x, bias = (
        draw(size, size, dtype=torch.float32),
        draw(4, size, seed=1, dtype=torch.float32),
        draw(size, seed=2, dtype=torch.float32),
    )
    layer.weight.weight_loader(layer.weight, weight)
    layer.bias.data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)
    wanted = x.double() @ weight.double().T + bias
    is_small = size < 512
    assert (layer.weight.dtype == torch.float8_e4m3fn) == (name == "tilewright_fp8" and not is_small)
    error = (layer(x)[0].double() - wanted).norm() / wanted.norm()
    assert error < (1e-5 if is_small else tolerance)


def backend():
    return AttentionBackendEnum["TILEWRIGHT"].get_class()


def metadata(step):
    """By our builder, from what vLLM's runner makes."""
    builder = backend().get_builder_cls()(None, [], None, torch.device("cpu"))
    common = CommonAttentionMetadata(
        query_start_loc=step.starts,
        query_start_loc_cpu=step.starts,
        seq_lens=step.lengths,
        num_reqs=step.lengths.shape[0],
        num_actual_tokens=step.tokens,
        max_query_len=step.longest,
        max_seq_len=int(step.lengths.max()),
        block_table_tensor=step.block_table,
        slot_mapping=torch.zeros(step.tokens, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match="not causal"):
        builder.build(0, common.replace(causal=False))
    return builder.build(0, common)


@pytest.mark.parametrize("new", [[1, 1], [1, 18]])
def test_attention_of_a_layer(enabled, new):
    its = batch([20, 3], new, padding=2)
    impl = backend().get_impl_cls()(HEADS, D, 0.2, KV_HEADS, sliding_window=9, logits_soft_cap=3.0)
    out = torch.empty_like(its.query)
    impl.forward(None, its.query, its.key, its.value, its.cache, metadata(its.step), out)
    wanted = attention(its, scale=0.2, window=9, softcap=3.0)
    assert_close(out[: its.step.tokens].double(), wanted, atol=1e-5, rtol=1e-5)
    assert (impl.forward(None, its.query, its.key, its.value, its.cache, None, out) == 0).all(), "memory is measured"


def reasons(**options):
    asked = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder",
    }  # fmt: skip
    return backend().validate_configuration(**asked | options)


def test_what_vllm_is_told_before_it_starts():
    assert reasons() == reasons(kv_cache_dtype="fp8", has_sink=True, has_sliding_window=True, block_size=64) == []
    for options in (
        {"head_size": 512}, {"block_size": 8}, {"kv_cache_dtype": "fp8_e5m2"}, {"use_mla": True}, {"use_dcp": True},
        {"attn_type": "encoder_only"}, {"use_non_causal": True}, {"device_capability": DeviceCapability(7, 5)},
        {"use_batch_invariant": True}, {"use_mm_prefix": True},
    ):  # fmt: skip
        assert len(reasons(**options)) == 1, options
    with pytest.raises(ValueError, match="ALiBi"):
        backend().get_impl_cls()(4, 64, 0.1, alibi_slopes=[1.0])


@pytest.fixture
def choose(monkeypatch):
    def chosen(cls, selected, attn_selector_config, num_heads=None):
        assert not reasons(**attn_selector_config._asdict())
        return selected.get_path()

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(chosen))


@pytest.fixture
def llama(tmp_path):
    """A folder with a small model, and the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"hidden_size": HEADS * D, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=128, intermediate_size=96, **heads))
    model.eval().save_pretrained(tmp_path)
    return tmp_path, model


@pytest.mark.parametrize("quantization", [None, "tilewright"])
def test_a_model_of_vllms(ranks, choose, llama, quantization):
    """vLLM's Llama with our norms, gates, rotation, products and attention: a prompt in chunks, then decoding."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    folder, model = llama
    options = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    settings = config(model=ModelConfig(model=str(folder), tokenizer=str(folder), quantization=quantization, **options))
    settings.attention_config.backend = AttentionBackendEnum["TILEWRIGHT"]
    tokens, table = torch.arange(40) * 7 % 128, torch.tensor([[4, 1, 3]], dtype=torch.int32)
    with set_current_vllm_config(settings), torch.no_grad():
        theirs = LlamaForCausalLM(vllm_config=settings)
        theirs.load_weights(model.state_dict().items())
        layers = settings.compilation_config.static_forward_context
        for layer in layers.values():
            layer.kv_cache = torch.full((5, PAGE, KV_HEADS, 2 * D), torch.nan).transpose(1, 2)
        rows = []
        for begin, end in ((0, 18), (18, 38), (38, 39), (39, 40)):
            its = dict.fromkeys(layers, metadata(step_of_one(end - begin, end, table)))
            with set_forward_context(its, settings):
                rows.append(theirs.compute_logits(theirs(tokens[begin:end], torch.arange(begin, end))))
    with torch.no_grad():
        assert_close(torch.cat(rows), model(tokens[None]).logits[0], atol=2e-5, rtol=2e-5)
    used = {type(module).__module__.split(".")[0] for module in theirs.modules() if "Norm" in type(module).__name__}
    assert used == {"tilewright"}


def step_of_one(new, length, table):
    return Step(new, new, torch.tensor([0, new]).int(), torch.tensor([length]).int(), table)
