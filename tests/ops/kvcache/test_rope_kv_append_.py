"""rope_kv_append_ is rms_norm, apply_rope and kv_append_ in one launch, bit for bit Qwen3's own code."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ops.kvcache.paged import paged

from tilewright.errors import InputError
from tilewright.ops import apply_rope, kv_append_, rms_norm, rope_kv_append_
from tilewright.ops.rope.tables import RopeConfig, rope_table
from tilewright.validate.bits import same_bits

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interp)]
H, H_KV, D, D_V, P = 4, 2, 16, 8, 300
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def heads(tokens, h, d, dtype, seed):
    return torch.randn(tokens, h, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(dtype, r=D):
    return tuple(t.to(dtype) for t in rope_table(RopeConfig(r, P, {})))


def angles(problem):
    """The position of each packed token; 0 for padding."""
    positions = torch.zeros(problem.rows, dtype=torch.int64)
    for row, _, position in problem.tokens():
        positions[row] = position
    return positions


def in_steps(problem, q, k, v, tables, caches, *, weights=None, rotary_dim=None, backend="torch", **scales):
    """The same by the ops that it is made of."""
    if weights is not None:
        q, k = (rms_norm(x, w, backend=backend) for x, w in zip((q, k), weights, strict=True))
    if problem.rows:
        q, k = apply_rope(q, k, *tables, positions=angles(problem), rotary_dim=rotary_dim, backend=backend)
    lengths, options = problem.metadata()
    kv_append_(*caches, k, v, lengths, **options, **scales, backend=backend)
    q[problem.rows - problem.padding :] = 0
    return q


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(problem=paged(), r=st.sampled_from([D, 6]), float32_tables=st.booleans())
@few
def test_without_a_norm_the_bits_are_those_of_the_steps(backend, dtype, problem, r, float32_tables):
    q, k, v = (heads(problem.rows, h, d, dtype, i) for i, (h, d) in enumerate(((H, D), (H_KV, D), (H_KV, D_V))))
    angle_tables = tables(torch.float32 if float32_tables else dtype, r)
    caches = problem.cache(H_KV, D, dtype), problem.cache(H_KV, D_V, dtype)
    copies = [c.clone() for c in caches]
    wanted = in_steps(problem, q, k, v, angle_tables, copies)
    lengths, options = problem.metadata()
    made = rope_kv_append_(q, k, v, *angle_tables, *caches, lengths, **options, backend=backend)
    assert same_bits(made, wanted)
    assert same_bits(caches[0], copies[0])
    assert same_bits(caches[1], copies[1])


@given(problem=paged())
@few
def test_with_a_norm_and_e4m3_the_reference_is_that_of_the_steps(problem):
    dtype = torch.bfloat16
    q, k, v = (heads(problem.rows, h, D, dtype, i) for i, h in enumerate((H, H_KV, H_KV)))
    weights = [heads(1, 1, D, dtype, i)[0, 0] for i in (7, 8)]
    caches = [problem.cache(H_KV, D, torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.rand(caches[0].shape[:3]) for _ in caches]
    copies = [c.clone() for c in (*caches, *scales)]
    options = {"k_scale": copies[2], "v_scale": copies[3]}
    wanted = in_steps(problem, q, k, v, tables(dtype), copies[:2], weights=weights, **options)
    lengths, metadata = problem.metadata()
    made = rope_kv_append_(
        q, k, v, *tables(dtype), *caches, lengths, **metadata, q_weight=weights[0], k_weight=weights[1],
        k_scale=scales[0], v_scale=scales[1], backend="torch",
    )  # fmt: skip
    assert same_bits(made, wanted)
    assert all(same_bits(a, b) for a, b in zip((*caches, *scales), copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_is_qwen3s_code(dtype):
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    tokens = 11
    q, k, v = (heads(tokens, h, D, dtype, i) for i, h in enumerate((H, H_KV, H_KV)))
    norms = [qwen3.Qwen3RMSNorm(D, eps=1e-5).to(dtype) for _ in range(2)]
    for i, norm in enumerate(norms):
        norm.weight.data = heads(1, 1, D, dtype, 5 + i)[0, 0]
    cos, sin = tables(dtype)
    with torch.no_grad():
        states = (norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (q, k), strict=True))
        wanted = qwen3.apply_rotary_pos_emb(*states, cos[None, :tokens], sin[None, :tokens])
    caches = torch.zeros(1, tokens, H_KV, D, dtype=dtype), torch.zeros(1, tokens, H_KV, D, dtype=dtype)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    weights = {"q_weight": norms[0].weight.data, "k_weight": norms[1].weight.data, "eps": 1e-5}
    made = rope_kv_append_(q, k, v, cos, sin, *caches, lengths, **weights, backend="torch")
    assert torch.equal(made, wanted[0][0].transpose(0, 1))
    assert torch.equal(caches[0][0], wanted[1][0].transpose(0, 1))
    assert torch.equal(caches[1][0], v)


def call(backend="torch", **changes):
    """One decoding step of two sequences."""
    values = {
        "q": heads(2, H, D, torch.float32, 0), "k": heads(2, H_KV, D, torch.float32, 1),
        "v": heads(2, H_KV, D, torch.float32, 2), "cos": tables(torch.float32)[0], "sin": tables(torch.float32)[1],
        "k_cache": torch.zeros(2, 4, H_KV, D), "v_cache": torch.zeros(2, 4, H_KV, D),
        "lengths": torch.tensor([3, 1], dtype=torch.int32), **changes,
    }  # fmt: skip
    return values, rope_kv_append_(**values, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_choose_the_angles_alone(backend):
    positions = torch.tensor([200, 7], dtype=torch.int32)
    values, made = call(backend, positions=positions)
    q, k = apply_rope(values["q"], values["k"], values["cos"], values["sin"], positions=positions, backend=backend)
    assert torch.equal(made, q)
    assert torch.equal(values["k_cache"][0, 2], k[0])
    assert torch.equal(values["k_cache"][1, 0], k[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_written_and_returned(backend):
    out = torch.full((2, H, D), torch.nan)
    _, wanted = call(backend)
    for _ in range(2):
        _, made = call(backend, out=out)
        assert made is out
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_outside_of_the_table_is_nan_where_no_check_reads(backend, monkeypatch):
    with pytest.raises(InputError, match="positions reach from 0 to 2; the table has rows 0 to 1"):
        call(backend, cos=tables(torch.float32)[0][:2], sin=tables(torch.float32)[1][:2])
    monkeypatch.setattr("tilewright.ops.kvcache.checks.may_read", lambda t: False)
    cos, sin = (t[:2, :6] for t in tables(torch.float32, 6))
    values, made = call(backend, cos=cos, sin=sin)
    assert made[0, :, :6].isnan().all()
    assert torch.equal(made[0, :, 6:], values["q"][0, :, 6:])
    assert made[1].isfinite().all()


def test_a_gradient_is_refused_by_name():
    for name in ("q", "cos", "k_cache"):
        with pytest.raises(InputError, match=f"has no gradient, and {name} requires one"):
            call(**{name: call()[0][name].clone().requires_grad_()})


def test_under_compile():
    compiled = torch.compile(rope_kv_append_, fullgraph=True, backend="aot_eager")
    values, wanted = call()
    written = [values[name].clone() for name in ("k_cache", "v_cache")]
    for name in ("k_cache", "v_cache"):
        values[name].zero_()
    assert torch.equal(compiled(**values), wanted)
    assert torch.equal(values["k_cache"], written[0])
    assert torch.equal(values["v_cache"], written[1])
    out = torch.empty_like(wanted)
    values["k_cache"].zero_()
    assert torch.equal(compiled(**values, out=out), wanted)
    assert torch.equal(out, wanted)
    assert torch.equal(values["k_cache"], written[0])
