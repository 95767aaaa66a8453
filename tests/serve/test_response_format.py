"""Answers that keep to a schema or an expression, over HTTP; needs llguidance."""

import json
import re

import pytest
from tests.engine.letters import END, letters
from tests.models import zoo
from tests.serve.running import Running

from tilewright import Engine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TIGHT = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
TURNS = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def running():
    pytest.importorskip("llguidance")
    model, tokenizer = zoo.build("llama"), letters()
    model.generation_config.eos_token_id = END
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    running = Running(Engine(model, tokenizer, max_batch=4, page_size=4, max_context=96))
    yield running
    running.close()


def test_a_chat_that_keeps_to_a_schema(running):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": TIGHT}}
    body = {"messages": TURNS, "max_tokens": 40, "temperature": 1.0, "seed": 1, "response_format": form, "n": 2}
    code, answer = running.ask("/v1/chat/completions", body)
    assert code == 200
    for choice in answer["choices"]:
        assert list(json.loads(choice["message"]["content"])) == ["ok"] and choice["finish_reason"] == "stop"


def test_an_object_and_a_stream_of_an_expression(running):
    body = {"prompt": "x", "max_tokens": 12, "response_format": {"type": "json_object"}}
    assert running.ask("/v1/completions", body)[1]["choices"][0]["text"].lstrip()[:1] in ("{", "")
    body = {"prompt": "x", "max_tokens": 12, "guided_regex": "[ab]{3}c", "stream": True}
    code, events = running.ask("/v1/completions", body)
    data = [json.loads(event[6:]) for event in events.split("\n\n") if event.startswith("data: {")]
    assert code == 200 and re.fullmatch("[ab]{3}c", "".join(c["text"] for event in data for c in event["choices"]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "names no json_schema"),
        ({"guided_regex": "[a"}, "the grammar is refused"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"guided_regex": "a", "logprobs": 1}, "exclude each other"),
    ],
)
def test_what_is_refused(running, options, match):
    code, answer = running.ask("/v1/completions", {"prompt": "x"} | options)
    assert code == 400 and match in answer["error"]["message"]
    assert running.ask("/v1/completions", {"prompt": "x", "response_format": {"type": "text"}})[0] == 200
