"""Stock SGLang on a plain CPU, forked instead of spawned so that it starts in seconds.

It dies with its parent. Arguments are SGLang's own.
"""

import ctypes
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Any

ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
found = importlib.util.find_spec("sglang")
assert found is not None and found.origin is not None
models = Path(found.origin).parent / "srt" / "models"
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
    module.name
    for module in pkgutil.iter_modules([str(models)])
    if module.name not in ("qwen3", "registry", "utils", "transformers")
)


def main() -> None:
    import sglang.srt.entrypoints.engine as engine
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    set_up = engine._set_envs_and_config

    def set_up_and_fork(server_args: Any) -> None:
        set_up(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_up_and_fork
    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
