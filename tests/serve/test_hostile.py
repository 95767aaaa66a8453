"""What no client may do: ask for what does not fit, end a server or the requests of others, read prompts in a log."""

import json
import logging
import socket

import pytest
from tests.serve.running import KEY, Letters, Running, engine_of

from tilewright.engine import SamplingParams

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0}
TURNS = [{"role": "user", "content": "x"}]


class Fragile(Letters):
    """Breaks over the text of one token, with a prompt in the message of its error."""

    broken = None

    def decode(self, tokens, skip_special_tokens=True):
        if self.broken in tokens:
            raise RuntimeError("private text of a prompt")
        return super().decode(tokens)


@pytest.fixture(scope="module")
def running():
    engine = engine_of()
    engine.tokenizer = Fragile()
    running = Running(engine, api_key=KEY, max_waiting=6)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ({"top_k": 1 << 31}, "top_k"),
        ({"seed": 1 << 63}, "64 bits"),
        ({"max_tokens": 1 << 70}, "exceed the 128"),
        ({"prompt": [1 << 70]}, "the vocabulary has"),
        ({"prompt": [-1]}, "the vocabulary has"),
        ({"prompt": "x" * 126}, "exceed the 128"),
        ({"n": 7}, "1 prompts with n=7 are 7 answers, of 6"),
        ({"prompt": ["x"] * 4, "n": 2}, "8 answers, of 6"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
    ],
)
def test_numbers_that_do_not_fit(running, body, match):
    code, answer = running.ask("/v1/completions", BODY | body)
    assert code == 400 and match in answer["error"]["message"]
    assert running.ask("/v1/completions", BODY)[0] == 200


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"max_tokens": ' + b"9" * 5000 + b"}", b"\xff", b"null", b""])
def test_bodies_that_are_no_requests(running, body):
    code, answer = running.ask("/v1/completions", body)
    assert (code, answer["error"]["code"]) == (400, 400)


def test_half_a_character(running):
    """Texts that are JSON and have no bytes in UTF-8."""
    code, answer = running.ask("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}')
    assert code == 404 and "\ud800" in answer["error"]["message"]
    code, answer = running.ask("/v1/completions", b'{"prompt": "\\ud800", "echo": true, "max_tokens": 0}')
    assert code == 200 and answer["choices"][0]["text"] == "\ud800"


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/completions", "/static/../v1/models"])
def test_routes_that_are_not_there(running, path):
    code, answer = running.ask(path)
    assert code in (404, 405) and answer["error"]["code"] == code


def test_a_template_has_variables_and_no_other_template(running):
    for name in ("messages", "tools"):  # arguments of `Letters.apply_chat_template`
        body = {"messages": TURNS, "max_tokens": 2, "chat_template_kwargs": {name: 1}}
        code, answer = running.ask("/v1/chat/completions", body)
        assert code == 400 and f"chat_template_kwargs has {name}" in answer["error"]["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: -5\r\n", b"400"),
        (b"Content-Length: " + b"9" * 5000 + b"\r\n", b"400"),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", b"400"),
        (b"X: " + b"a" * 200_000 + b"\r\n", b"400"),
        (b"Authorization: Bearer \xff\xfe\r\n", b"401"),
        (b"Authorization: bearer\r\n", b"401"),
        (b"X-Forwarded-For: \xff, 127.0.0.1\r\nX-Forwarded-Proto: x\r\n", b"401"),
    ],
)
def test_headers_that_lie(running, head, status):
    with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
        connection.sendall(HEAD + head + b"\r\n")
        assert connection.recv(12) == b"HTTP/1.1 " + status
    assert running.ask("/v1/completions", BODY)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_is_one_requests_and_its_text_is_nowhere(running, stream, caplog, capfd):
    """The text of one token breaks: its request fails by name, the one beside it goes on, and no log quotes either."""
    tokenizer = running.engine.tokenizer
    whole = running.engine.submit("beside it", SamplingParams(max_tokens=100))
    tokenizer.broken = running.engine.generate("secret", SamplingParams(max_tokens=6))[0].tokens[4]
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "tilewright"):
        try:
            code, answer = running.ask(
                "/v1/completions", BODY | {"prompt": "secret", "max_tokens": 6, "stream": stream}
            )
        finally:
            tokenizer.broken = None
    error = json.loads(answer.strip().splitlines()[-3].removeprefix("data: ")) if stream else answer
    assert code == (200 if stream else 500)
    assert error["error"]["message"].startswith("the server failed with RuntimeError")
    assert "a request failed: RuntimeError in" in caplog.text
    written = capfd.readouterr()
    written = caplog.text + written.out + written.err
    assert "private" not in written + str(answer) and "secret" not in written
    assert len(whole.result().tokens) == 100
    assert running.ask("/health")[0] == 200 and running.ask("/v1/completions", BODY)[0] == 200


def test_logits_of_nan_are_one_requests(caplog):
    engine = engine_of()
    engine._model.model.model.embed_tokens.weight.data[7] = float("nan")
    running = Running(engine)
    try:
        beside = engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
        code, answer = running.ask("/v1/completions", BODY | {"prompt": [1, 7]})
        assert code == 500 and "NaN" in answer["error"]["message"]
        assert len(beside.result().tokens) == 60 and running.ask("/health")[0] == 200
    finally:
        running.close()


def test_what_was_asked_is_in_no_log(running, caplog, capfd):
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "tilewright"):
        for body in (
            BODY | {"prompt": "zebra"},
            BODY | {"prompt": "zebra" * 40},
            BODY | {"prompt": {"zebra": 1}},
            BODY | {"suffix": "zebra"},
            BODY | {"model": "zebra"},
        ):
            running.ask("/v1/completions", body)
        running.ask("/v1/chat/completions", {"messages": [{"role": "unknown", "content": "zebra"}]})
        running.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "zebra"}], "max_tokens": 3})
        running.ask("/v1/completions", b'{"prompt": "zebra')
    written = capfd.readouterr()
    assert "zebra" not in caplog.text + written.out + written.err
