"""Headless Chromium over its debugging protocol: pages as a person sees them, on any screen, light or dark.

Nothing is installed for it: `websockets` comes with Prefect, and Chromium from the system's packages.
"""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",  # of root, in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]
START_S = 60  # on a busy machine
PHONE, LAPTOP = 390, 1280  # widths in CSS pixels

# Text outside its picture is cut off by it.
CLIPPED_LABELS = """
[...document.querySelectorAll('svg.chart')].filter(svg => svg.getClientRects().length).flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);
})
"""


class Page:
    """One tab."""

    def __init__(self, socket) -> None:
        self._socket, self._ids = socket, itertools.count(1)

    def call(self, method: str, **parameters) -> dict:
        """One command of the protocol."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(timeout=60))).get("id") != number:
            pass  # events
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, url: str, *, width: int, dark: bool = False) -> None:
        """Load a page on a screen of this width."""
        phone = width <= 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str):
        """The value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def result_of(self, promise: str):
        """The value that a JavaScript promise comes to."""
        answer = self.call("Runtime.evaluate", expression=promise, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never: {condition}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.2)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """whole: all of the page, not only what the screen shows."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browser(folder: Path, *flags: str):
    """A Page of a new Chromium with its profile in `folder` and more `flags`; skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    from websockets.sync.client import connect

    process = subprocess.Popen(
        [program, *FLAGS, *flags, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline and process.poll() is None, "chromium did not start"
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as listed:
            target = next(tab for tab in json.load(listed) if tab["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait()
