"""The server, over real connections: OpenAI's own client, hostile requests, cancelled clients, a clean end."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from tests.models import zoo
from tests.serve.running import KEY, Running, engine_of

from tilewright import Engine
from tilewright.engine import SamplingParams
from tilewright.errors import InputError
from tilewright.serve import create_app


@pytest.fixture(scope="module")
def running():
    running = Running(engine_of(), api_key=KEY, max_waiting=6, max_body=20_000)
    yield running
    running.close()
    assert not running.engine.is_alive, "the engine ends with its server"


@pytest.fixture
def client(running):
    from openai import OpenAI

    with OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def wanted(running, text, count):
    return running.engine.generate(text, SamplingParams(max_tokens=count))[0].text


def test_a_completion(running, client):
    answer = client.completions.create(model="tiny", prompt="a prompt", max_tokens=9, temperature=0)
    assert answer.choices[0].text == wanted(running, "a prompt", 9)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 9)


def test_penalties_and_biases_reach_the_engine(running, client):
    options = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"5": 2.0, "9": -100}}
    answer = client.completions.create(model="tiny", prompt="a prompt", max_tokens=20, temperature=0, **options)
    params = SamplingParams(max_tokens=20, **options | {"logit_bias": {5: 2.0, 9: -100}})
    assert answer.choices[0].text == running.engine.generate("a prompt", params)[0].text
    assert answer.choices[0].text != wanted(running, "a prompt", 20)


def test_several_prompts_and_prompts_of_tokens(running, client):
    texts = client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=5, temperature=0)
    assert [c.text for c in texts.choices] == [wanted(running, text, 5) for text in ("one", "two")]
    tokens = [ord(letter) for letter in "one"]
    assert client.completions.create(model="tiny", prompt=tokens, max_tokens=5, temperature=0).choices[0].text == (
        texts.choices[0].text
    )


def test_a_stream_is_the_same_text_in_pieces(client):
    options = {"model": "tiny", "prompt": "a prompt", "max_tokens": 20, "temperature": 0.7, "seed": 4}
    whole = client.completions.create(**options)
    events = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.text for event in events for c in event.choices) == whole.choices[0].text
    assert [c.finish_reason for event in events for c in event.choices if c.finish_reason] == ["length"]
    assert events[-1].usage == whole.usage
    assert len(events) > 5


def test_a_chat_with_tools_and_log_probabilities(running, client):
    turns = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, max_tokens=6, temperature=0, logprobs=True)
    assert answer.choices[0].message.content == wanted(running, "user:hello;", 6)
    assert len(answer.choices[0].logprobs.content) == 6
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    told = client.chat.completions.create(model="tiny", messages=turns, max_tokens=6, temperature=0, tools=[tool])
    assert told.choices[0].message.content == wanted(running, "user:hello;T", 6)
    streamed = client.chat.completions.create(model="tiny", messages=turns, max_tokens=6, temperature=0, stream=True)
    assert "".join(event.choices[0].delta.content for event in streamed) == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_and_is_not_in_it(running, client, stream):
    text = wanted(running, "a prompt", 20)
    stop = text[7:10]
    answer = client.completions.create(
        model="tiny", prompt="a prompt", max_tokens=20, temperature=0, stop=[stop, "XYZ"], stream=stream
    )
    choices = [c for event in answer for c in event.choices] if stream else answer.choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_many_clients_at_once_get_each_their_own(running):
    from openai import AsyncOpenAI

    async def ask(client, n):
        answer = await client.completions.create(model="tiny", prompt=f"prompt {n}", max_tokens=12, temperature=0)
        return answer.choices[0].text

    async def all_of_them():
        url = f"http://127.0.0.1:{running.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, n) for n in range(6)))

    assert asyncio.run(all_of_them()) == [wanted(running, f"prompt {n}", 12) for n in range(6)]


BODY = {"model": "tiny", "prompt": "x", "max_tokens": 3}


@pytest.mark.parametrize(
    ("body", "status", "match"),
    [
        (BODY | {"model": "other"}, 404, "no model is named other"),
        (BODY | {"max_tokens": 0}, 400, "max_tokens"),
        (BODY | {"max_tokens": 1000}, 400, "exceed the 128"),
        (BODY | {"temperature": -1}, 400, "temperature"),
        (BODY | {"suffix": "end"}, 400, "suffix is 'end'; this server does not apply it"),
        (BODY | {"logit_bias": {"5": 101}}, 400, "logit_bias"),
        (BODY | {"logit_bias": {"100000": 1}}, 400, "logit_bias has tokens [100000]"),
        (BODY | {"presence_penalty": 3}, 400, "presence_penalty"),
        (BODY | {"prompt": ""}, 400, "no tokens"),
        (BODY | {"prompt": []}, 400, "empty"),
        (BODY | {"prompt": [100000]}, 400, "the vocabulary has"),
        (BODY | {"prompt": {"a": 1}}, 400, "prompt"),
        (BODY | {"stop": [""]}, 400, "empty text"),
        (BODY | {"prompt": ["x"] * 7}, 400, "7 answers, of 6"),
        (BODY | {"prompt": "x" * 30_000}, 413, "more than 20000 bytes"),
        (b"{not json", 400, "JSON"),
    ],
)
def test_what_is_wrong_is_said_and_the_server_goes_on(running, body, status, match):
    code, answer = running.ask("/v1/completions", body)
    assert (code, answer["error"]["code"]) == (status, status)
    assert match in answer["error"]["message"]
    assert running.ask("/v1/completions", BODY)[0] == 200


def test_a_body_without_a_length_is_limited_too(running):
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"2328\r\n" + b"x" * 0x2328 + b"\r\n"
    with closing(HTTPConnection("127.0.0.1", running.port, timeout=60)) as connection:
        connection.connect()
        connection.sock.sendall(
            head.encode() + 3 * chunk + b"0\r\n\r\n"
        )  # at once: the server may close after any part
        assert connection.sock.recv(12) == b"HTTP/1.1 413"


def test_a_template_that_refuses_is_a_wrong_request(running):
    body = {"messages": [{"role": "unknown", "content": "x"}]}
    code, answer = running.ask("/v1/chat/completions", body)
    assert code == 400 and "roles are user and assistant" in answer["error"]["message"]


def test_a_key_is_wanted_everywhere_but_for_health_and_the_page(running):
    for path in ("/v1/models", "/metrics", "//", "/openapi.json", "/health/", "/v1/completions"):
        assert running.ask(path, key="wrong")[0] == 401
    code, page = running.ask("/", key="wrong")
    assert code == 200 and KEY not in page
    assert running.ask("/health", key="wrong") == (200, "ok")
    assert running.ask("/v1/models")[1]["data"][0]["id"] == "tiny"


def test_a_client_that_leaves_takes_its_request_with_it(running):
    for stream in (False, True):
        body = json.dumps(BODY | {"prompt": f"long {stream}", "max_tokens": 100, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            while not running.engine.statistics["running"]:
                time.sleep(0.001)
        while running.engine.statistics["running"]:
            time.sleep(0.005)
        assert running.engine.statistics["running"] == running.engine.statistics["pages_held"] == 0
    assert running.ask("/v1/completions", BODY)[0] == 200


def test_numbers_for_prometheus(running):
    running.ask("/v1/completions", BODY)
    running.ask("/v1/completions", BODY | {"suffix": "end"})
    lines = dict(line.rsplit(" ", 1) for line in running.ask("/metrics")[1].splitlines() if not line.startswith("#"))
    assert float(lines['tilewright_requests_total{status="200"}']) >= 1
    assert float(lines['tilewright_requests_total{status="400"}']) >= 1
    assert float(lines["tilewright_generated_tokens_total"]) >= 3
    assert float(lines["tilewright_first_token_seconds_count"]) >= 1
    assert float(lines["tilewright_engine_running"]) == 0


def test_a_request_whose_model_is_an_adapter_gets_it():
    path = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    factors = {f"{path}A.weight": torch.ones(2, 48), f"{path}B.weight": torch.ones(32, 2).cumsum(0)}
    engine = engine_of(adapters={"fine": ({"r": 2, "lora_alpha": 2}, factors)})
    with pytest.raises(InputError, match="'fine' names the model and an adapter"):
        create_app(engine, "fine")
    running = Running(engine)
    try:
        assert [each["id"] for each in running.ask("/v1/models")[1]["data"]] == ["tiny", "fine"]
        answers = {}
        for name, adapter in (("tiny", None), ("fine", "fine")):
            code, answers[name] = running.ask("/v1/completions", BODY | {"model": name, "temperature": 0})
            params = SamplingParams(max_tokens=BODY["max_tokens"], adapter=adapter)
            assert (code, answers[name]["model"]) == (200, name)
            assert answers[name]["choices"][0]["text"] == engine.generate(BODY["prompt"], params)[0].text
        assert answers["tiny"]["choices"] != answers["fine"]["choices"]
        code, answer = running.ask("/v1/completions", BODY | {"model": "other"})
        assert (code, "this server has tiny, fine" in answer["error"]["message"]) == (404, True)
    finally:
        running.close()


def test_an_engine_that_stopped_is_not_healthy():
    running = Running(engine_of())
    norm = running.engine._model.model.model.norm
    norm.register_forward_hook(lambda *args: (_ for _ in ()).throw(RuntimeError("gone")))
    code, answer = running.ask("/v1/completions", BODY)
    assert code == 500 and "gone" in answer["error"]["message"]
    assert running.ask("/health")[0] == 503
    running.close()


def test_text_is_needed():
    with Engine(zoo.build("llama"), max_context=64) as engine, pytest.raises(InputError, match="no tokenizer"):
        create_app(engine, "tiny")


SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.serve.running import engine_of
from tilewright.serve import serve
serve(engine_of(max_context=100), "tiny", port=int(sys.argv[2]))
"""


def test_a_signal_lets_running_requests_end():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parents[2]), str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for(port, server)
            with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                body = json.dumps(BODY | {"max_tokens": 90, "stream": True})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                first = response.readline()
                server.send_signal(signal.SIGTERM)
                rest = response.read()
            code = server.wait(60)
        finally:
            server.kill()
        assert first.startswith(b"data: ") and rest.rstrip().endswith(b"data: [DONE]")
        assert code in (0, -signal.SIGTERM), server.stderr.read()


def wait_for(port, server):
    """Return when the server takes connections."""
    while server.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    pytest.fail(f"the server ended: {server.stderr.read()}")
