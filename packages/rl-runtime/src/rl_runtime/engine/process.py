"""One SGLang server as a process of its own: started, watched, stopped.

Invariants: the server has its own session, so that `stop` reaches every process of it; it dies when
this process does; what it leaves behind is removed either way (`engine.janitor`); every wait has a
deadline; an error quotes the end of the server's log.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from rl_runtime.config.recipe import Recipe
from rl_runtime.engine.server import PARENT_VARIABLE, SCRATCH_VARIABLE
from rl_runtime.errors import DeadlineError, EngineError
from rl_runtime.megatron.shape import read_model_config
from rl_runtime.process.ports import check_port_free, choose_port

__all__ = ["EngineProcess", "server_arguments"]

_POLL_SECONDS = 0.1
_LOG_TAIL_LINES = 15
_STOP_SECONDS = 10.0
"""For killed processes to disappear."""


class EngineProcess:
    """One server, with all of its processes.

    Example:
        >>> engine = EngineProcess(recipe, index=0, model_folder=Path("runs/a/warm_start"))
        >>> engine.start()  # returns when the server answers: 12 to 60 seconds
        >>> engine.url
        'http://127.0.0.1:21370'
        >>> engine.stop()
    """

    def __init__(self, recipe: Recipe, *, index: int, model_folder: Path) -> None:
        """Remember what to start.

        Args:
            recipe: sections `[engine]`, `[model]`, `[run]` and `[sglang]` are read.
            index: number of the engine, from 0; names its log, `logs/engine_<index>.log` in the
                run's folder, and, with a fixed `engine.port`, its port.
            model_folder: HF folder that the server loads.
        """
        self._recipe = recipe
        self._index = index
        self._model_folder = model_folder
        self._log_path = recipe.run.dir / "logs" / f"engine_{index}.log"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None

    @property
    def url(self) -> str:
        """Base URL, such as "http://127.0.0.1:21370"; a port is chosen by `start`."""
        return f"http://{self._recipe.engine.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Id of the server's first process, which is its process group; None before `start`."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return the server's exit code; None while it lives or was never started.

        Negative: the signal that killed it.
        """
        return None if self._process is None else self._process.poll()

    def failure(self) -> str | None:
        """Say in one line why the server is dead; None while it lives or was never started."""
        code = self.poll()
        return (
            None
            if code is None
            else (
                f"engine {self._index} ({self.url}, pid {self.pid}) ended with exit code {code};"
                f" its log is {self._log_path}"
            )
        )

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            RuntimeSetupError: the port is taken, or the folder does not hold a model.
            EngineError: the server ended before it answered; quotes the end of its log.
            DeadlineError: it did not answer within `engine.start_timeout_seconds`; it is stopped,
                and the end of its log is quoted.
        """
        section = self._recipe.engine
        # Refused here, and not by a server that ends a minute later.
        read_model_config(self._model_folder)
        self._port = section.port + self._index if section.port else choose_port(section.host)
        check_port_free(section.host, self._port)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        # SGLang leaves its socket files where tempfile puts them; a short path, for a socket's may
        # have 107 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="rl_engine_"))
        arguments = server_arguments(
            self._recipe, index=self._index, port=self._port, model_folder=self._model_folder
        )
        command = [sys.executable, "-m", "rl_runtime.engine.server", *arguments]
        self._process = _start_kept(command, self._log_path, _environment(self._scratch))
        try:
            self._wait_until_healthy(time.monotonic() + section.start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        # SGLang collects garbage at each flush: 0.3 s on a CPU unless what its imports made is left
        # out.
        httpx.post(
            f"{self.url}/freeze_gc", timeout=section.request_timeout_seconds
        ).raise_for_status()

    def stop(self) -> None:
        """Kill every process of the server and remove what it left behind.

        Does nothing where no server was started. There is nothing to finish: a server holds no
        state that outlives it.

        Raises:
            DeadlineError: some process is still there after 10 seconds.
        """
        if self._process is None:
            return
        group = self._process.pid
        deadline = time.monotonic() + _STOP_SECONDS
        while members := _group_members(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"engine {self._index}: processes {members} are still there"
                    f" {_STOP_SECONDS:g} s after they were killed"
                )
            time.sleep(_POLL_SECONDS)
        if self._scratch is not None:
            # The janitor does it too, if the server lived long enough to start one.
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _wait_until_healthy(self, deadline: float) -> None:
        """Poll the health endpoint until it says yes."""
        while True:
            code = self.poll()
            if code is not None:
                raise EngineError(
                    f"engine {self._index} ended with exit code {code} before it answered; end of"
                    f" {self._log_path}:\n{self._log_tail()}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == httpx.codes.OK:
                    return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"engine {self._index} did not answer at {self.url} within"
                    " engine.start_timeout_seconds ="
                    f" {self._recipe.engine.start_timeout_seconds:g}; end of"
                    f" {self._log_path}:\n{self._log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _log_tail(self) -> str:
        """Return the last lines of the server's log."""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-_LOG_TAIL_LINES:])


def server_arguments(recipe: Recipe, *, index: int, port: int, model_folder: Path) -> list[str]:
    """Return the arguments of `rl_runtime.engine.server` for one engine.

    The table `[sglang]` comes last and so wins; false leaves a switch out.

    Example:
        `page_size = 16`, `disable_radix_cache = true` and `cuda_graph_bs = [1, 8]` become
        `--page-size 16 --disable-radix-cache --cuda-graph-bs 1 8`.
    """
    section = recipe.engine
    settings: dict[str, Any] = {
        "model_path": model_folder,
        "host": section.host,
        "port": port,
        "weight_version": 0,
        "random_seed": (1_000_003 * recipe.run.rng + index) % 2**31,
        "dtype": recipe.model.dtype,
        "max_total_tokens": section.max_total_tokens,
        "log_level_http": "warning",
    }
    settings |= (
        {"tp_size": section.gpus_per_engine} if section.gpus_per_engine else {"device": "cpu"}
    )
    settings |= recipe.sglang
    arguments: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments += [flag] if value else []
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)]
        else:
            arguments += [flag, str(value)]
    return arguments


def _start_kept(
    command: list[str], log_path: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process from a thread that waits for it.

    The server asks the kernel to be killed when its parent ends, and the kernel means the thread
    that started it: started from a worker thread of an actor it would die with that thread, in the
    middle of a run.
    """
    started: queue.SimpleQueue[subprocess.Popen[bytes] | BaseException] = queue.SimpleQueue()

    def keep() -> None:
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
        except BaseException as error:
            started.put(error)
            return
        started.put(process)
        process.wait()

    threading.Thread(target=keep, name=f"keeps {log_path.stem}", daemon=True).start()
    result = started.get(timeout=60.0)
    if isinstance(result, BaseException):
        raise result
    return result


def _environment(scratch: Path) -> dict[str, str]:
    """Return the environment of a server."""
    return {
        **os.environ,
        # One thread for each of the server's processes: the trainers need the other cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # /health then tells whether the server is up, without generating a token and sleeping a
        # second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "TMPDIR": str(scratch),
        SCRATCH_VARIABLE: str(scratch),
        PARENT_VARIABLE: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
    }


def _group_members(group: int) -> list[int]:
    """Return the live processes of a process group, without those that wait to be reaped."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members
