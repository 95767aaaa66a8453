"""Scales that are powers of two, packed as Blackwell reads them."""

import pytest
import torch

from tilewright.compat.deep_gemm.utils import (
    ceil_to_ue8m0,
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
)
from tilewright.errors import InputError


def powers(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(6)
    return torch.exp2(torch.randint(-126, 128, shape, generator=g).float())


def words(sf: torch.Tensor) -> torch.Tensor:
    """(..., rows, ceil(B / 4)) int32 made byte by byte."""
    *lead, blocks = sf.shape
    exponents = torch.zeros(*lead, -(-blocks // 4) * 4, dtype=torch.uint8)
    exponents[..., :blocks] = (sf.double().log2() + 127).to(torch.uint8)
    return exponents.view(torch.int32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(37, 5), (8, 1), (3, 41, 8), (1, 4, 57)], ids=str)
def test_exponents_lie_in_lines_of_rows(shape, transposed):
    sf = powers(*shape)
    made = get_mn_major_tma_aligned_packed_ue8m0_tensor(sf.mT.contiguous().mT if transposed else sf)
    assert torch.equal(made, words(sf))
    line = -(-shape[-2] // 4) * 4
    assert made.stride()[-2:] == (1, line)
    if len(shape) == 3:
        assert made.stride(0) == line * made.shape[-1]


def test_what_lies_between_groups_is_no_matter():
    sf = powers(40, 6)
    ends = torch.tensor([10, 40], dtype=torch.int32)
    assert torch.equal(get_mn_major_tma_aligned_packed_ue8m0_tensor(sf, psum_layout=ends), words(sf))


@pytest.mark.parametrize("gran_k", [128, 32])
def test_each_group_begins_a_word(gran_k):
    ks = [3 * gran_k, 0, 8 * gran_k, gran_k]
    sf, sizes = powers(12, 20), torch.tensor(ks, dtype=torch.int32)
    made = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, sizes, ks, gran_k, gran_k)
    parts = [words(part.mT.contiguous()).mT for part in sf.split([k // gran_k for k in ks if k])]
    assert torch.equal(made, torch.cat(parts))
    former = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor(sf, ks_tensor=sizes, ks=ks, gran_k=gran_k)
    assert torch.equal(former, made)


def test_rounding_up_comes_first():
    sf = ceil_to_ue8m0(torch.tensor([[1.5, 0.3, 4.0]]))
    made = get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    assert made.tolist() == [[128 | 126 << 8 | 129 << 16]]


def test_what_is_refused():
    sizes = torch.tensor([128, 256], dtype=torch.int32)
    pack = get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor
    with pytest.raises(InputError, match=r"sf is \(3,\) torch.float32; needs two or three"):
        get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(3))
    with pytest.raises(InputError, match=r"sf is \(3, 4\) torch.float64"):
        get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(3, 4).double())
    with pytest.raises(InputError, match="ends of groups along K are Blackwell's"):
        pack(torch.ones(3, 8), sizes, [128, 256], 128, 128, use_psum_layout=True)
    with pytest.raises(InputError, match="sf has 4 rows of blocks"):
        pack(torch.ones(4, 8), sizes, [128, 256], 128)
    with pytest.raises(InputError, match="needs multiples of 256"):
        pack(torch.ones(3, 8), sizes, [128, 256], 128, 256)
    with pytest.raises(InputError, match=r"needs \(3,\) torch.int32"):
        pack(torch.ones(3, 8), sizes, [128, 128, 128], 128)
