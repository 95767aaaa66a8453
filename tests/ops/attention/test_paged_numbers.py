"""Under TILEWRIGHT_CHECK=1 attention over a KV cache refuses lengths and pages that do not exist, before any launch."""

import pytest
import torch
from tests.ops.attention.caches import problem
from tests.ops.gemm.bounds import PLACES, run

from tilewright import settings
from tilewright.errors import InputError
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.attention.paged.samples import int32

places = pytest.mark.parametrize("place", PLACES)
PAGE = 4
LENGTHS = (9, 3, 0)


@pytest.fixture(autouse=True)
def checking(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    settings.reload()
    yield
    monkeypatch.delenv("TILEWRIGHT_CHECK", raising=False)
    settings.reload()


def decode(place, **changes):
    """Three sequences, pages of 4 tokens; changed metadata."""
    sample = problem({"lengths": LENGTHS, "page": PAGE, "H": 2, "H_kv": 1, "D": 16}, torch.float32, place.device)
    *tensors, lengths = sample.args
    options = dict(sample.kwargs)
    lengths = changes.pop("lengths", lengths)
    options |= changes
    return run(fmha_decode, *tensors, lengths, **options, place=place)


def table(place, *rows):
    return int32([page for row in rows for page in row], place.device, (len(rows), -1))


@places
def test_what_exists_is_computed(place):
    decode(place)
    decode(place, block_table=table(place, (0, 1, 2, -7), (0, -7, 99, 99), (99, 99, 99, 99)))


@places
@pytest.mark.parametrize("lengths", [(9, -1, 0), (17, 3, 0)])
def test_lengths(place, lengths):
    with pytest.raises(InputError, match=r"lengths reach from .* needs 0 to 16"):
        decode(place, lengths=int32(lengths, place.device), block_table=table(place, *[(0, 1, 2, 0)] * 3))


@places
@pytest.mark.parametrize("page", [-1, 1000])
def test_pages_in_use(place, page):
    with pytest.raises(InputError, match=rf"pages in use reach from .*{page}.* in block_table; needs 0 to"):
        decode(place, block_table=table(place, (0, 1, page), (0, 1, 2), (0, 1, 2)))


@places
def test_pages_before_a_window_may_be_gone(place):
    """Token 8 sees keys from 6 on: of page 0 nothing."""
    gone = table(place, (-1, 1, 2), (0, -1, -1), (-1, -1, -1))
    decode(place, block_table=gone, window=(2, 0))
    with pytest.raises(InputError, match="pages in use"):
        decode(place, block_table=gone, window=(5, 0))


@places
@pytest.mark.parametrize("starts", [(0, 2, 1, 3), (1, 2, 3, 3), (0, 1, 2, 9)])
def test_starts(place, starts):
    sample = problem({"lengths": LENGTHS, "page": PAGE, "H": 2, "H_kv": 1, "D": 16}, torch.float32, place.device)
    q, k_cache, v_cache, lengths = sample.args
    q = q.reshape(-1, *q.shape[-2:])
    with pytest.raises(InputError, match="cu_seqlens_q is .*; must not fall, from 0 to at most T = 3"):
        run(fmha_paged, q, k_cache, v_cache, int32(starts, place.device), lengths, **sample.kwargs, place=place)


@places
def test_without_the_setting_nothing_is_read(place, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CHECK")
    settings.reload()
    decode(place, lengths=int32((17, 3, 0), place.device), block_table=table(place, *[(0, 1, 2, 0)] * 3))
