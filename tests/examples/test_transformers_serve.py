"""`transformers serve` with our attention in its continuous batching: the tokens of `generate`."""

import runpy
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.engine.letters import letters
from tests.models import zoo

from tilewright.models import transformers_names

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_serve.py"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server's port, its model as it is loaded, and what transformers calls it."""
    for package in ("accelerate", "psutil"):  # transformers loads a model to a named device, and asks for its memory
        pytest.importorskip(package, reason=f"{package} is not installed")
    if not transformers_names.takes_paged_names():
        pytest.skip("this release of transformers takes no names of others for paged attention")
    from transformers.cli import serve
    from transformers.cli.serving import model_manager

    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    monkeypatch.setattr(model_manager, "ModelManager", runpy.run_path(str(EXAMPLE))["PatchedModels"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cache = {"cb_block_size": 32, "cb_num_blocks": 64, "cb_max_batch_tokens": 64}

    class Server(serve.Serve):
        def start_server(self):  # theirs leaves its event loop open
            self._thread = threading.Thread(target=self.server.run)
            self._thread.start()

    server = Server(
        str(tmp_path), continuous_batching=True, device="cpu", host="127.0.0.1", port=port, non_blocking=True, **cache
    )
    while not server.server.started:
        time.sleep(0.01)
    (loaded,) = server._model_manager.loaded_models.values()
    yield port, loaded.model, str(tmp_path)
    server.kill_server()


def test_greedy_tokens(served):
    from openai import OpenAI

    port, model, name = served
    ids = torch.tensor([letters()("hello")["input_ids"]])
    tokens = zoo.build("llama").generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(model=name, prompt="hello", max_tokens=12, temperature=0)
    assert answer.choices[0].text == letters().decode(tokens[0, ids.shape[1] :])
    assert model.config._attn_implementation == "paged|tilewright"
