"""A stock SGLang server on the CPU as a process of its own, for the tests that ask it."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["START_SECONDS", "Params", "Server", "running"]

START_SECONDS = 500
LAUNCHER = Path(__file__).parent / "sglang_cpu_server.py"
Params = Mapping[str, Any]
"""Sampling parameters of a request."""


class Server:
    def __init__(self, folder: Path, log: Path, *arguments: str, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            LAUNCHER,
            "--model-path",
            folder,
            "--skip-tokenizer-init",
            "--port",
            self.port,
            *arguments,
        ]
        command += shlex.split(
            "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype"
            " float32 --max-total-tokens 32768 --mem-fraction-static 0.1 --disable-cuda-graph"
            " --skip-server-warmup --sleep-on-idle --random-seed 7"
        )
        self.log = log
        self.overlaps = "--disable-overlap-schedule" not in arguments
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "SGLANG_GRPC_PORT": "1",
                    "TMPDIR": str(log.parent),
                    **environment,
                },
            )

    def wait(self) -> bytes:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                return self.call("model_info")
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.log.read_text()[-3000:]
            )
            time.sleep(0.2)

    def call(self, path: str, body: Params | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return bytes(reply.read())

    def generate(
        self, prompts: Sequence[Any], params: Params | list[dict[str, Any]], **more: Any
    ) -> Any:
        return json.loads(
            self.call(
                "generate",
                {"input_ids": prompts, "sampling_params": params, "return_logprob": True, **more},
            )
        )

    def stop(self) -> None:
        left_behind: set[str] = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(maps.parent.name)) == self.process.pid:
                    left_behind |= set(re.findall(r"/dev/shm/sglang_loads_\S+", maps.read_text()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for path in left_behind:
            Path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def running(folder: Path, log: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """Run a server until the block ends."""
    server = Server(folder, log, *arguments, **environment)
    try:
        server.wait()
        yield server
    finally:
        server.stop()
