"""Split-KV attention against a float64 oracle: odd lengths, padding, rings, groups, head sizes; then in a decoder."""

import pytest
import torch
from tests.generate.tiny import build, prompts

CASES = {  # batch, heads, kv_heads, d_k, d_v, capacity, position, window, first
    "one_key": (1, 4, 2, 16, 16, 64, 0, None, (0,)),
    "tail_mask": (1, 4, 2, 64, 64, 256, 130, None, (0,)),
    "all_slots": (2, 8, 2, 64, 64, 128, 127, None, (0, 0)),
    "left_padding": (2, 4, 4, 32, 32, 128, 77, None, (0, 70)),
    "ring_wrapped": (2, 4, 2, 32, 32, 64, 150, 40, (0, 140)),
    "window_not_reached": (1, 4, 2, 32, 32, 64, 20, 40, (0,)),
    "group_above_16": (1, 20, 1, 32, 32, 128, 100, None, (0,)),
    "head_96": (1, 4, 2, 96, 96, 128, 90, None, (0,)),
    "head_256": (1, 2, 1, 256, 256, 128, 90, None, (0,)),
    "value_head_differs": (1, 4, 4, 48, 32, 128, 90, None, (0,)),
}


def problem(case, dtype, device):
    batch, heads, kv_heads, d_k, d_v, capacity, position, window, first = case
    query = torch.randn(batch, heads, 1, d_k).to(device, dtype)
    keys = torch.randn(batch, kv_heads, capacity, d_k).to(device, dtype)
    values = torch.randn(batch, kv_heads, capacity, d_v).to(device, dtype)
    lower = torch.tensor(first)
    if window is not None:
        lower = lower.clamp(min=position - window + 1)
    bounds = torch.stack((lower, torch.full_like(lower, position)), -1)[:, None, None].to(device)
    # Slots that no kernel may read are poisoned.
    for row in range(batch):
        seen = torch.arange(int(lower[row]), position + 1) % capacity
        unseen = torch.ones(capacity, dtype=torch.bool).index_fill_(0, seen, False)
        keys[row, :, unseen] = float("nan")
        values[row, :, unseen] = float("nan")
    return query, keys, values, bounds


def oracle(query, keys, values, bounds, scaling):
    capacity, group = keys.shape[2], query.shape[1] // keys.shape[1]
    rows = []
    for row in range(query.shape[0]):
        low, high = bounds[row, 0, 0].tolist()
        slots = torch.arange(low, high + 1, device=query.device) % capacity
        k = keys[row, :, slots].double().repeat_interleave(group, 0)
        v = values[row, :, slots].double().repeat_interleave(group, 0)
        weights = (query[row].double() @ k.mT * scaling).softmax(-1)
        rows.append((weights @ v)[:, 0])
    return torch.stack(rows)[:, None]


def agrees(case, dtype, device, splits):
    from tilewright.generate.attention.split_kv import split_kv
    from tilewright.ops.attention.kernels.triton import decode as module

    query, keys, values, bounds = problem(case, dtype, device)
    assert module.choose(query.shape[0], keys.shape[1], keys.shape[3], keys.shape[2], 132).splits >= 1
    out, weights = split_kv(None, query, keys, values, bounds, scaling=0.3)
    assert weights is None
    expected = oracle(query, keys, values, bounds, 0.3)
    assert out.shape == expected.shape
    unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (out.double() - expected).abs().max() <= 2 * unit * expected.abs().max().clamp(min=1)


@pytest.mark.interp
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted(case, splits, monkeypatch):
    from tilewright.ops.attention.kernels.triton import decode as module

    block = module.choose(1, 1, max(case[3], case[4]), case[5], 1).block_n
    monkeypatch.setattr(module, "choose", lambda *sizes: module.Config(splits, block))
    agrees(case, torch.float32, "cpu", splits)


@pytest.mark.interp
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_interpreted_half(dtype):
    agrees(CASES["tail_mask"], dtype, "cpu", None)


@pytest.mark.interp
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_decoder_attends_through_it(family):
    from tilewright.generate import StaticDecoder

    model = build(family, num_hidden_layers=2)
    ids, mask = prompts(2, 50, pads=6)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    decoder = StaticDecoder(model, max_length=160, batch_size=2, attention="split_kv")
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=24), expected)


@pytest.mark.interp
def test_what_an_earlier_call_left_is_not_read():
    """Which is why the decoder does not clear its cache for it."""
    from tilewright.generate import StaticDecoder

    model = build("llama", num_hidden_layers=2)
    ids, _ = prompts(1, 30)
    decoder = StaticDecoder(model, max_length=64, attention="split_kv")
    expected = decoder.generate(ids[:, :10], max_new_tokens=8)
    decoder.generate(ids, max_new_tokens=8)
    with torch.inference_mode():
        for layer in decoder._cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
    assert torch.equal(decoder.generate(ids[:, :10], max_new_tokens=8), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_the_gpu(case, dtype):
    agrees(case, dtype, "cuda", None)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [2048, 8192])
def test_llama_shape_on_the_gpu(context):
    agrees((1, 32, 8, 128, 128, 8448, context, None, (0,)), torch.bfloat16, "cuda", None)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_compiles_without_spills(arch, head_dim, monkeypatch):
    from tests.harness.fake_driver import LIMITS, target
    from tests.harness.resources import resources

    from tilewright.generate.attention.split_kv import split_kv
    from tilewright.hardware import DeviceInfo
    from tilewright.ops.attention.kernels.triton import decode as module

    info = DeviceInfo(arch, arch, LIMITS[arch].processors, 0, 0)
    monkeypatch.setattr(module, "device_info", lambda device: info)
    query = torch.empty(1, 32, 1, head_dim, dtype=torch.bfloat16, device="meta")
    storage = torch.empty(1, 8, 8192, head_dim, dtype=torch.bfloat16, device="meta")
    bounds = torch.empty(1, 1, 1, 2, dtype=torch.int64, device="meta")
    with target(arch) as compiled:
        split_kv(None, query, storage, storage, bounds)
    assert len(compiled) == 2
    assert [fault for kernel in compiled for fault in resources(kernel).faults()] == []


def test_configuration_fills_the_gpu():
    pytest.importorskip("triton")
    from tilewright.ops.attention.kernels.triton.decode import choose

    assert choose(1, 8, 128, 8192, 132) == (32, 64)  # 256 programs on 132 SMs
    assert choose(8, 8, 128, 8192, 132) == (4, 64)
    assert choose(128, 8, 128, 8192, 132) == (1, 64)
    assert choose(1, 1, 128, 64, 132) == (1, 64)  # no more parts than tiles
    assert choose(1, 8, 256, 8192, 132) == (32, 32)


def test_head_dimensions_beyond_256_are_refused():
    pytest.importorskip("triton")
    from tilewright.errors import InputError
    from tilewright.generate.attention.split_kv import split_kv

    query, keys = torch.zeros(1, 2, 1, 320), torch.zeros(1, 2, 64, 320)
    with pytest.raises(InputError, match='attention="sdpa"'):
        split_kv(None, query, keys, keys, torch.zeros(1, 1, 1, 2, dtype=torch.long))
