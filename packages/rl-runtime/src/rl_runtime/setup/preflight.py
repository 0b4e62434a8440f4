"""Everything that can be known to be wrong before anything starts.

Invariants: each problem is one line that names the key, what was found and what to do; all problems
are reported at once; nothing is started and nothing is written.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from rl_dump import DumpError, check_templates
from rl_runtime.config.library_options import unknown_names
from rl_runtime.config.recipe import Recipe
from rl_runtime.config.run import in_run_folder
from rl_runtime.errors import ConfigError, RuntimeSetupError
from rl_runtime.megatron.shape import ModelShape, mesh_problems, read_model_config
from rl_runtime.process.ports import check_answers, check_port_free
from rl_runtime.rollout.data.source import check_data
from rl_runtime.rollout.dump import dump_path, loaded_dump_path
from rl_runtime.rollout.hooks import load_hook
from rl_runtime.setup.model_folder import folder_problems
from rl_runtime.setup.tiny_model import tiny_model_config

__all__ = ["check_before_start"]

_URL_SECONDS = 10.0
"""For a server of SGLang that others run: it answers between two forward passes."""
_CONNECT_SECONDS = 10.0
"""For the head of a Ray cluster. Ray itself would try for many minutes."""
_DEVICES = Path("/dev")
_TASK_REWARD = "rl_runtime.rollout.reward:verifier_reward"


def check_before_start(recipe: Recipe) -> None:
    """Check folders, the model, ports, hooks, prompts and dumps.

    Raises:
        ConfigError: one line per problem.
    """
    checks = (
        _run_dir,
        _cluster,
        _models,
        _gpus,
        _engines,
        _hooks,
        _data,
        _dumps,
        _loaded_dumps,
        _library_options,
    )
    problems = [problem for check in checks for problem in _problems_of(check, recipe)]
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of(check: Callable[[Recipe], Iterator[str]], recipe: Recipe) -> Iterator[str]:
    """Bring each problem to one line; what a check raises is its last."""
    try:
        for problem in check(recipe):
            yield " ".join(problem.split())
    except (ConfigError, DumpError) as error:
        yield " ".join(str(error).split())


def _run_dir(recipe: Recipe) -> Iterator[str]:
    folder = recipe.run.dir
    if os.path.lexists(folder):
        yield (
            f"run.dir = {folder}: exists already: choose another folder, such as --set"
            f" run.dir={folder}-2, or delete it"
        )
    else:
        yield from _cannot_be_created("run.dir", folder)


def _cannot_be_created(key: str, folder: Path) -> Iterator[str]:
    """Say why a folder cannot be made, by its nearest parent that is there."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        yield f"{key} = {folder}: cannot be created: {parent} is not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield f"{key} = {folder}: cannot be created: {parent} is not writable"


def _cluster(recipe: Recipe) -> Iterator[str]:
    address = recipe.cluster.address
    if not address or address == "auto":
        return
    try:
        check_answers(address.removeprefix("ray://"), timeout_seconds=_CONNECT_SECONDS)
    except ValueError:
        yield f"cluster.address = {address}: expected host:port, ray://host:port or auto"
    except OSError as error:
        yield (
            f"cluster.address = {address}: nothing answers there ({error}): start Ray on it (ray"
            " start --head), or leave it empty"
        )


def _models(recipe: Recipe) -> Iterator[str]:
    section = recipe.model
    if section.path:
        broken = list(folder_problems("model.path", Path(section.path)))
        yield from broken
        if broken:
            return
    elif recipe.debug.load_rollout_dump:
        yield (
            "debug.load_rollout_dump: needs model.path, the folder of the policy that the dump was"
            " sampled from (for batch 0 a run's warm_start)"
        )
    if section.reference_path:
        yield from folder_problems("model.reference_path", Path(section.reference_path))
        if not recipe.algorithm.kl_coef:
            yield (
                "model.reference_path: is set, but algorithm.kl_coef = 0 uses no reference: set"
                " kl_coef, or leave the path out"
            )
    yield from _shape_problems(recipe)


def _shape_problems(recipe: Recipe) -> Iterator[str]:
    try:
        config = (
            read_model_config(Path(recipe.model.path))
            if recipe.model.path
            else tiny_model_config(recipe.model)
        )
        shape = ModelShape.from_hf_config(config)
    except RuntimeSetupError as error:
        yield f"model.path = {recipe.model.path}: {error}"
        return
    if not recipe.debug.rollout_only:
        yield from mesh_problems(shape, recipe)
    if recipe.rollout.max_response_tokens >= shape.max_positions:
        yield (
            f"rollout.max_response_tokens = {recipe.rollout.max_response_tokens}: leaves no room"
            f" for a prompt in the model's {shape.max_positions} positions"
            " (max_position_embeddings)"
        )


def _gpus(recipe: Recipe) -> Iterator[str]:
    if recipe.cluster.address or any(_DEVICES.glob("nvidia[0-9]*")):
        return
    if recipe.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16: needs a GPU, and this machine has none: use float32"
    if recipe.engine.gpus_per_engine:
        yield (
            f"engine.gpus_per_engine = {recipe.engine.gpus_per_engine}: this machine has no GPU:"
            " set 0, or name a cluster by cluster.address"
        )


def _engines(recipe: Recipe) -> Iterator[str]:
    section = recipe.engine
    if recipe.debug.load_rollout_dump:
        return
    if section.url:
        yield from _url(section.url)
        return
    for port in range(section.port, section.port + section.count) if section.port else ():
        try:
            check_port_free(section.host, port)
        except RuntimeSetupError as error:
            yield f"engine.port = {section.port}: {error}"


def _url(url: str) -> Iterator[str]:
    try:
        httpx.get(f"{url}/model_info", timeout=_URL_SECONDS).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield (
            f"engine.url = {url}: no SGLang server answers there ({type(error).__name__}: {error}):"
            " start one, or leave engine.url empty"
        )


def _hooks(recipe: Recipe) -> Iterator[str]:
    for key, path in (
        ("rollout.generate", recipe.rollout.generate),
        ("reward.function", recipe.reward.function),
    ):
        if not path:
            continue
        try:
            hook = load_hook(path)
        except ConfigError as error:
            yield f"{key}: {error}"
            continue
        if key == "reward.function" and inspect.iscoroutinefunction(hook):
            yield (
                f"{key}: hook {path!r} is an async function; a reward is a plain function, called"
                " in a thread of its own"
            )


def _data(recipe: Recipe) -> Iterator[str]:
    if recipe.debug.load_rollout_dump:
        return
    if recipe.data.kind == "jsonl" and recipe.reward.function == _TASK_REWARD:
        yield (
            f"reward.function = {_TASK_REWARD}: scores reasoning-gym tasks only; for data.kind ="
            " 'jsonl' set rl_runtime.rollout.reward:label_reward or a function of your own"
        )
    check_data(recipe.data, rng=recipe.run.rng)


def _dumps(recipe: Recipe) -> Iterator[str]:
    given = {"dump.rollout": recipe.dump.rollout, "dump.train": recipe.dump.train}
    templates = [in_run_folder(template, recipe.run.dir) or None for template in given.values()]
    check_templates(rollout=templates[0], train=templates[1])
    for key, template in given.items():
        if template and not template.startswith("{run_dir}"):
            yield from _cannot_be_created(key, dump_path(template, recipe, 0).parent)


def _loaded_dumps(recipe: Recipe) -> Iterator[str]:
    given = recipe.debug.load_rollout_dump
    if not given:
        return
    try:
        # One file for all batches where it is not a template.
        paths = dict.fromkeys(
            loaded_dump_path(recipe, batch_id) for batch_id in range(recipe.train.num_batches)
        )
    except DumpError as error:
        yield f"debug.load_rollout_dump = {given}: {error}"
        return
    missing = [path for path in paths if not path.is_file()]
    if missing:
        others = (
            f", nor are those of {len(missing) - 1} other batches: lower train.num_batches"
            if len(missing) > 1
            else ""
        )
        yield f"debug.load_rollout_dump = {given}: no such file: {missing[0]}{others}"


def _library_options(recipe: Recipe) -> Iterator[str]:
    yield from unknown_names(megatron=recipe.megatron, sglang=recipe.sglang)
