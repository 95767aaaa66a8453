"""What people look at: the chat page against a running server, in Node with a small DOM, and the dashboard."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.serve.running import KEY, Running, engine_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running():
    running = Running(engine_of(), api_key=KEY)
    yield running
    running.close()


# The page's elements that its script asks for, and a user who sends two messages, the second after an answer
DOM = """
const element = () => ({ children: [], handlers: {}, dataset: {}, value: "", textContent: "", disabled: false,
  append(child) { this.children.push(child) },
  addEventListener(kind, handler) { this.handlers[kind] = handler },
  requestSubmit() { this.sent = this.handlers.submit({ preventDefault() {} }) } })
const elements = {}
globalThis.document = { createElement: element, getElementById: (id) => elements[id] ??= element() }
const [url, hash, ...texts] = process.argv.slice(2)
globalThis.location = { hash }
const fetched = globalThis.fetch
globalThis.fetch = (path, options) => fetched(url + path, options)
const page = await (await fetch("")).text()
const script = page.match(/<script>([^]*)<\\/script>/)[1]
for (const id of script.matchAll(/getElementById\\("(\\w+)"\\)/g)) if (!page.includes(`id="${id[1]}"`)) throw id[1]
new Function(script)()
for (const text of texts) {
  elements.text.value = text
  elements.text.handlers.keydown({ key: "Enter", shiftKey: false, preventDefault() {} })
  await elements.form.sent
}
console.log(JSON.stringify(elements.chat.children.map((turn) => [turn.className, turn.textContent])))
"""


def chatted(running, tmp_path, hash_text, *texts):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    (tmp_path / "page.mjs").write_text(DOM)
    command = [node, str(tmp_path / "page.mjs"), f"http://127.0.0.1:{running.port}/", hash_text, *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_until_its_context_is_full(running, tmp_path):
    turns = chatted(running, tmp_path, f"#key={KEY}", "hello", "  ", "<b>again</b>")
    assert [kind for kind, _ in turns] == ["user", "assistant", "user", "error"], "blanks are not sent"
    assert (turns[0][1], turns[2][1]) == ("hello", "<b>again</b>")
    assert len(turns[1][1]) == 128 - len("user:hello;"), "a letter for each token that there is room for"
    assert "exceed the 128" in turns[3][1]


def test_an_error_is_shown_as_one(running, tmp_path):
    turns = chatted(running, tmp_path, "#key=wrong", "hello")
    assert [kind for kind, _ in turns] == ["user", "error"]
    assert "the API key is missing or wrong" in turns[1][1]


def test_the_dashboard_shows_what_is_exported_and_all_of_it(running):
    code, text = running.ask("/metrics")
    assert code == 200
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) - set(re.findall(r"\S+_created", text))
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    shown = {
        name for panel in panels for its in panel["targets"] for name in re.findall(r"tilewright_\w+", its["expr"])
    }
    assert {name.removesuffix("_bucket") for name in shown} == exported
    assert len({panel["id"] for panel in panels}) == len(panels)
