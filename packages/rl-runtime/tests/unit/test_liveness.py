"""What is said of a dead actor is one line that names its process and its end."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_runtime.errors import ActorError

ray = pytest.importorskip("ray")

from ray.exceptions import RayActorError  # noqa: E402

from rl_runtime.cluster.liveness import Liveness, why_it_died  # noqa: E402

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainerActor
\tactor_id: 1b01e8ec1d1c8d2c1b5d5a5c01000000
\tpid: 4711
\tnamespace: 5a1f
\tip: 127.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some \
potential root causes. (1) The process is killed by SIGKILL by OOM killer."""


def test_the_end_of_a_process_is_condensed_to_one_line() -> None:
    assert (
        why_it_died(RayActorError(error_msg=DIED))
        == "(pid 4711) Worker unexpectedly exits with a connection error code 2"
    )


def test_what_has_another_form_is_quoted_in_one_line() -> None:
    assert why_it_died(RayActorError(error_msg="The actor\n is   gone.")) == "The actor is gone."


def test_a_dead_daemon_is_named(tmp_path: Path) -> None:
    process = psutil.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    liveness = Liveness({}, daemons=[process], logs=tmp_path)
    liveness.check()
    process.kill()
    process.wait(10)
    with pytest.raises(ActorError, match=rf"Ray's .* \(pid {process.pid}\) died.*{tmp_path}"):
        liveness.check()
    process.stdin.close()


def test_what_keeps_ray_off_the_terminal_is_still_there() -> None:
    """The run replaces this function, which Ray calls for every line that it would print."""
    from ray._private import worker

    assert callable(worker.print_worker_logs)
