"""BlockMasks: made from closed forms they are torch's own; made by others they become tables, or stay with Flex."""

import pytest
import torch
from tests.mask.formulas import FORMULAS
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tilewright import mask as masks
from tilewright.errors import InputError

# eager FlexAttention, without a compiler
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

S_K, B, H = 11, 2, 2
EXACT = sorted(set(FORMULAS) - {"three"})


def blocks(mask):
    """Counts and listed blocks, partial and full."""
    found = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        found.append(torch.where(listed, indices, -1).expand(B, H, *indices.shape[2:]))
    return found


@pytest.mark.parametrize("s_q", [11, 5])
@pytest.mark.parametrize("name", EXACT)
def test_to_block_mask_lists_the_blocks_that_torch_finds(name, s_q):
    mask, _ = FORMULAS[name]
    made = mask.to_block_mask(B, H, s_q, S_K, "cpu", (4, 2))
    expected = create_block_mask(mask.mask_mod_at(S_K - s_q), B, H, s_q, S_K, device="cpu", BLOCK_SIZE=(4, 2))
    assert made.seq_lengths == expected.seq_lengths
    for ours, theirs in zip(blocks(made), blocks(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["document_batched", "block_heads", "three"])
def test_flex_attention_takes_it(name):
    mask, _ = FORMULAS[name]
    q, k, v = (torch.randn(B, H, S_K, 16) for _ in range(3))
    got = flex_attention(q, k, v, block_mask=mask.to_block_mask(B, H, S_K, S_K, "cpu"))
    scores = (q @ k.mT / 4).masked_fill(~mask.dense(B, H, S_K, S_K), -torch.inf)
    torch.testing.assert_close(got, scores.softmax(-1).nan_to_num(0.0) @ v)


def test_a_block_mask_without_a_function_becomes_a_table():
    table = torch.rand(B, H, 3, 3) < 0.5
    order = torch.argsort((~table).int(), dim=-1, stable=True).int()
    flex = BlockMask.from_kv_blocks(table.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=4, seq_lengths=(11, 11))
    mask = masks.from_block_mask(flex)
    assert not mask.only_flex
    assert torch.equal(mask.dense(B, H, 11, 11), masks.block(table, 4).dense(B, H, 11, 11))


@pytest.mark.parametrize("s_q", [11, 5])
def test_a_block_mask_with_a_function_stays_with_flex(s_q):
    def modulo(b, h, q, k):
        return ((q + k + b) % 3 > 0) & (k <= q + 2)

    flex = create_block_mask(modulo, B, H, s_q, S_K, device="cpu", BLOCK_SIZE=4)
    mask = masks.from_block_mask(flex) & masks.causal()
    assert mask.only_flex
    assert not masks.causal().only_flex
    i, j = torch.arange(s_q)[:, None], torch.arange(S_K)
    b = torch.arange(B)[:, None, None, None]
    expected = (((i + j + b) % 3 > 0) & (j <= i + 2) & (i + S_K - s_q >= j)).expand(B, H, s_q, S_K)
    assert torch.equal(mask.dense(B, H, s_q, S_K), expected)
    assert torch.equal(mask.narrow(1, 1).dense(1, H, s_q, S_K), expected[1:])
    assert mask.band() is None
    with pytest.raises(InputError, match="only FlexAttention"):
        mask.program("cpu")
    with pytest.raises(InputError, match="the attention has"):
        mask.check(B, H, 4, 4)
    if s_q == S_K:
        q, k, v = (torch.randn(B, H, S_K, 16) for _ in range(3))
        got = flex_attention(q, k, v, block_mask=mask.to_block_mask(B, H, S_K, S_K, "cpu", 4))
        scores = (q @ k.mT / 4).masked_fill(~expected, -torch.inf)
        torch.testing.assert_close(got, scores.softmax(-1).nan_to_num(0.0) @ v)
