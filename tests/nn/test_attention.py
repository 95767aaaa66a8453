"""nn.Attention and nn.DifferentialAttention as modules: options, compilation, copies, refusals."""

import copy
import pickle
from collections.abc import Callable
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
    assert_same,
    problem,
    randomised,
    run,
)
from torch import Tensor, nn

from tilewright import mask
from tilewright.errors import BackendError, InputError
from tilewright.nn import Attention, DifferentialAttention, RotaryEmbedding
from tilewright.ops.rope.tables import RopeConfig

KINDS: dict[str, Maker] = {
    "attention": Attention,
    "differential": lambda *a, **kw: DifferentialAttention(*a, layer_idx=2, **kw),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind: str, **options: Any) -> Any:
    return randomised(KINDS[kind](HIDDEN, HEADS, KV_HEADS, D, **options))


def rotary(tokens: int = 64) -> RotaryEmbedding:
    return RotaryEmbedding(RopeConfig(D, tokens, {"rope_type": "default", "rope_theta": 1e4}))


@every_kind
def test_its_own_rotary_is_that_of_given_tables(kind: str) -> None:
    turning = rotary()
    given, own = layer(kind), layer(kind, rotary=turning)
    own.load_state_dict(given.state_dict(), strict=True)
    x, cotangent = problem()
    shuffled = torch.stack([torch.randperm(64)[:TOKENS] for _ in range(BATCH)])
    for positions in (None, shuffled):
        rows = torch.arange(TOKENS)[None] if positions is None else positions
        expected = run(given, x, cotangent, (turning.cos[rows], turning.sin[rows]))
        assert_same(run(own, x, cotangent, positions=positions), expected)


@pytest.mark.parametrize("tokens", [1, 7, 197])
def test_patches_of_an_image(tokens: int) -> None:
    """Neither causal nor turned, odd lengths, biases: what a vision encoder has."""
    ours = layer("attention", causal=False, bias=True)
    x = torch.randn(BATCH, tokens, HIDDEN)
    q, k, v = (proj(x).unflatten(-1, (-1, D)).transpose(1, 2) for proj in (ours.q_proj, ours.k_proj, ours.v_proj))
    o = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(ours(x), ours.o_proj(o.transpose(1, 2).flatten(2)))


@every_kind
def test_no_sequences(kind: str) -> None:
    assert layer(kind, rotary=rotary())(torch.ones(0, TOKENS, HIDDEN)).shape == (0, TOKENS, HIDDEN)


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 3, "softcap": 2.0}, {}),
    "bidirectional": ({"causal": False, "bias": True}, {}),
    "prefix": ({}, {"mask": mask.causal() | mask.prefix(3)}),
}


@pytest.mark.parametrize("case", COMPILED)
@every_kind
def test_training_in_one_graph(kind: str, case: str) -> None:
    options, call = COMPILED[case]
    more = {"qk_norm": True, "sinks": True} if kind == "attention" else {}
    ours = layer(kind, rotary=rotary(), **options, **more)
    x, cotangent = problem()
    expected = run(ours, x, cotangent, **call)
    found = run(torch.compile(ours, fullgraph=True, backend="aot_eager"), x, cotangent, **call)
    assert_same({name.removeprefix("_orig_mod."): t for name, t in found.items()}, expected)


def test_dropout_is_of_training_alone() -> None:
    dropped, plain = layer("attention", dropout=0.5), layer("attention")
    dropped.load_state_dict(plain.state_dict())
    x, _ = problem()
    assert torch.equal(dropped.eval()(x), plain(x))
    q, k, v = (proj(x).unflatten(-1, (-1, D)).transpose(1, 2) for proj in (plain.q_proj, plain.k_proj, plain.v_proj))
    torch.manual_seed(5)
    made = dropped.train()(x)
    torch.manual_seed(5)
    o = nn.functional.scaled_dot_product_attention(q, k, v, None, 0.5, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(made, plain.o_proj(o.transpose(1, 2).flatten(2)))


@every_kind
def test_copies_and_pickles(kind: str) -> None:
    ours = layer(kind, rotary=rotary(), sliding_window=3)
    x, _ = problem()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(x), ours(x))
    model = nn.ModuleList([ours, KINDS[kind](HIDDEN, HEADS, KV_HEADS, D, rotary=ours.rotary)])
    first, second = copy.deepcopy(model)
    assert first.rotary is second.rotary is not ours.rotary


@every_kind
def test_sizes_without_memory(kind: str) -> None:
    """Made on the meta device, run there, then loaded."""
    ours = layer(kind)
    empty = KINDS[kind](HIDDEN, HEADS, KV_HEADS, D, device="meta")
    x, _ = problem()
    assert empty(x.to("meta")).shape == x.shape
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(empty(x), ours(x))
    assert KINDS[kind](HIDDEN, HEADS, dtype=torch.bfloat16).q_proj.weight.dtype == torch.bfloat16


def test_how_they_begin() -> None:
    fresh = Attention(HIDDEN, HEADS, sinks=True, qk_norm=True, norm_offset=1.0)
    assert fresh.sinks is not None and not fresh.sinks.any()
    assert fresh.q_norm is not None and not fresh.q_norm.weight.any()
    differential = DifferentialAttention(HIDDEN, HEADS, head_dim=4096, layer_idx=0)
    assert differential.lambda_init == pytest.approx(0.2)
    for vector in (differential.lambda_q1, differential.lambda_k1, differential.lambda_q2, differential.lambda_k2):
        assert float(vector.detach().std()) == pytest.approx(0.1, rel=0.1)


BAD_LAYERS: dict[str, tuple[Callable[[], Any], str]] = {
    "heads do not divide": (lambda: Attention(30, 4), "hidden_size 30 is no multiple of 4 heads. Give head_dim"),
    "no heads": (lambda: Attention(32, 0), "hidden_size 32 is no multiple of 0 heads"),
    "no groups": (lambda: Attention(32, 4, 3), "num_heads a multiple of num_kv_heads"),
    "no key heads": (lambda: Attention(32, 4, 0), "num_kv_heads 0, head_dim 8; all must be at least 1"),
    "odd key heads": (
        lambda: DifferentialAttention(32, 3, 3, 8, layer_idx=0),
        "num_kv_heads is 3; heads come in pairs",
    ),
    "layer before the first": (lambda: DifferentialAttention(32, 4, layer_idx=-1), "layer_idx is -1"),
    "empty window": (lambda: Attention(32, 4, sliding_window=0), "sliding_window is 0; needs a number of keys from 1"),
    "window that is a flag": (lambda: Attention(32, 4, sliding_window=True), "sliding_window is True; needs"),
    "window to both sides": (
        lambda: Attention(32, 4, causal=False, sliding_window=3),
        r"Without, call with mask=window\(left, right\)",
    ),
    "infinite scale": (lambda: Attention(32, 4, scale=float("inf")), "Attention: scale is inf; needs a finite number"),
    "softcap of zero": (lambda: Attention(32, 4, softcap=0.0), "softcap: the limit is 0.0"),
    "certain dropout": (lambda: Attention(32, 4, dropout=1.0), "Attention: dropout is 1.0"),
    "dropout of sinks": (lambda: Attention(32, 4, dropout=0.1, sinks=True), "dropout goes with masks alone"),
    "dropout of softcap": (lambda: Attention(32, 4, dropout=0.1, softcap=2.0), "dropout goes with masks alone"),
    "two kinds of tables": (lambda: Attention(32, 4, rotary=rotary(), interleaved=True), "rotary has its own"),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_layers_that_cannot_be_made(case: str) -> None:
    make, words = BAD_LAYERS[case]
    with pytest.raises(InputError, match=words):
        make()


def tables(tokens: int = TOKENS, columns: int = D) -> tuple[Tensor, Tensor]:
    return torch.ones(1, tokens, columns), torch.ones(1, tokens, columns)


BAD_CALLS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "a token": ({}, lambda m: m(torch.ones(2, HIDDEN)), r"x is \(2, 32\); needs \(B, S, 32\)"),
    "other width": ({}, lambda m: m(torch.ones(1, 2, 31)), r"x is \(1, 2, 31\); needs \(B, S, 32\)"),
    "no tensor": ({}, lambda m: m([1.0]), "x is a list; needs"),
    "positions of nothing": (
        {},
        lambda m: m(problem()[0], positions=torch.zeros(1, TOKENS, dtype=torch.int64)),
        "positions are rows of the tables of rotary",
    ),
    "tables of both": (
        {"rotary": rotary()},
        lambda m: m(problem()[0], tables()),
        "position_embeddings are given and the layer has a rotary of its own",
    ),
    "one table": ({}, lambda m: m(problem()[0], tables()[0]), r"is a Tensor; needs the pair \(cos, sin\)"),
    "tables of other tokens": ({}, lambda m: m(problem()[0], tables(TOKENS - 1)), "cos and sin have rows"),
    "wide tables": ({}, lambda m: m(problem()[0], tables(columns=2 * D)), "cos has 32 columns"),
    "short tables": ({"rotary": rotary(5)}, lambda m: m(problem()[0]), "q has 11 tokens, the tables 5 rows"),
    "additive mask": ({}, lambda m: m(problem()[0], mask=additive(mask.causal())), "mask is a Tensor; needs one of"),
    "mask of other keys": (
        {},
        lambda m: m(problem()[0], mask=mask.document(torch.zeros(5, dtype=torch.int32))),
        "document: ids of 5 keys for S_k = 11",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
@every_kind
def test_calls_that_are_refused(kind: str, case: str) -> None:
    options, call, words = BAD_CALLS[case]
    with pytest.raises(InputError, match=words):
        call(layer(kind, **options))


@every_kind
def test_backend_is_strict(kind: str) -> None:
    x, _ = problem()
    assert torch.equal(layer(kind, backend="torch")(x).isfinite().all(), torch.tensor(True))
    with pytest.raises(BackendError, match="no_such_backend"):
        layer(kind, backend="no_such_backend")(x)


@every_kind
def test_it_says_what_it_is(kind: str) -> None:
    said = repr(layer(kind, sliding_window=3, backend="torch"))
    assert "heads=4, kv_heads=2, head_dim=16, sliding_window=3, backend=torch" in said
    assert "causal=False" in repr(layer(kind, causal=False))


DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_by_a_kernel(kind: str, device: str) -> None:
    """Values of 2 D numbers, heads by token in memory, both directions, against torch."""
    sinks = {"sinks": True} if kind == "attention" else {}
    ours = layer(kind, rotary=rotary(), backend="triton", **sinks).to(device)
    plain = layer(kind, rotary=rotary(), backend="torch", **sinks).to(device)
    plain.load_state_dict(ours.state_dict())
    x, cotangent = (t.to(device) for t in problem())
    expected, found = run(plain, x, cotangent), run(ours, x, cotangent)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
