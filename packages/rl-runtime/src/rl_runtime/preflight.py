"""Everything that can be known to be wrong before anything starts. Layer: above config.

Invariants: each problem is one line that names the key, what was found and what to do; all problems are reported at once; nothing is started.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

from rl_dump import DumpError, check_templates
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ConfigError
from rl_runtime.rollout.hooks import load_hook

__all__ = ["check_before_start"]


def check_before_start(recipe: Recipe) -> None:
    """Check folders, ports, hooks and dump templates.

    Raises:
        ConfigError: one line per problem.
    """
    problems = [*_run_dir(recipe), *_model(recipe), *_ports(recipe), *_hooks(recipe), *_dumps(recipe)]
    if problems:
        raise ConfigError("\n".join(problems))


def _run_dir(recipe: Recipe) -> Iterator[str]:
    if recipe.run.dir.exists():
        yield f"run.dir = {recipe.run.dir}: exists already: choose another folder, such as --set run.dir={recipe.run.dir}-2, or delete it"


def _model(recipe: Recipe) -> Iterator[str]:
    for key, path in (("model.path", recipe.model.path), ("model.reference_path", recipe.model.reference_path)):
        if path:
            yield from _model_folder(key, Path(path))
    if recipe.debug.load_rollout_dump and not recipe.model.path:
        yield "debug.load_rollout_dump: needs model.path, the folder of the policy that the dump was sampled from (for batch 0 a run's warm_start)"


def _model_folder(key: str, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{key} = {folder}: no such folder: give a folder with config.json, *.safetensors and a tokenizer"
        return
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield f"{key} = {folder}: config.json cannot be read: {error}"
    if not list(folder.glob("*.safetensors")):
        yield f"{key} = {folder}: has no *.safetensors file"


def _ports(recipe: Recipe) -> Iterator[str]:
    if not recipe.engine.port or recipe.engine.url or recipe.debug.load_rollout_dump:
        return
    for port in range(recipe.engine.port, recipe.engine.port + recipe.engine.count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((recipe.engine.host, port))
            except OSError as error:
                yield (
                    f"engine.port = {recipe.engine.port}: {recipe.engine.host}:{port} cannot be used ({error.strerror}): "
                    f"choose another, or 0 to have a free one chosen"
                )


def _hooks(recipe: Recipe) -> Iterator[str]:
    for key, path in (("rollout.generate", recipe.rollout.generate), ("reward.function", recipe.reward.function)):
        if path:
            try:
                load_hook(path)
            except ConfigError as error:
                yield f"{key}: {error}"


def _dumps(recipe: Recipe) -> Iterator[str]:
    run_dir = str(recipe.run.dir)
    templates = [template.replace("{run_dir}", run_dir) or None for template in (recipe.dump.rollout, recipe.dump.train)]
    try:
        check_templates(rollout=templates[0], train=templates[1])
    except DumpError as error:
        yield str(error)
    loaded = recipe.debug.load_rollout_dump.replace("{run_dir}", run_dir)
    if loaded and "{batch_id}" not in loaded and not Path(loaded).is_file():
        yield f"debug.load_rollout_dump = {loaded}: no such file"
