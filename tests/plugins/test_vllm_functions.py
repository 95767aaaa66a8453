"""What our layers compute in vLLM, without vLLM: in its layouts, against plain torch."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.plugins.paged import HEADS, D, attention, batch
from torch.testing import assert_close

from tilewright.plugins import vllm as plugin
from tilewright.plugins.vllm.functions import attend, normalise, rotate

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_there_and_imports_no_vllm():
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, name = entry["tilewright"].split(":")
    assert callable(getattr(import_module(module), name))


def test_where_vllm_has_other_interfaces_it_starts_without_us(monkeypatch, caplog):
    monkeypatch.delattr(plugin, "layers", raising=False)
    monkeypatch.setitem(sys.modules, "tilewright.plugins.vllm.layers", None)  # an import of it is an ImportError
    plugin.register()
    assert "vLLM runs without tilewright's kernels" in caplog.text


@pytest.mark.parametrize(("offset", "has_weight"), [(0.0, True), (0.0, False), (1.0, True)])
def test_norms(offset, has_weight):
    rng = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 48, generator=rng).bfloat16() for _ in range(2))
    weight = torch.randn(48, generator=rng).bfloat16() if has_weight else None
    scale = 1.0 if weight is None else offset + weight.double()
    before = x.clone(), residual.clone()

    def wanted(x):
        return x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * scale

    assert_close(normalise(x, None, weight, 1e-5, offset).double(), wanted(x), atol=2e-2, rtol=2e-2)
    y, total = normalise(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, x + residual)
    assert_close(y.double(), wanted(total), atol=2e-2, rtol=2e-2)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary", "has_key"), [(16, True), (8, True), (16, False)])
def test_rotation(interleaved, rotary, has_key):
    rng = torch.Generator().manual_seed(1)
    tokens, heads, kv_heads, size = 6, 3, 1, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=rng)
    query, key, _ = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)  # strided, as models pass them
    angles = torch.rand(40, rotary // 2, generator=rng)
    positions = torch.tensor([3, 0, 39, 7, 7, 1])
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q, k = rotate(positions, query, key if has_key else None, table, size, interleaved=interleaved)

    def wanted(x):
        x = x.reshape(tokens, -1, size).double()
        pairs = x[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        c, s = (f(angles.double())[positions, None] for f in (torch.cos, torch.sin))
        turned = torch.stack([a * c - b * s, b * c + a * s], -1 if interleaved else -2).flatten(-2)
        return torch.cat([turned, x[..., rotary:]], -1).reshape(tokens, -1)

    assert q.shape == query.shape and (k is None) == (not has_key)
    assert_close(q.double(), wanted(query), atol=1e-5, rtol=1e-5)
    if has_key:
        assert_close(k.double(), wanted(key), atol=1e-5, rtol=1e-5)


STEPS = {
    "decoding": {"before": [20, 3, 47], "new": [1, 1, 1]},
    "a prompt beside decoding": {"before": [20, 0, 15], "new": [1, 18, 1], "padding": 3},
    "drafts": {"before": [5, 31], "new": [3, 3]},
    "a sequence without new tokens": {"before": [5, 0, 31], "new": [2, 0, 1], "padding": 1},
}


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)}])
@pytest.mark.parametrize("name", STEPS)
def test_attention_over_pages(name, options):
    for tokens_first in (True, False):
        its = batch(**STEPS[name], tokens_first=tokens_first)
        out = torch.full_like(its.query, 7.0)
        attend(its.query, its.key, its.value, its.cache, its.step, out, scale=D**-0.5, **options)
        assert_close(out[: its.step.tokens].double(), attention(its, scale=D**-0.5, **options), atol=1e-5, rtol=1e-5)
        assert (out[its.step.tokens :] == 7.0).all(), "padding is left alone"
        again = torch.empty_like(out)
        attend(its.query, None, None, its.cache, its.step, again, scale=D**-0.5, **options)
        assert torch.equal(again[: its.step.tokens], out[: its.step.tokens]), "keys of another layer: nothing written"


def test_a_padded_step_of_decoding():
    """A CUDA graph of four sequences with two: the others have no length, one token each, and pages of anything."""
    its = batch([20, 3], [1, 1], padding=2)
    starts = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    lengths, table = torch.zeros(4, dtype=torch.int32), torch.full((4, its.step.block_table.shape[1]), -1).int()
    lengths[:2], table[:2] = its.step.lengths, its.step.block_table
    step = its.step._replace(tokens=4, starts=starts, lengths=lengths, block_table=table)
    assert step.decodes
    out = torch.empty_like(its.query)
    attend(its.query, its.key, its.value, its.cache, step, out, scale=0.2)
    assert_close(out[:2].double(), attention(its, scale=0.2), atol=1e-5, rtol=1e-5)
    assert (out[2:] == 0).all()


def test_a_cache_in_float8():
    its = batch([0, 0], [7, 20])
    cache = torch.zeros(its.cache.shape, dtype=torch.float8_e4m3fn)
    scales, out = (torch.tensor(0.02), torch.tensor(0.03)), torch.empty_like(its.query)
    attend(its.query, its.key, its.value, cache, its.step, out, scale=D**-0.5, kv_scales=scales)
    stored = [
        [(x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for x in rows]
        for rows, scale in zip((its.keys, its.values), scales, strict=True)
    ]
    exact = attention(its._replace(keys=stored[0], values=stored[1]), scale=D**-0.5)
    assert_close(out.double(), exact, atol=1e-4, rtol=1e-4)
