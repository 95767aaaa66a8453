"""A server on a port of this machine, for a tiny model with a tokenizer of letters."""

import json
import threading
import time
from http.client import HTTPConnection

import uvicorn
from tests.models import zoo

from tilewright import Engine
from tilewright.serve import create_app

KEY = "secret"


class Letters:
    """A tokenizer of one letter a token, with a chat template."""

    chat_template = "as below"

    def __call__(self, text):
        return {"input_ids": [ord(letter) % zoo.VOCABULARY for letter in text]}

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(97 + token % 26) for token in tokens)

    def apply_chat_template(self, messages, tools, add_generation_prompt, return_dict, **options):
        if any(message["role"] == "unknown" for message in messages):
            raise ValueError("roles are user and assistant")
        text = "".join(f"{message['role']}:{message['content']};" for message in messages) + ("T" if tools else "")
        return self(text)


def engine_of(**sizes):
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Engine(model, Letters(), **{"max_batch": 8, "page_size": 4, "max_context": 128} | sizes)


class Running:
    """The application on a port of this machine, in a thread."""

    def __init__(self, engine, **options):
        self.engine = engine
        config = uvicorn.Config(create_app(engine, "tiny", **options), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, path, body=None, key=KEY, method=None, headers=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} | (headers or {})
        connection.request(method or ("GET" if body is None else "POST"), path, data, own)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()
