"""Drive a headless Chromium through chromedriver's HTTP interface.

The standard library is enough for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEADLINE_SECONDS = 60.0
PYTHON = (3, 12)
"""The Python whose test runs try the page, which is the same on all; CI always has this one."""
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def require() -> None:
    """Skip the test where there is no browser; fail it where CI is set, which has to bring one.

    On another Python than `PYTHON` it is skipped always.
    """
    if sys.version_info[:2] != PYTHON:
        # Without the browser's name, by which CI tells that it is missing.
        pytest.skip("the page is tried in a browser on Python {}.{} only".format(*PYTHON))
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"no {' and no '.join(missing)}; `apt-get install chromium chromium-driver`")


class Browser:
    def __init__(self, base: str) -> None:
        self._base = base

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path, fragment: str = "") -> None:
        self.call("/url", {"url": "about:blank"})
        self.call("/url", {"url": page.resolve().as_uri() + fragment})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of an async function in the page and return what it returns."""
        wrapped = (
            f"const done = arguments[arguments.length - 1]; (async (...args) => {{ {script}"
            " })(...arguments).then(done, (e) => done('ERROR ' + e.stack));"
        )
        value = self.call("/execute/async", {"script": wrapped, "args": list(arguments)})
        assert not (isinstance(value, str) and value.startswith("ERROR ")), value
        return value


@contextlib.contextmanager
def browser(folder: Path, *, width: int = 1400, height: int = 900) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    with (folder / "chromedriver.log").open("w") as log:
        process = subprocess.Popen(
            ["chromedriver", f"--port={port}", "--allowed-ips=127.0.0.1"], stdout=log, stderr=log
        )
    try:
        _wait(base)
        options = {
            "args": [
                *_FLAGS,
                f"--window-size={width},{height}",
                f"--user-data-dir={folder / 'profile'}",
            ],
            "binary": shutil.which("chromium"),
        }
        capabilities = {
            "alwaysMatch": {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "timeouts": {"script": 30000},
            }
        }
        session = Browser(base).call("/session", {"capabilities": capabilities})["sessionId"]
        try:
            yield Browser(f"{base}/session/{session}")
        finally:
            request = urllib.request.Request(f"{base}/session/{session}", method="DELETE")
            urllib.request.urlopen(request, timeout=DEADLINE_SECONDS).close()
    finally:
        process.terminate()
        process.wait(10)


def _wait(base: str) -> None:
    limit = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < limit:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{base}/status", timeout=5).close()
            return
        time.sleep(0.05)
    raise TimeoutError("chromedriver did not start")
