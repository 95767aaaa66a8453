"""Masks of transformers in closed form are, element for element, the ones that it builds itself."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as theirs

from tilewright.errors import InputError
from tilewright.mask.documents import Document
from tilewright.models.attention.carrier import CarriedMask, VisibleKeys, visible_keys
from tilewright.models.attention.masks import attention_mask


def allowed(visible: VisibleKeys, batch: int, s_q: int, s_k: int) -> Tensor:
    """bool (B, 1, S_q, S_k); keys that a mask adds for their positions are seen by no query."""
    if visible.mask is None:
        return torch.ones(batch, 1, s_q, s_k, dtype=torch.bool)
    found = visible.mask.dense(batch, 1, s_q, visible.keys)
    assert not found[..., s_k:].any()
    return torch.nn.functional.pad(found, (0, max(s_k - visible.keys, 0)))[..., :s_k]


def same(**call: Any) -> Tensor | None:
    """What the layers get, after it was found equal to transformers' own mask."""
    made = attention_mask(**call)
    batch, s_q, s_k = call["batch_size"], call["q_length"], call["kv_length"]
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    padding = call.get("attention_mask")
    given = {"attention_mask": None if padding is None else padding.bool(), **dict.fromkeys(skips, False)}
    expected = theirs.sdpa_mask(**{**call, **given})
    assert expected is not None
    if made is None:  # then the layers are causal from the first key on, but for a single query
        whole = torch.ones(s_q, s_k, dtype=torch.bool)
        assert torch.equal(expected[0, 0], whole.tril() if call["allow_is_causal_skip"] and s_q > 1 else whole)
        return None
    assert made.shape == expected.shape
    assert torch.equal(allowed(visible_keys(made, s_q, s_k), batch, s_q, s_k), expected)
    if isinstance(made, CarriedMask):
        assert torch.equal(made.elements, expected)
    return made


def cache(rng: random.Random, kind: str) -> tuple[int, int, int | Tensor, int]:
    """(q_length, kv_length, q_offset, kv_offset) as a cache of this kind reports them."""
    s_q, past = rng.randint(1, 9), rng.randint(0, 9)
    if kind == "growing":
        return s_q, past + s_q, past, 0
    if kind == "static":  # the place of the queries is a tensor in transformers' own
        return s_q, past + s_q + rng.randint(0, 6), rng.choice((past, torch.tensor(past))), 0
    if kind == "sliding":
        window = rng.randint(2, 5)
        return s_q, window - 1 + s_q if past >= window else past + s_q, past, max(past - window + 1, 0)
    return s_q, rng.randint(1, 12), 0, 0  # another sequence's keys


def function(rng: random.Random, batch: int, length: int) -> tuple[Callable[..., Any], str]:
    kind = rng.choice(("causal", "both", "window", "window_both", "chunks"))
    made: dict[str, Callable[[], Callable[..., Any]]] = {
        "causal": lambda: theirs.causal_mask_function,
        "both": lambda: theirs.bidirectional_mask_function,
        "window": lambda: theirs.sliding_window_causal_mask_function(rng.randint(1, 8)),
        "window_both": lambda: theirs.sliding_window_bidirectional_mask_function(rng.randint(1, 6)),
        "chunks": lambda: theirs.chunked_causal_mask_function(rng.randint(1, 5), torch.randint(0, 4, (batch,))),
    }
    found, overlay = made[kind](), rng.randint(0, 7)
    if overlay == 1:
        packed = torch.randint(0, 2, (batch, length)).cumsum(-1)
        return theirs.and_masks(found, theirs.packed_sequence_mask_function(packed)), "overlay"
    if overlay == 2:
        return theirs.or_masks(found, theirs.blockwise_overlay(torch.randint(-1, 2, (batch, length)))), "overlay"
    if overlay == 3:
        return theirs.or_masks(found, lambda b, h, i, j: (i + j) % 3 == 0), "overlay"
    if overlay == 4:
        return theirs.and_masks(found, lambda b, h, i, j: (i + j) % 3 == 0), "overlay"
    return found, kind


@pytest.mark.parametrize("kind", ["growing", "static", "sliding", "other keys"])
def test_every_mask_of_transformers(kind: str) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        batch, (s_q, s_k, q_offset, kv_offset) = rng.randint(1, 3), cache(rng, kind)
        made, what = function(rng, batch, kv_offset + s_k + s_q + 9)
        padding = None
        if rng.randint(0, 2):
            padding = torch.rand(batch, kv_offset + s_k - rng.randint(0, min(3, kv_offset + s_k - 1))) < 0.7
            padding |= torch.tensor(rng.randint(0, 2) == 0)
        skip = bool(rng.randint(0, 1)) and what != "overlay"
        both = what in ("both", "window_both")
        same(
            batch_size=batch, q_length=s_q, kv_length=s_k, q_offset=q_offset, kv_offset=kv_offset, mask_function=made,
            attention_mask=padding, allow_is_causal_skip=skip and not both, allow_is_bidirectional_skip=skip and both,
        )  # fmt: skip


@pytest.mark.parametrize("what", ["packed", "chunks"])
def test_documents_of_transformers_are_intervals(what: str) -> None:
    """Also where their ids may not be looked at."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 0]])
    packed = positions.diff(prepend=positions[:, :1] - 1) != 1
    function = {
        "packed": theirs.and_masks(
            theirs.causal_mask_function, theirs.packed_sequence_mask_function(packed.cumsum(-1))
        ),
        "chunks": theirs.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    }[what]
    made = same(**sizes(9, 9, mask_function=function))
    assert isinstance(made, CarriedMask)
    assert made.visible is not None
    assert made.visible.mask is not None
    assert made.visible.mask.fitted_program(9, 9, torch.device("cpu"))[0] == "seq.b:0"
    assert all(leaf.contiguous for leaf in made.visible.mask.leaves() if isinstance(leaf, Document))


def sizes(s_q: int, s_k: int, **rest: Any) -> dict[str, Any]:
    plain = {"batch_size": 2, "q_length": s_q, "kv_length": s_k, "mask_function": theirs.causal_mask_function}
    return {**plain, "allow_is_causal_skip": True, "allow_is_bidirectional_skip": False, **rest}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (sizes(9, 9), None),
        (sizes(9, 9, attention_mask=torch.ones(2, 9)), None),
        (sizes(9, 20), None),  # a static cache being filled
        (sizes(1, 9, q_offset=8), None),
        (sizes(9, 9, mask_function=theirs.sliding_window_causal_mask_function(50)), None),
        (sizes(4, 9, q_offset=5), (-1, 0)),
        (sizes(9, 9, mask_function=theirs.sliding_window_causal_mask_function(4)), (3, 0)),
        (sizes(4, 20, q_offset=5, mask_function=theirs.sliding_window_causal_mask_function(4)), (3, 0)),
        (sizes(9, 9, mask_function=theirs.sliding_window_bidirectional_mask_function(2)), (2, 2)),
    ],
)
def test_what_needs_no_program(call: dict[str, Any], what: tuple[int, int] | None) -> None:
    """Nothing at all, or two numbers."""
    made = same(**call)
    if what is None:
        assert made is None
    else:
        assert isinstance(made, CarriedMask)
        assert made.visible is not None
        assert made.visible.mask is not None
        assert made.visible.mask.band() == what


def test_padding_is_a_table_of_single_keys() -> None:
    padding = torch.ones(2, 9)
    padding[1, :4] = 0
    made = same(**sizes(9, 9, attention_mask=padding))
    assert isinstance(made, CarriedMask)
    assert made.visible is not None
    assert repr(made.visible.mask) == "band(None, 0) & block((2, 1, 1, 9), (9, 1))"


def test_a_function_of_ones_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        same(**sizes(5, 5, mask_function=theirs.and_masks(theirs.causal_mask_function, lambda b, h, i, j: i + j != 3)))
    assert caplog.text.count("has no closed form here") == 1


def test_an_overwritten_mask_is_what_was_written() -> None:
    made = attention_mask(**sizes(4, 9, q_offset=5))
    assert isinstance(made, CarriedMask)
    expected = made.elements.clone()
    assert made.sum() == expected.sum()
    assert made.visible is not None
    made[:, :, :, 2] = False
    expected[:, :, :, 2] = False
    assert made.visible is None
    assert torch.equal(allowed(visible_keys(made, 4, 9), 2, 4, 9), expected)


def test_what_is_no_mask() -> None:
    with pytest.raises(InputError, match="other numbers than 0 and -inf"):
        visible_keys(torch.randn(1, 1, 3, 3), 3, 3)
    with pytest.raises(InputError, match=r"the mask is \(1, 1, 3, 4\); needs \(B, 1, 3, 3\)"):
        visible_keys(torch.ones(1, 1, 3, 4, dtype=torch.bool), 3, 3)
    with pytest.raises(InputError, match=r"torch.int64; needs bool"):
        visible_keys(torch.ones(1, 1, 3, 3, dtype=torch.int64), 3, 3)
    with pytest.raises(InputError, match=r"the padding mask is \(2, 1, 9\)"):
        attention_mask(**sizes(9, 9, attention_mask=torch.ones(2, 1, 9)))
