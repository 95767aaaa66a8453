"""Stop strings: found across tokens, never shown in part, for all ways to read the text."""

import asyncio

import pytest
from tests.engine.test_engine import SIZES, Letters, prompt, silent
from tests.models import zoo

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.engine.text import StoppedText
from tilewright.errors import InputError, TilewrightError

COUNT = 30


class Words:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, *texts):
        self.texts = texts

    def decode(self, tokens, skip_special_tokens):
        return "".join(self.texts[token] for token in tokens)


def released(texts, stops, includes_stop=False, free=0):
    """Text of each token until a stop string, the text that waits, and whether there was one."""
    text, pieces = StoppedText(Words(*texts), stops, includes_stop, free), []
    for token in range(len(texts)):
        pieces.append(text.push(token))
        if text.is_stopped:
            break
    pieces.append(text.end())
    assert text.text == "".join(pieces)
    return pieces, text.is_stopped


@pytest.mark.parametrize(
    ("texts", "stops", "pieces", "is_stopped"),
    [
        (["ab", "cS", "TO", "Pd"], ["STOP"], ["ab", "c", "", "", ""], True),
        (["aSTOPb"], ["STOP"], ["a", ""], True),
        (["ST", "OX", "y"], ["STOP"], ["", "STOX", "y", ""], False),
        (["aST", "O"], ["STOP"], ["a", "", "STO"], False),
        (["a", "aa", "ab"], ["aab"], ["", "a", "a", ""], True),
        (["xbc", "d"], ["bcd", "c"], ["xb", ""], True),
        (["x\n", "\ny"], ["\n\n"], ["x", "", ""], True),
    ],
    ids=["across_tokens", "inside_one", "not_after_all", "never_whole", "overlap", "first_complete", "lines"],
)
def test_text_goes_up_to_a_stop_string(texts, stops, pieces, is_stopped):
    assert released(texts, stops) == (pieces, is_stopped)


def test_a_stop_string_may_be_shown_and_tokens_may_be_free_of_it():
    assert released(["ab", "cS", "TO", "Pd"], ["STOP"], includes_stop=True) == (["ab", "c", "", "STOP", ""], True)
    assert released(["S", "S", "aS"], ["S"], free=2) == (["S", "S", "a", ""], True)
    assert released(["aS", "Tb"], ["ST"], free=1) == (["aS", "Tb", ""], False)


@pytest.fixture(scope="module")
def model():
    return silent(zoo.build("llama"))


@pytest.fixture(scope="module", params=[None, "prompt_lookup"])
def engine(model, request):
    with Engine(model, Letters(), speculation=request.param, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def text(engine):
    return engine.generate(prompt(7), SamplingParams(max_tokens=COUNT))[0].text


def test_a_request_ends_at_a_stop_string(engine, text):
    stop = text[9:12]
    place = text.find(stop)
    params = SamplingParams(max_tokens=COUNT, stop=("nowhere", stop))
    (output,) = engine.generate([prompt(7)], params)
    assert (output.text, output.reason) == (text[:place], "stop")
    assert len(output.tokens) < COUNT
    pieces = list(engine.stream(prompt(7), params))
    assert "".join(piece.text for piece in pieces) == output.text
    assert [piece.token for piece in pieces if piece.token >= 0] == output.tokens
    with_stop = SamplingParams(max_tokens=COUNT, stop=stop, include_stop_str_in_output=True)
    assert engine.generate(prompt(7), with_stop)[0].text == text[: place + len(stop)]
    assert engine.statistics["pages_held"] == 0


def test_asynchronous_pieces_and_text_that_waits_at_the_end(engine, text):
    params = SamplingParams(max_tokens=COUNT, stop=text[-3:] + "more")

    async def pieces():
        return [piece async for piece in engine.submit(prompt(7), params)]

    shown = asyncio.run(pieces())
    assert "".join(piece.text for piece in shown) == text
    assert shown[-1].token == -1, "what could have been the beginning of a stop string"


def test_stop_strings_need_a_tokenizer(model):
    with Engine(model, **SIZES) as engine, pytest.raises(InputError, match="need a tokenizer"):
        engine.submit(prompt(3), SamplingParams(stop="x"))


def test_an_error_of_the_tokenizer_fails_its_request_alone(model):
    class Broken(Letters):
        def decode(self, tokens, skip_special_tokens):
            raise ValueError("no such token")

    with Engine(model, Broken(), **SIZES) as engine:
        bad = engine.submit(prompt(3), SamplingParams(max_tokens=4, stop="x"))
        good = engine.submit(prompt(3), SamplingParams(max_tokens=4))
        with pytest.raises(TilewrightError, match="no such token"):
            bad.result(timeout=60)
        with pytest.raises(ValueError, match="no such token"):  # its text, for who asks
            good.result(timeout=60)
        assert engine.is_alive
