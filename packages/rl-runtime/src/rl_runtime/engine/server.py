"""Starts one SGLang server: `python -m rl_runtime.engine.server --model-path DIR --port P ...`.

Every argument is SGLang's own, and on a GPU so is the start. With `--device cpu` the same stock
server runs on a plain CPU and starts faster: layers use native torch operations, processes are
forked, only the served model's module is imported, attention runs over whole batches
(`engine.cpu_attention`), and the flags in `CPU_DEFAULTS` are added unless they are given.

Invariants: the server dies with its parent, and its children with it; what it leaves behind is
removed (`engine.janitor`); it refuses to start when the plugin of rl-topp, which records nuclei,
did not apply every hook; neither torch nor SGLang is imported before `main` runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from rl_runtime.engine.janitor import Janitor, start_janitor
from rl_runtime.process.process_tree import die_with_parent

if TYPE_CHECKING:
    from rl_runtime.engine.sglang_calls import Hooks, KillProcessTree, PortArgs

__all__ = [
    "CPU_DEFAULTS",
    "PARENT_VARIABLE",
    "SCRATCH_VARIABLE",
    "cpu_arguments",
    "cpu_environment",
    "main",
]

P = ParamSpec("P")

CPU_DEFAULTS: dict[str, str | None] = {
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--dtype": "float32",
    "--mem-fraction-static": "0.1",
    "--max-total-tokens": "65536",
    "--disable-cuda-graph": None,
    "--skip-server-warmup": None,
    "--sleep-on-idle": None,
}
"""Flags added to a CPU server where they are not given; None marks a switch without a value.

Without `--sleep-on-idle` an idle server keeps a core busy.
"""

PARENT_VARIABLE = "RL_ENGINE_PARENT_PID"
"""Environment variable that holds the process id of the process that starts the server."""

SCRATCH_VARIABLE = "RL_ENGINE_SCRATCH"
"""Environment variable that names a folder which is removed when the server is gone."""

_ALWAYS_IMPORTED = frozenset({"registry", "utils", "transformers"})
"""Modules of `sglang.srt.models` that do not belong to one architecture."""


def main(arguments: Sequence[str]) -> None:
    """Start the server and serve until it is told to stop.

    Args:
        arguments: SGLang's server arguments, such as `["--model-path", "DIR", "--port", "21000"]`.

    Raises:
        RuntimeError: the plugin of rl-topp did not apply its hooks.
        SystemExit: the parent is dead already.
    """
    # SGLang's children ask the kernel for the same, so that none outlives this process; without the
    # variable, whoever starts it by hand is the parent.
    die_with_parent(signal.SIGKILL, int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    scratch = os.environ.get(SCRATCH_VARIABLE)
    janitor = start_janitor(Path(scratch) if scratch else None)
    on_cpu = _value_of("--device", arguments) == "cpu"
    if on_cpu:
        os.environ.update(cpu_environment(Path(_value_of("--model-path", arguments) or "")))
        arguments = cpu_arguments(arguments)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rl_topp.sglang.plugin import require_installed

    load_plugins()
    require_installed()
    hooks: Hooks = HookRegistry
    hooks.register(
        "sglang.srt.server_args.PortArgs.init_new",
        partial(_tell_of_load_file, janitor),
        HookType.AROUND,
    )
    if on_cpu:
        from rl_runtime.engine import cpu_attention

        cpu_attention.install()
        hooks.register(
            "sglang.srt.entrypoints.engine._set_envs_and_config", _then_fork, HookType.AROUND
        )
    hooks.apply_hooks()
    if on_cpu:
        # The forked scheduler needs the registry; imported here, the parent pays for it once.
        importlib.import_module("sglang.srt.models.registry")

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    launch: Callable[[object], None] = launch_server
    prepare: Callable[[list[str]], object] = prepare_server_args
    kill: KillProcessTree = kill_process_tree
    try:
        launch(prepare(list(arguments)))
    finally:
        kill(os.getpid(), include_parent=False)


def cpu_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with every flag of `CPU_DEFAULTS` that they lack.

    Example:
        `--port 1` becomes `--port 1 --attention-backend torch_native ...`; a given
        `--dtype bfloat16` stays.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    added = [
        argument
        for flag, value in CPU_DEFAULTS.items()
        if flag not in given
        for argument in ((flag,) if value is None else (flag, value))
    ]
    return [*arguments, *added]


def cpu_environment(model_path: Path) -> dict[str, str]:
    """Return the environment variables of a CPU server.

    Args:
        model_path: HF folder; `model_type` of its `config.json` decides which model modules are
            imported. A type that no module is named after leaves all of them in: a slower start,
            never a missing model.
    """
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    modules = _model_modules()
    config = model_path / "config.json"
    model_type = (
        str(json.loads(config.read_text(encoding="utf-8")).get("model_type", ""))
        if config.is_file()
        else ""
    )
    if model_type in modules:
        skipped = sorted(modules - _ALWAYS_IMPORTED - {model_type})
        environment["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(skipped)
    return environment


def _tell_of_load_file(
    janitor: Janitor, original: Callable[P, PortArgs], *args: P.args, **kwargs: P.kwargs
) -> PortArgs:
    """Run SGLang's choice of addresses, and have its load file removed at the end."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    addresses = original(*args, **kwargs)
    janitor.remove_later(Path(shm_path_for(addresses.instance_id)))
    return addresses


def _then_fork(original: Callable[[object], None], server_args: object) -> None:
    """Run SGLang's own process set-up, then switch its start method from spawn to fork.

    Torch and SGLang are then imported once, not three times, and without a GPU no CUDA context can
    break.
    """
    import multiprocessing

    original(server_args)
    multiprocessing.set_start_method("fork", force=True)


def _model_modules() -> set[str]:
    """Return the module names of `sglang.srt.models` without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "sglang is not installed in this environment: install rl-runtime with its dependencies"
        )
    folder = Path(spec.origin).parent / "srt" / "models"
    return {module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg}


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value of a flag given as `--flag value` or `--flag=value`, or None."""
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
