"""The chat page in headless Chromium, against a running server with a key."""

import pytest
from tests.serve import chromium
from tests.serve.running import KEY, Running, engine_of

TURNS = '[...document.querySelectorAll("#chat div")].map((turn) => [turn.className, turn.textContent])'


@pytest.fixture(scope="module")
def running():
    running = Running(engine_of(), api_key=KEY)
    yield running
    running.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    browser = chromium.find()
    if browser is None:
        pytest.skip("needs headless Chromium: apt-get install chromium-headless-shell")
    page = chromium.Page(browser, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


def send(page, text):
    """Type a message, Enter, and return the turns when the answer has ended."""
    before = page.value(f"{TURNS}.length")
    page.type(text)
    page.press_enter()
    page.wait(
        f'document.querySelectorAll("#chat div").length === {before + 2} && !document.querySelector("button").disabled'
    )
    return page.value(TURNS)


def opened(page, running, key):
    page.open(f"http://127.0.0.1:{running.port}/#key={key}")
    page.wait('document.activeElement.id === "text"')  # one may type at once; the focus comes behind the load


def test_a_chat_until_its_context_is_full(running, page):
    opened(page, running, KEY)
    turns = send(page, "hello")
    assert [kind for kind, _ in turns] == ["user", "assistant"] and turns[0][1] == "hello"
    assert len(turns[1][1]) == 128 - len("user:hello;"), "a letter for each token that there is room for"
    assert page.value("document.documentElement.scrollWidth <= innerWidth"), "a long word does not widen the page"
    turns = send(page, "<b>again</b><img src=x onerror=alert(1)>")
    assert [kind for kind, _ in turns[2:]] == ["user", "error"]
    assert turns[2][1].startswith("<b>again</b>") and "exceed the 128" in turns[3][1]
    assert page.value('document.querySelectorAll("#chat b, #chat img").length') == 0, "text, never HTML"
    assert page.value("document.activeElement.id + text.value") == "text", "empty, and still in focus"
    assert [error for error in page.errors if "400" not in error] == []


def test_lines_blanks_and_a_wrong_key(running, page):
    opened(page, running, "wrong")
    page.type(" ")
    page.press_enter()
    assert page.value(TURNS) == [], "blanks are not sent"
    page.value('text.value = ""')
    page.type("one")
    page.press_enter(shift=True)
    turns = send(page, "two")
    assert turns[0] == ["user", "one\ntwo"] and turns[1][0] == "error" and "the API key is" in turns[1][1]


def test_pieces_are_shown_as_they_come(running, page):
    page.open(f"http://127.0.0.1:{running.port}/#key={KEY}")
    page.value("""
        globalThis.lengths = new Set()
        new MutationObserver(() => lengths.add(chat.lastChild.textContent.length))
            .observe(chat, { childList: true, subtree: true, characterData: true })""")
    turns = send(page, "go")
    assert page.value("lengths.size") > 5, "the answer grew"
    assert page.value("Math.max(...lengths)") == len(turns[1][1])
