"""A headless Chromium, spoken to over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def program() -> str | None:
    """Debian's smallest Chromium, or any other that is there."""
    for name in ("chromium-headless-shell", "chromium", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


class Browser:
    """One page. What goes wrong on it is kept in ``errors``."""

    def __init__(self, profile: Path, width: int = 1240, height: int = 900) -> None:
        executable = program()
        assert executable is not None
        ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes
        self._write, self._read = ours[1], theirs[0]

        def place() -> None:  # it expects 3 and 4
            first, second = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [executable, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
             "--disable-background-networking", "--hide-scrollbars", "--lang=en",
             f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + 60
        while True:
            said = self._next(until)
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._read, 1 << 20)
            assert got, "the browser has ended"
            self._buffer += got
        one, self._buffer = self._buffer.split(b"\0", 1)
        said = json.loads(one)
        parameters = said.get("params", {})
        if said.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif said.get("method") == "Log.entryAdded":
            if parameters["entry"]["level"] == "error":
                self.errors.append(json.dumps(parameters["entry"]))
        elif said.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(json.dumps(parameters["args"]))
        elif said.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return said

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < until, (expression, self.errors)
            time.sleep(0.05)

    def scheme(self, name: str) -> None:
        """``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        got = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(got["data"]))

    def close(self) -> None:
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
