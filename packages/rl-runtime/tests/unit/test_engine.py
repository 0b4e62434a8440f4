"""Arguments, ports and processes of an engine, without SGLang."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.config.recipe import Recipe
from rl_runtime.engine import process as engine_module
from rl_runtime.engine.process import EngineProcess, server_arguments
from rl_runtime.engine.server import CPU_DEFAULTS, cpu_arguments, cpu_environment
from rl_runtime.errors import DeadlineError, EngineError, RuntimeSetupError
from rl_runtime.process.ports import check_port_free, choose_port


def recipe(**sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(sections)


def arguments(**sections: dict[str, Any]) -> list[str]:
    return server_arguments(recipe(**sections), index=1, port=21000, model_folder=Path("m"))


def test_importing_the_engine_modules_loads_no_torch() -> None:
    code = (
        "import sys, rl_runtime.engine.process, rl_runtime.engine.client,"
        " rl_runtime.engine.server; print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout.strip()
        == "False"
    )


def test_arguments_of_a_cpu_engine() -> None:
    assert arguments(run={"rng": 3}) == shlex.split(
        "--model-path m --host 127.0.0.1 --port 21000 --weight-version 0 --random-seed 3000010"
        " --dtype float32 --max-total-tokens 65536 --log-level-http warning --device cpu"
    )


def test_a_gpu_engine_names_its_tensor_ranks_and_no_device() -> None:
    found = arguments(engine={"gpus_per_engine": 2})
    assert found[-2:] == ["--tp-size", "2"]
    assert "--device" not in found


def test_the_sglang_table_wins_and_becomes_flags() -> None:
    found = arguments(
        sglang={
            "page_size": 16,
            "disable_radix_cache": True,
            "log_requests": False,
            "cuda_graph_bs": [1, 8],
            "random_seed": 5,
        }
    )
    assert " ".join(found).endswith(
        "--random-seed 5 --dtype float32 --max-total-tokens 65536 --log-level-http warning --device"
        " cpu --page-size 16 --disable-radix-cache --cuda-graph-bs 1 8"
    )


def test_cpu_defaults_are_added_only_where_nothing_is_given() -> None:
    found = cpu_arguments(["--dtype=bfloat16", "--sleep-on-idle"])
    assert found[:2] == ["--dtype=bfloat16", "--sleep-on-idle"]
    assert found.count("--sleep-on-idle") == 1
    assert "--dtype" not in found
    assert set(CPU_DEFAULTS) - set(found) == {"--dtype"}


def test_only_the_served_models_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    skipped = cpu_environment(tmp_path)["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert {"llama", "qwen2"} <= set(skipped)
    assert not {"qwen3", "registry", "utils"} & set(skipped)


@pytest.mark.parametrize("config", ['{"model_type": "no_such_model"}', "{}", None])
def test_an_unknown_model_type_skips_no_module(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert cpu_environment(tmp_path) == {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_a_taken_port_is_named() -> None:
    port = choose_port("127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(RuntimeSetupError, match=f"port {port} on 127.0.0.1 cannot be used"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_a_port_that_sglang_cannot_use_is_refused() -> None:
    with pytest.raises(RuntimeSetupError, match="port 60000 is too high for SGLang"):
        check_port_free("127.0.0.1", 60000)


def test_chosen_ports_are_free_and_below_the_ephemeral_range() -> None:
    ports = {choose_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 15
    assert all(20_000 <= port < 32_000 for port in ports)


# Processes: a small program stands for the server
# ---------------------------------------------------------------------------------------

FAMILY = """
    import http.server, os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    {then}
"""
SERVE = """
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_response(200); self.end_headers()
        do_POST = do_GET
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


Stub = Callable[..., EngineProcess]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    """Make `EngineProcess` start a program of ours instead of the SGLang launcher."""
    (tmp_path / "config.json").write_text("{}")

    def make(then: str, **section: Any) -> EngineProcess:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(FAMILY).replace("{then}", textwrap.dedent(then)))
        start_kept = engine_module._start_kept
        monkeypatch.setattr(
            engine_module,
            "_start_kept",
            lambda command, log, environment: start_kept(
                [sys.executable, str(program), *command[3:]], log, environment
            ),
        )
        return EngineProcess(
            recipe(engine=section, run={"dir": tmp_path}), index=0, model_folder=tmp_path
        )

    return make


def child_of(tmp_path: Path) -> int:
    return int((tmp_path / "logs" / "engine_0.log").read_text().split()[1])


def is_alive(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stop_kills_the_whole_family_and_removes_its_files(stub: Stub, tmp_path: Path) -> None:
    engine = stub(SERVE)
    engine.start()
    scratch = engine._scratch
    assert scratch is not None
    child = child_of(tmp_path)
    assert engine.poll() is None and engine.failure() is None
    assert is_alive(child) and scratch.is_dir()
    engine.stop()
    assert not is_alive(child) and not scratch.exists()
    assert engine.poll() == -signal.SIGKILL
    engine.stop()


def test_a_killed_server_is_told_by_its_exit_code(stub: Stub, tmp_path: Path) -> None:
    engine = stub(SERVE)
    engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while engine.failure() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    failure = engine.failure()
    assert failure is not None
    assert f"engine 0 ({engine.url}, pid {engine.pid}) ended with exit code -9" in failure
    engine.stop()
    assert not is_alive(child_of(tmp_path)), "its children are killed even when it is dead already"


def test_a_server_that_ends_early_quotes_its_log(stub: Stub, tmp_path: Path) -> None:
    engine = stub('print("no such weights"); sys.exit(3)')
    with pytest.raises(
        EngineError,
        match=(
            r"(?s)engine 0 ended with exit code 3 before it answered; end of .*engine_0.log:\n.*no"
            r" such weights"
        ),
    ):
        engine.start()
    assert not is_alive(child_of(tmp_path))


def test_a_server_that_never_answers_is_stopped_at_its_deadline(stub: Stub, tmp_path: Path) -> None:
    engine = stub('print("thinking", flush=True); time.sleep(600)', start_timeout_seconds=2)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"(?s)start_timeout_seconds = 2; end of .*thinking"):
        engine.start()
    assert time.monotonic() - started < 10
    assert not is_alive(engine.pid) and not is_alive(child_of(tmp_path))


def test_a_server_outlives_the_thread_that_started_it(stub: Stub) -> None:
    """The kernel's signal follows the starting thread; actors start engines from pool threads."""
    engine = stub(
        "import ctypes, signal\nctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
        + textwrap.dedent(SERVE)
    )
    thread = threading.Thread(target=engine.start)
    thread.start()
    thread.join(60)
    time.sleep(0.5)
    assert engine.poll() is None
    engine.stop()


def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    engine = EngineProcess(recipe(run={"dir": tmp_path}), index=0, model_folder=tmp_path)
    with pytest.raises(RuntimeSetupError, match=r"config\.json cannot be read"):
        engine.start()
    assert engine.pid is None


def test_a_fixed_port_that_is_taken_is_refused(stub: Stub) -> None:
    with socket.socket() as listener:
        port = choose_port("127.0.0.1")
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(RuntimeSetupError, match=f"port {port} on 127.0.0.1"):
            stub(SERVE, port=port).start()
