"""apply_rope is the Hugging Face function of every rotary style, bit for bit, and a rotation."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import BackendError, InputError
from tilewright.ops.rope.apply_rope import CONTRACT, apply_rope
from tilewright.ops.rope.apply_rope.args import RopeBucket
from tilewright.ops.rope.tables import RopeConfig, rope_table

B, H, H_KV, S, D = 2, 6, 2, 11, 32
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def hugging_face(model, name="apply_rotary_pos_emb"):
    pytest.importorskip("transformers")
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def heads(dtype, d=D):
    """q and k as projections make them: views of (B, S, H, D)."""
    return (torch.randn(B, S, h, d).to(dtype).transpose(1, 2) for h in (H, H_KV))


def tables(r=D, dtype=torch.float32, rows=S, start=100):
    """cos and sin, (B, rows, r), columns as Hugging Face repeats them; each sequence at other positions."""
    cos, sin = rope_table(RopeConfig(r, start + B * rows, {}))
    return (t[start:].view(B, rows, r).to(dtype) for t in (cos, sin))


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Bit for bit the models' functions.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "mixtral"])
def test_halves(model, dtype):
    q, k = heads(dtype)
    cos, sin = tables(dtype=dtype)
    assert same(apply_rope(q, k, cos, sin), hugging_face(model)(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["phi3", "gpt_neox"])
def test_partial(model, dtype):
    q, k = heads(dtype)
    cos, sin = tables(12, dtype)
    ours = apply_rope(q, k, cos, sin)
    assert same(ours, hugging_face(model)(q, k, cos, sin))
    assert torch.equal(ours[0][..., 12:], q[..., 12:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("model", "r"), [("glm", D), ("glm", 12), ("helium", D)])
def test_interleaved(model, r, dtype):
    q, k = heads(dtype)
    cos, sin = tables(r, dtype)
    assert same(apply_rope(q, k, cos, sin, interleaved=True), hugging_face(model)(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["deepseek_v3", "mistral4"])
def test_interleaved_to_halves(model, dtype):
    """DeepSeek-V3 has the same values, first elements of all pairs before the second ones."""
    q, k = heads(dtype)
    cos, sin = tables(dtype=dtype)
    ours = apply_rope(q, k, cos, sin, interleaved=True)
    ours = [torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) for x in ours]
    assert same(ours, hugging_face(model, "apply_rotary_pos_emb_interleave")(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_that_repeat_each_column(dtype):
    """Cohere: columns in pairs, arithmetic in float32."""
    q, k = heads(dtype)
    cos, sin = (t[..., : D // 2].repeat_interleave(2, dim=-1).to(dtype) for t in tables())
    ours = apply_rope(q, k, cos[..., ::2].float(), sin[..., ::2].float(), interleaved=True, rotary_dim=D)
    assert same(ours, hugging_face("cohere")(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_one_column_a_pair(dtype):
    q, k = heads(dtype)
    cos, sin = (t[..., : D // 2] for t in tables(dtype=dtype))
    assert same(apply_rope(q, k, cos, sin, rotary_dim=D), hugging_face("gpt_oss")(q, k, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_tables_mean_float32_arithmetic(dtype):
    q, k = heads(dtype)
    cos, sin = tables()
    ours = apply_rope(q, k, cos, sin)
    assert same(ours, hugging_face("olmo2")(q, k, cos, sin))
    assert ours[0].dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_complex_tables(dtype):
    """DeepSeek-V2: one product of complex numbers in float32, where the processor may leave out a rounding."""
    q, k = heads(dtype)
    cos, sin = (t[..., : D // 2].contiguous() for t in tables())
    ours = apply_rope(q, k, cos, sin, interleaved=True, rotary_dim=D)
    theirs = hugging_face("deepseek_v2", "apply_rotary_emb")(q, k, torch.complex(cos, sin))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_raw_backward(dtype):
    """The rotation by the opposite angle has the bits of autograd's way back, and lies by token."""
    q, k = (x.detach().requires_grad_() for x in heads(dtype))
    cos, sin = tables(12, dtype)
    outputs = hugging_face("phi3")(q, k, cos, sin)
    cotangents = [torch.randn(o.shape).to(dtype) for o in outputs]
    wanted = torch.autograd.grad(outputs, (q, k), cotangents)
    raw = CONTRACT.gradient.op(*cotangents, cos, sin, None, False, 0, "auto", "default")
    assert all(g.transpose(1, 2).is_contiguous() for g in raw)
    assert same(raw, wanted)


@pytest.mark.parametrize("layout", ["by token", "by head"])
def test_the_result_lies_as_q_does(layout):
    """So that attention over it hands on what the output projection reads without a copy."""
    q, k = (x.contiguous() for x in heads(torch.float32))
    if layout == "by token":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    ours = CONTRACT.forward(q, k, *tables(), None, False, 0, "auto", "default")
    assert [o.stride() for o in ours] == [q.stride(), k.stride()]
    assert same(ours, apply_rope(q, k, *tables(), backend="torch"))


# What a rotation is.


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    """q at position m against k at position n, for every m - n, wherever the pair stands."""
    row = torch.randn(2, D, dtype=torch.float64)
    q, k = (x.expand(1, 1, S, D) for x in row)
    cos, sin = (t.double()[None] for t in rope_table(RopeConfig(D, S, {})))
    q, k = apply_rope(q, k, cos, sin, interleaved=interleaved)
    scores = (q @ k.mT)[0, 0]
    for distance in range(1 - S, S):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores.diagonal(1)[0] != scores.diagonal(-1)[0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_opposite_angle_turns_back(interleaved):
    q, k = heads(torch.float64)
    cos, sin = (t.double() for t in tables())
    there = apply_rope(q, k, cos, sin, interleaved=interleaved)
    back = apply_rope(*there, cos, -sin, interleaved=interleaved)
    for x, y in zip((q, k), back, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
        assert not torch.equal(x, there[0][:, : x.shape[1]])


# Rows of the tables.


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [1, B])
def test_positions_name_rows(kind, batch):
    q, k = heads(torch.bfloat16)
    cos, sin = rope_table(RopeConfig(D, 50, {}), dtype=torch.bfloat16)
    positions = torch.randint(0, 50, (batch, S), dtype=kind)
    ours = apply_rope(q, k, cos, sin, positions=positions)
    assert same(ours, apply_rope(q, k, cos[positions], sin[positions]))


def test_one_table_serves_all_sequences():
    q, k = heads(torch.bfloat16)
    cos, sin = (t[:1] for t in tables(dtype=torch.bfloat16))
    assert same(apply_rope(q, k, cos, sin), apply_rope(q, k, cos.expand(B, -1, -1), sin.expand(B, -1, -1)))


def test_packed_sequences_are_the_sequences_end_to_end():
    q, k = heads(torch.bfloat16)
    cos, sin = rope_table(RopeConfig(D, 50, {}), dtype=torch.bfloat16)
    positions = torch.stack((torch.arange(S), torch.arange(20, 20 + S)))
    wanted = [x.transpose(1, 2).flatten(0, 1) for x in apply_rope(q, k, cos, sin, positions=positions)]
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
    assert same(apply_rope(*packed, cos, sin, positions=positions.flatten()), wanted)
    assert same(apply_rope(*packed, cos[positions.flatten()], sin[positions.flatten()]), wanted)


@pytest.mark.parametrize("bad", [-1, 50])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_positions_outside_the_table_are_refused_where_looking_is_free(bad, backend):
    q, k = heads(torch.bfloat16)
    cos, sin = rope_table(RopeConfig(D, 50, {}), dtype=torch.bfloat16)
    positions = torch.zeros(1, S, dtype=torch.int64)
    positions[0, 3] = bad
    with pytest.raises(InputError, match=f"positions reach from .*{bad}.*rows 0 to 49"):
        apply_rope(q, k, cos, sin, positions=positions, backend=backend)


# Refusals that need more than one call of the contract's `bad_inputs`.


def test_tables_get_no_gradient():
    q, k = heads(torch.float32)
    cos, sin = tables()
    cos.requires_grad_()
    with pytest.raises(InputError, match=r"cos\.detach\(\)"):
        apply_rope(q, k, cos, sin)
    with torch.no_grad():
        apply_rope(q, k, cos, sin)


def test_float64_tables_go_with_float64_heads():
    cos, sin = (t.double() for t in tables())
    with pytest.raises(InputError, match="at most float32"):
        apply_rope(*heads(torch.float32), cos, sin)
    assert apply_rope(*heads(torch.float64), cos, sin)[0].dtype == torch.float64


def test_a_backend_asked_for_on_a_cpu_is_refused_in_words():
    with pytest.raises(BackendError, match=r"apply_rope\[triton\]"):
        apply_rope(*heads(torch.float32), *tables(), backend="triton")


# Choice of configurations.


@given(
    tokens=st.integers(0, 20).map(lambda n: 1 << n),
    h=st.integers(1, 128),
    h_kv=st.integers(0, 128),
    d=st.integers(2, 1024),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_every_choice_is_listed(tokens, h, h_kv, d, share, dtype):
    kernel = pytest.importorskip("tilewright.ops.rope.kernels.triton.rope")
    r = max(2, int(share * d) // 2 * 2)
    assert kernel.configure(RopeBucket(tokens, h, h_kv, d, r), dtype) in kernel.CONFIGS
