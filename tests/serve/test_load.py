"""`tilewright bench serve`: the load that is drawn, what is measured of our own server, and of servers that fail."""

import json
import math
import socket
import threading
from contextlib import contextmanager
from itertools import pairwise

import pytest
from tests.serve.running import KEY, Running, engine_of
from typer.testing import CliRunner

from tilewright.bench.load import Range, Record, Workload, measure, summarise
from tilewright.cli import app
from tilewright.errors import InputError, ServerError

WORK = Workload(6, prompt=Range(4, 9), output=Range(3, 12), vocabulary=100, seed=1)


@pytest.fixture(scope="module")
def running():
    running = Running(engine_of(), api_key=KEY, max_waiting=4)
    yield running
    running.close()


@pytest.fixture
def url(running):
    return f"http://127.0.0.1:{running.port}"


def test_a_load_is_a_function_of_its_seed():
    drawn = WORK.draw()
    assert drawn == WORK.draw() != Workload(6, prompt=Range(4, 9), output=Range(3, 12), seed=2).draw()
    assert {request.arrival for request in drawn} == {0.0}
    assert all(4 <= len(each.prompt) <= 9 and 3 <= each.output <= 12 and max(each.prompt) < 100 for each in drawn)
    arrivals = [request.arrival for request in Workload(2000, rate=50.0, prompt=Range(1, 1)).draw()]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    gaps = [b - a for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2), "exponential gaps"


@pytest.mark.parametrize("text", ["", "-3", "3-", "a", "1.5", "3-4-5"])
def test_what_is_no_length(text):
    with pytest.raises(InputError, match="is no length"):
        Range.parse(text)


@pytest.mark.parametrize(
    "options",
    [{"requests": 0}, {"rate": 0.0}, {"rate": math.nan}, {"prompt": Range(0, 3)}, {"output": Range(5, 4)}],
)
def test_what_is_no_load(options):
    with pytest.raises(InputError):
        Workload(**{"requests": 1} | options)


def test_our_server_under_load(url):
    ended = []
    name, records = measure(url + "/v1/", WORK, api_key=KEY, concurrency=2, progress=ended.append)
    assert name == "tiny" and ended == [1, 2, 3, 4, 5, 6]
    for request, record in zip(WORK.draw(), records, strict=True):
        assert record.failure is None
        assert (record.prompt, record.output) == (len(request.prompt), request.output), "as the server counted"
        assert 0 < record.times[0] <= record.times[-1] <= record.total
    spans = sorted((record.sent, record.sent + record.total) for record in records)
    assert all(sum(a <= begin < b for a, b in spans) <= 2 for begin, _ in spans), "two at once"


def test_numbers_of_made_up_records():
    records = [
        Record(0.0, 0.0, [0.1, 0.2, 0.5], 0.5, prompt=10, output=5),
        Record(0.0, 0.5, [0.3], 0.5, prompt=20, output=1),
        Record(0.0, 0.5, [], 1.5, prompt=30, failure=("status 429", "later")),
    ]
    summary = summarise(records)
    assert (summary["requests"], summary["answered"], summary["seconds"]) == (3, 2, 2.0)
    assert summary["output_tokens_per_second"] == 3 and summary["prompt_tokens_per_second"] == 15
    assert summary["first_token_ms"]["p50"] == pytest.approx(200)
    assert summary["first_token_ms"]["p90"] == pytest.approx(280)
    assert summary["token_ms"]["mean"] == summary["token_ms"]["max"] == pytest.approx(100), "(500 - 100) / 4"
    assert summary["gap_ms"]["max"] == pytest.approx(300)
    assert summary["waited_ms"]["max"] == pytest.approx(500)
    assert summary["errors"] == {"status 429": {"count": 1, "example": "later"}}
    assert summarise(records[2:])["first_token_ms"] is None


def test_failures_are_counted_by_kind(url):
    with pytest.raises(ServerError, match="status 401: the API key"):
        measure(url, WORK, api_key="wrong", model="tiny")
    with pytest.raises(ServerError, match="status 404: no model is named"):
        measure(url, WORK, api_key=KEY, model="other")
    work = Workload(12, prompt=Range(4, 4), output=Range(100, 100), vocabulary=100)
    summary = summarise(measure(url, work, api_key=KEY)[1])
    assert set(summary["errors"]) == {"status 429"}, "4 open requests, at most"
    assert summary["answered"] == 12 - summary["errors"]["status 429"]["count"] >= 4


@contextmanager
def answering(answer):
    """The URL of a server that sends these bytes to everyone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "malformed answer"),
        (b"no HTTP\r\n\r\n", "malformed answer"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nlater", "status 503: later"),
        (HEAD + b'data: {"choices": [{"text": "a"}]}\n\n', "cut off"),
        (HEAD + b"data: {\n\n", "malformed answer"),
        (HEAD + b'data: {"error": {"message": "gone"}}\n\n', "error in a stream: gone"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 99\r\n\r\n") + b"data: ", "malformed answer"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + b"xyz\r\n", "malformed answer"),
    ],
)
def test_servers_that_fail(answer, kind):
    with answering(answer) as url, pytest.raises(ServerError, match=kind):
        measure(url, WORK, model="any")


def test_a_server_without_usage_has_its_events_counted():
    event = b'data: {"choices": [{"text": "a"}]}\r\n\r\n'
    with answering(HEAD + b": hello\n\n" + 3 * event + b"data: [DONE]\n\n") as url:
        assert measure(url, Workload(1), model="any")[1][0].output == 3


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ServerError, match="connection: "):
        measure(f"http://127.0.0.1:{port}", WORK)


def test_the_command(url, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "key").write_text(KEY)
    load = ("--requests", "4", "--rate", "100", "--prompt-tokens", "4-8", "--output-tokens", "5", "--vocabulary", "90")
    files = ("--json", str(tmp_path / "load.json"), "--plot", str(tmp_path / "load.svg"))
    done = CliRunner().invoke(app, ["bench", "serve", url, "--api-key-file", str(tmp_path / "key"), *load, *files])
    assert done.exit_code == 0, done.output
    assert "tiny: 4 of 4 requests answered" in done.output and "to the first token" in done.output
    result = json.loads((tmp_path / "load.json").read_text())
    assert result["workload"]["rate"] == 100 and len(result["records"]) == 4
    assert {record["output"] for record in result["records"]} == {5}
    assert result["summary"]["first_token_ms"]["p99"] > 0
    assert "to the first token" in (tmp_path / "load.svg").read_text()
    failed = CliRunner().invoke(app, ["bench", "serve", url, *load])
    assert failed.exit_code == 2 and "status 401" in failed.output
