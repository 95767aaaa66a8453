"""Under TILEWRIGHT_CHECK=1 mla_decode refuses lengths, pages and slots that do not exist, before any launch."""

import pytest
import torch
from tests.ops.attention.latents import problem
from tests.ops.gemm.bounds import PLACES, run

from tilewright import settings
from tilewright.errors import InputError
from tilewright.ops.attention.mla_decode import mla_decode
from tilewright.ops.attention.paged.samples import int32

places = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def checking(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CHECK", "1")
    settings.reload()
    yield
    monkeypatch.delenv("TILEWRIGHT_CHECK", raising=False)
    settings.reload()


def decode(place, **changes):
    """Three sequences, pages of 4 tokens; changed metadata."""
    sample = problem({"lengths": (9, 3, 0), "page": 4}, torch.float32, place.device)
    q, cache, lengths = sample.args
    lengths = changes.pop("lengths", lengths)
    return run(mla_decode, q, cache, lengths, **{**sample.kwargs, **changes}, place=place)


def table(place, *rows):
    return int32([page for row in rows for page in row], place.device, (len(rows), -1))


def slots(place, *rows):
    return {"block_table": None, "indices": table(place, *rows).view(3, 1, -1), "lengths": None}


@places
def test_what_exists_is_computed(place):
    decode(place)
    decode(place, block_table=table(place, (0, 1, 2, -7), (0, -7, 99, 99), (99, 99, 99, 99)))
    decode(place, **slots(place, (0, -1), (3, 3), (-1, -1)))
    cut = slots(place, (0, 999), (3, 3), (-7, 999))
    decode(place, **{**cut, "lengths": int32((1, 99, 0), place.device)})


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
@pytest.mark.parametrize("slot", [-2, 1000])
def test_slots(place, slot):
    with pytest.raises(InputError, match=rf"indices reach from .*{slot}.*; needs slots from 0 to \d+, or -1 for none"):
        decode(place, **slots(place, (0, slot), (3, 3), (-1, -1)))


@places
def test_without_the_setting_nothing_is_read(place, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CHECK")
    settings.reload()
    decode(place, lengths=int32((17, 3, 0), place.device), block_table=table(place, *[(0, 1, 2, 0)] * 3))
