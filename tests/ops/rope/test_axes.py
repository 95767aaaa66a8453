"""Tables of several axes have the bits of the rotary modules of multimodal models, and so have the rotated heads."""

from importlib import import_module

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError
from tilewright.ops.rope.axes import axes_table, axial_table, mrope_table, packed_positions
from tilewright.ops.rope.tables import RopeConfig, inverse_frequencies

HEAD_DIM, PAIRS = 32, 16
DTYPES = (torch.float32, torch.bfloat16)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# class of the text's rotary module, of its config, sections, mrope_interleaved, parameters of the scaling
TEXT = {
    "qwen2_vl": ("Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", [4, 6, 6], False, {"rope_type": "default"}),
    "qwen2_5_vl": ("Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", [4, 6, 6], False, YARN),
    "qwen3_vl": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", [6, 5, 5], True, {"rope_type": "default"}),
    "qwen3_vl, yarn": ("Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", [8, 4, 4], True, YARN),
}


def modeling(name):
    return import_module(f"transformers.models.{name}.modeling_{name}")


def heads(*leading, dtype):
    return torch.randn(*leading, 3, HEAD_DIM, dtype=dtype), torch.randn(*leading, 2, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TEXT)
def test_text_among_images(case, dtype):
    rotary, config, sections, is_interleaved, scaling = TEXT[case]
    module = modeling(case.split(",")[0])
    parameters = {"rope_theta": 1e6, "mrope_section": sections, **scaling}
    config = getattr(module, config)(
        hidden_size=96,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    positions = torch.randint(0, 400, (3, 2, 11))
    wanted = getattr(module, rotary)(config)(torch.empty(0, dtype=dtype), positions)
    cos, sin = mrope_table(config, positions, mrope_interleaved=is_interleaved, dtype=dtype)
    assert torch.equal(cos, wanted[0])
    assert torch.equal(sin, wanted[1])
    q, k = (x.transpose(1, 2) for x in heads(2, 11, dtype=dtype))
    for a, b in zip(ops.apply_rope(q, k, cos, sin), module.apply_rotary_pos_emb(q, k, *wanted), strict=True):
        assert torch.equal(a, b)


def test_glm4v_has_neighbours_as_pairs_in_half_of_a_head():
    module = modeling("glm4v")
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    config = module.Glm4vTextConfig(
        hidden_size=96,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    positions = torch.randint(0, 400, (3, 2, 11))
    q, k = (x.transpose(1, 2) for x in heads(2, 11, dtype=torch.float32))
    wanted = module.apply_rotary_pos_emb(q, k, *module.Glm4vTextRotaryEmbedding(config)(q, positions))
    ours = ops.apply_rope(q, k, *mrope_table(config, positions, mrope_interleaved=False), interleaved=True)
    assert torch.equal(ours[0], wanted[0])
    assert torch.equal(ours[1], wanted[1])


def grid(rows, columns):
    """(2, T): row and column of each patch."""
    return torch.stack([t.flatten() for t in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")])


def vision(name, config):
    module = modeling(name)
    config = getattr(module, config)(
        hidden_size=96, embed_dim=96, num_attention_heads=3, head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "axial", "rope_theta": 1e4},
    )  # fmt: skip
    return module, config


def test_patches_of_qwen2_vl_rotate_in_float32():
    module, config = vision("qwen2_vl", "Qwen2VLVisionConfig")
    positions = torch.cat((grid(5, 3), grid(2, 4)), 1)
    wanted = module.Qwen2VLVisionRotaryEmbedding(config)(torch.empty(0), positions.T)
    cos, sin = axial_table(positions, HEAD_DIM)
    assert torch.equal(cos, wanted[0])
    assert torch.equal(sin, wanted[1])
    q, k = heads(23, dtype=torch.bfloat16)
    for a, b in zip(ops.apply_rope(q, k, cos, sin), module.apply_rotary_pos_emb_vision(q, k, *wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_of_pixtral_alternate_frequencies(dtype):
    module, config = vision("pixtral", "PixtralVisionConfig")
    wanted = module.PixtralVisionRotaryEmbedding(config)(torch.empty(0, dtype=dtype), grid(5, 3).T)
    ours = axial_table(grid(5, 3), HEAD_DIM, alternating=True, dtype=dtype)
    assert torch.equal(ours[0], wanted[0])
    assert torch.equal(ours[1], wanted[1])


def test_patches_of_llama4_count_from_one_and_its_class_token_stays():
    module = modeling("llama4")
    config = module.Llama4VisionConfig(
        hidden_size=96, num_attention_heads=3, image_size=28, patch_size=7,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    table = module.Llama4VisionRotaryEmbedding(config).freqs_ci
    positions = torch.cat((grid(4, 4).flip(0) + 1, torch.zeros(2, 1, dtype=torch.int64)), 1)
    cos, sin = axial_table(positions, HEAD_DIM)
    assert torch.equal(cos[:, :PAIRS], table[:, 0].real)
    assert torch.equal(sin[:, :PAIRS], table[:, 0].imag)
    q, k = heads(1, 17, dtype=torch.float32)
    wanted = module.vision_apply_rotary_emb(q, k, table)
    ours = ops.apply_rope(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None], interleaved=True)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a.transpose(1, 2), b, rtol=1e-6, atol=1e-6)  # a complex product may fuse


def test_ernie_4_5_vl_has_rows_and_columns_in_turn_then_times():
    module = modeling("ernie4_5_vl_moe")
    parameters = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [5, 5, 6]}
    config = module.Ernie4_5_VLMoeTextConfig(
        hidden_size=96,
        num_attention_heads=3,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    positions = torch.randint(0, 400, (3, 2, 11))
    wanted = module.Ernie4_5_VLMoeTextRotaryEmbedding(config)(torch.empty(0), positions)
    ours = axes_table(positions, inverse_frequencies(HEAD_DIM, 5e5), [1, 2] * 5 + [0] * 6)
    for a, b in zip(ours, wanted, strict=True):
        assert torch.equal(a[..., :PAIRS], b[..., ::2])  # theirs repeats each column


def test_packed_sequences_rotate_as_each_alone():
    lengths = (3, 0, 5, 1)
    cu_seqlens = torch.tensor((0, 3, 3, 8, 9), dtype=torch.int32)
    positions = packed_positions(cu_seqlens, 11)
    assert positions.dtype == torch.int32
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1]
    cos, sin = axes_table(torch.arange(9)[None], inverse_frequencies(HEAD_DIM), [0] * PAIRS)
    q, k = heads(9, dtype=torch.float32)
    packed = ops.apply_rope(q, k, cos, sin, positions=positions[:9])
    for n, start in zip(lengths, cu_seqlens.tolist(), strict=False):
        one = [x[start : start + n].transpose(0, 1)[None] for x in (q, k)]
        alone = ops.apply_rope(*one, cos[None, :n], sin[None, :n])
        for a, b in zip(packed, alone, strict=True):
            assert torch.equal(a[start : start + n], b[0].transpose(0, 1))


def test_what_is_refused():
    config = RopeConfig(HEAD_DIM, 64, {"mrope_section": [4, 6, 5]})
    positions = torch.zeros(3, 1, 4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"mrope_section is \[4, 6, 5\]; needs numbers of pairs that sum to 16"):
        mrope_table(config, positions, mrope_interleaved=False)
    with pytest.raises(InputError, match="mrope_section is None"):
        mrope_table(RopeConfig(HEAD_DIM, 64, {}), positions, mrope_interleaved=True)
    with pytest.raises(InputError, match=r"positions is \(3, 1, 4\) torch.float32; needs \(A, ...\) int32 or int64"):
        axes_table(positions.float(), torch.ones(1), [0])
    with pytest.raises(InputError, match=r"axes are \[3\].*from 0 to 2"):
        axes_table(positions, torch.ones(1), [3])
    with pytest.raises(InputError, match="head_dim is 6; needs a multiple of 4"):
        axial_table(positions[:2], 6)
    with pytest.raises(InputError, match=r"cu_seqlens is \(2, 2\)"):
        packed_positions(torch.zeros(2, 2, dtype=torch.int32), 4)
