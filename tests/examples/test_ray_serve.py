"""The recipe for replicas: its application without Ray, and two replicas behind Ray Serve where Ray is installed."""

import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.letters import letters
from tests.models import zoo

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def test_the_application_of_a_replica(folder):
    example = runpy.run_path(str(EXAMPLE))
    app = example["builder"](str(folder), "tiny", "cpu", "key")()
    replica = example["Replica"]()
    replica.app = app
    replica.check_health()
    app.state.engine.close()
    with pytest.raises(RuntimeError, match="the engine stopped"):
        replica.check_health()


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of Ray's on this machine alone, ended by the processes' own command."""
    pytest.importorskip("ray", reason="Ray is not installed")
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    port = free_port()
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE.parents[1] / "src"))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    start = (
        "start",
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--num-cpus=4",
        "--disable-usage-stats",
    )
    subprocess.run([*ray, *start, "--include-dashboard=false"], check=True, capture_output=True, timeout=120)
    yield
    subprocess.run([*ray, "stop"], check=True, capture_output=True, timeout=120)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_replicas_behind_one_port(folder, cluster):
    from openai import NotFoundError, OpenAI

    port = free_port()
    command = [sys.executable, str(EXAMPLE), str(folder), "--replicas=2", "--device=cpu", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert any("2 replicas are ready" in line for line in server.stdout)
            with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
                options = {"model": folder.name, "prompt": "hello", "temperature": 0, "max_tokens": 60}
                texts = {client.completions.create(**options).choices[0].text for _ in range(6)}
                assert len(texts) == 1, "copies of one model"
                with pytest.raises(NotFoundError, match="no model is named other"):
                    client.completions.create(**options | {"model": "other"})
                stream = client.completions.create(**options, stream=True)
                text = next(stream).choices[0].text
                server.send_signal(signal.SIGTERM)
                assert text + "".join(event.choices[0].text for event in stream) in texts, "what runs may end"
            assert server.wait(60) == 0
        finally:
            server.kill()
