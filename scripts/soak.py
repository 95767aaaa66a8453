"""A server under clients of all kinds for a while: no answer lost, none mixed with another's, no page kept.

    python scripts/soak.py --seconds 120 --clients 16 --json soak.json          # the embedded model, float32
    python scripts/soak.py --model FOLDER --device cuda --seconds 7200 --clients 64

The server runs in a process of its own.  First each prompt is answered alone; then clients, each with a connection a
request, ask for whole answers and streams (which have to equal those), leave in the middle of a stream, and send
prompts that do not fit, bodies that are too large, and bodies that are no requests; beside them comes one hostile
header a second.  The report counts what was lost, mixed, or answered with another status than it should; it has the
memory of the server each second, percentiles of times in seconds, and what the engine still holds at the end.
The exit status is 1 if any of that is wrong.
"""

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"whole": 10, "stream": 6, "leave": 4, "too_long": 1, "too_large": 1, "malformed": 2}  # and their weights
TIMEOUT = 120  # seconds, after which an answer is lost
LARGEST = 4 << 20  # bytes of a body, the server's limit
MALFORMED = (
    b"",
    b"{",
    b"[1, 2]",
    b"\xff\xfe",
    b'{"prompt": {}}',
    b'{"prompt": "x", "temperature": -1}',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "best_of": 4}',
)
HOSTILE = (
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    b"GET /v1/models\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost\x01: x\r\n\r\n",
    b"BREW /v1/completions HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
)


@dataclass
class Report:
    """sent: by kind.   lost, mixed, wrong: one line each.   memory: bytes of the server, each second."""

    sent: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"first_token": [], "whole": [], "stream": []})
    held: dict[str, float] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.mixed or self.wrong or any(self.held.values()))

    def summary(self) -> dict[str, Any]:
        """What JSON keeps."""
        percentiles = {name: _percentiles(values) for name, values in self.seconds.items()}
        lines = {name: getattr(self, name)[:20] for name in ("lost", "mixed", "wrong")}
        counts = {f"{name}_count": len(getattr(self, name)) for name in lines}
        return {
            "is_right": self.is_right,
            "sent": dict(self.sent),
            **counts,
            **lines,
            "held_at_the_end": self.held,
            "seconds": percentiles,
            "memory": self.memory,
        }


class Soak:
    """Clients of a server on a port of this machine.   pid: of its process.   room: tokens of one request."""

    def __init__(self, port: int, pid: int, prompts: list[tuple[str, int]], room: int, seed: int = 0) -> None:
        self.port, self.pid, self.prompts, self.room, self.seed = port, pid, prompts, room, seed
        self.report = Report()
        self.alone: list[str] = []
        self._lock, self._end = threading.Lock(), 0.0

    def run(self, seconds: float, clients: int) -> Report:
        """Answer each prompt alone, then soak."""
        self.alone = [self._whole(index) for index in range(len(self.prompts))]
        self._end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        threads += [threading.Thread(target=self._each_second, args=(each,)) for each in (self._watch, self._attack)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.report.held = self._held()
        return self.report

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self._end:
            (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
            index = draw.randrange(len(self.prompts))
            with self._lock:
                self.report.sent[kind] += 1
            try:
                getattr(self, f"_ask_{kind}")(index, draw)
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                self._note("lost", f"{kind} of prompt {index}: {type(error).__name__}: {error}")

    def _ask_whole(self, index: int, draw: random.Random) -> None:
        begin = time.monotonic()
        text = self._whole(index)
        self._took("whole", begin)
        self._compare("whole", index, text)

    def _ask_stream(self, index: int, draw: random.Random) -> None:
        begin, text = time.monotonic(), ""
        for count, piece in enumerate(self._pieces(index)):
            if not count:
                self._took("first_token", begin)
            text += piece
        self._took("stream", begin)
        self._compare("stream", index, text)

    def _ask_leave(self, index: int, draw: random.Random) -> None:
        text, most = "", draw.randint(0, 4)
        for count, piece in enumerate(pieces := self._pieces(index)):
            text += piece
            if count == most:
                break
        pieces.close()
        if not self.alone[index].startswith(text):
            self._note("mixed", f"the beginning of a stream of prompt {index}: {text!r}")

    def _ask_too_long(self, index: int, draw: random.Random) -> None:
        self._expect(400, json.dumps({"prompt": "x = 1\n" * self.room, "max_tokens": 4}).encode())

    def _ask_too_large(self, index: int, draw: random.Random) -> None:
        with suppress(ConnectionError):  # the server may answer and leave before it has read all
            self._expect(413, b" " * (LARGEST + 1))

    def _ask_malformed(self, index: int, draw: random.Random) -> None:
        self._expect(400, draw.choice(MALFORMED))

    def _whole(self, index: int) -> str:
        status, body = self._post(self._body(index))
        if status != 200:
            raise ValueError(f"status {status}: {body[:200]!r}")
        text: str = json.loads(body)["choices"][0]["text"]
        return text

    def _pieces(self, index: int) -> Any:
        """Texts of the events of a stream; leaving it closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            body = json.dumps(self._body(index) | {"stream": True}).encode()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])["choices"][0]["text"]
            raise ValueError("the stream ended without [DONE]")
        finally:
            connection.close()

    def _body(self, index: int) -> dict[str, Any]:
        prompt, count = self.prompts[index]
        return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}

    def _post(self, body: dict[str, Any] | bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _expect(self, status: int, body: bytes) -> None:
        got, answer = self._post(body)
        if got != status:
            self._note("wrong", f"{got} in place of {status} for {body[:60]!r}: {answer[:200]!r}")

    def _each_second(self, act: Any) -> None:
        turn = 0
        while time.monotonic() < self._end:
            act(turn)
            turn += 1
            time.sleep(max(0.0, min(1.0, self._end - time.monotonic())))

    def _watch(self, turn: int) -> None:
        with suppress(OSError):  # no such file but on Linux
            pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
            self.report.memory.append(int(pages) * 4096)

    def _attack(self, turn: int) -> None:
        """A hostile header gets a refusal, or the connection is closed."""
        self.report.sent["hostile"] += 1
        payload, answer = HOSTILE[turn % len(HOSTILE)], b""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            connection.sendall(payload)
            answer = connection.recv(4096)
        if answer and not answer.startswith(b"HTTP/1.1 4"):
            self._note("wrong", f"{answer[:60]!r} for the hostile {payload[:60]!r}")

    def _held(self) -> dict[str, float]:
        """What the engine holds once all clients have left; after 30 s at the latest it should be nothing."""
        held: dict[str, float] = {}
        for _ in range(300):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
            connection.request("GET", "/metrics")
            lines = [line.split(" ") for line in connection.getresponse().read().decode().splitlines()]
            connection.close()
            numbers = {line[0].removeprefix("tilewright_engine_"): float(line[1]) for line in lines if len(line) == 2}
            held = {name: numbers[name] for name in ("running", "waiting", "pages_held")}
            if not any(held.values()):
                break
            time.sleep(0.1)
        return held

    def _compare(self, kind: str, index: int, text: str) -> None:
        if text != self.alone[index]:
            self._note("mixed", f"{kind} of prompt {index}: {text!r} in place of {self.alone[index]!r}")

    def _took(self, name: str, begin: float) -> None:
        with self._lock:
            self.report.seconds[name].append(time.monotonic() - begin)

    def _note(self, kind: str, line: str) -> None:
        with self._lock:
            getattr(self.report, kind).append(line)


def prompts_of(path: Path, count: int = 16, seed: int = 0) -> list[tuple[str, int]]:
    """Texts of a file of JSON lines, cut so that some begin alike, and the new tokens of each."""
    draw = random.Random(seed)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [(texts[draw.randrange(len(texts))][: draw.randint(20, 400)], draw.randint(4, 48)) for _ in range(count)]


def serve(model: str, device: str, port: int) -> None:
    """Serve `model` in float32, so that an answer is the same in any company."""
    import torch

    from tilewright import Engine
    from tilewright.serve import serve as serve_engine

    with Engine(model, device=device, dtype=torch.float32, max_batch=16, max_context=512, cache_tokens=4096) as engine:
        serve_engine(engine, "soak", port=port)


def main() -> int:
    """Start a server, soak it, print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "examples/stdlib_lm/model"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, metavar="PORT", help="only serve; what the script starts itself")
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.device, options.serve)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), "--model", options.model, "--device", options.device]
    with subprocess.Popen(command) as server:
        try:
            _wait(port, server)
            prompts = prompts_of(ROOT / "examples/stdlib_lm/model/prompts.jsonl", seed=options.seed)
            report = Soak(port, server.pid, prompts, 512, options.seed).run(options.seconds, options.clients)
        finally:
            server.terminate()
            status = server.wait(timeout=60)
    summary = {"clients": options.clients, "run_seconds": options.seconds, "server_status": status, **report.summary()}
    text = json.dumps(summary, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report.is_right else 1


def _wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        if server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode} before it answered.")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("the server does not answer after 120 s.")


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = (
        {f"p{p}": ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99, 100)} if ordered else {}
    )
    return {"count": len(ordered), **{name: round(value, 4) for name, value in at.items()}}


if __name__ == "__main__":
    sys.exit(main())
