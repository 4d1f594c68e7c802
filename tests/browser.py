"""A browser without a window, spoken to through a pipe by its own protocol (Chrome DevTools Protocol), with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(FOUND is None, reason=f"no browser is installed: none of {', '.join(NAMES)} is on the PATH")

# The middle of an element, in pixels of the window.
PLACE = "(e => { const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2] })"


class Page:
    """One tab of a running browser.

    Attributes:
        errors: what its console, its security policy and its uncaught exceptions complained of. requests: addresses it asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Asks for one thing of the protocol and waits for its answer."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, path: Path) -> None:
        """Opens a file and waits until it has loaded, its script included."""
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._note(self._read())

    def run(self, script: str) -> Any:
        """The value of an expression in the page, as JSON gives it; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def frame(self) -> None:
        """Waits until what was asked for has been drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def hover(self, element: str) -> None:
        """Moves the mouse onto the middle of an element, given as an expression."""
        x, y = self.run(f"{PLACE}({element})")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.frame()

    def click(self, element: str) -> None:
        """Clicks with the mouse in the middle of an element, given as an expression."""
        x, y = self.run(f"{PLACE}({element})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frame()

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key, named as in `KeyboardEvent.key`."""
        for _ in range(times):
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def write(self, text: str) -> None:
        """Writes text into what has the focus."""
        self.call("Input.insertText", text=text)
        self.frame()

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Gives the page that many pixels, and a light or dark scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.frame()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Takes a picture of what is in sight, or of the whole page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def _send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._to, data) :]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser is gone"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        self._events.append(event)
        if method == "Runtime.exceptionThrown":
            self.errors.append(values["exceptionDetails"]["text"] + str(values["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(str(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser that keeps what it writes in a folder; closed at the end."""
    assert FOUND is not None
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()
    # The browser reads commands from its descriptor 3 and writes answers to 4; a shell puts them there.
    script = f'exec "$@" 3<&{command_in} 4>&{answer_out}'
    options = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", FOUND, *options],
        pass_fds=(command_in, answer_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder), "LC_ALL": "C.UTF-8", "TZ": "UTC"},
    )
    os.close(command_in)
    os.close(answer_out)
    try:
        yield Page(command_out, answer_in)
    finally:
        os.close(command_out)  # by which it is told to end
        os.close(answer_in)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
