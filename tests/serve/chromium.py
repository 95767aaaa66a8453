"""A page in headless Chromium, driven by the DevTools protocol over two pipes: JSON texts that end with a zero byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
LAUNCH = """
import os, sys
ends = [os.dup2(int(end), 100 + index) for index, end in enumerate(sys.argv[1:3])]
for number, end in zip((3, 4), ends):  # the browser reads 3 and writes 4
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find():
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page.   errors: what its script threw, and what its console complained of."""

    def __init__(self, browser, profile):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [
            sys.executable,
            "-ISc",
            LAUNCH,
            str(read),
            str(write),
            browser,
            *OPTIONS,
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(read, write), stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(read)
        os.close(write)
        self._numbers, self._rest, self._session = count(1), b"", None
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The answer to a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"]["text"])
            elif answer.get("method") == "Log.entryAdded":
                self.errors.append(answer["params"]["entry"]["text"])

    def _message(self):
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, url):
        """Load a page, and return when its script has run."""
        self.call("Page.navigate", url="about:blank")  # a new hash alone would not load it
        self.call("Page.navigate", url=url)
        self.wait('location.href !== "about:blank" && document.readyState === "complete"')

    def value(self, expression):
        """A JavaScript expression's value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression):
        """Return when an expression is true."""
        deadline = time.monotonic() + 30
        while not self.value(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.01)

    def type(self, text):
        """Characters as a keyboard's, where the focus is."""
        self.call("Input.insertText", text=text)

    def press_enter(self, shift=False):
        """The key Enter, down and up."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self):
        """End the browser and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
