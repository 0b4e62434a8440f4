"""Write what was generated, and read it back as the columns of a batch.

Invariants: what is loaded trains exactly as what was dumped; a failed write raises before the next
batch is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl_dump import (
    ROLLOUT_DUMP,
    BackgroundWriter,
    DumpError,
    RaggedArray,
    open_dump,
    resolve_template,
    write_dump,
)
from rl_runtime.algorithms.advantages import divides_by_std, normalise_group_rewards
from rl_runtime.batch.columns import ABSENT_INDEX, column_problem, unknown_id_problem
from rl_runtime.batch.rank_batch import Column
from rl_runtime.config.recipe import Recipe
from rl_runtime.config.run import in_run_folder
from rl_runtime.errors import ConfigError
from rl_runtime.records import Sample

__all__ = ["RolloutDumper", "dump_path", "load_rollout_dump", "loaded_dump_path"]

_NEEDED = (
    "tokens",
    "loss_masks",
    "rollout_log_probs",
    "weight_versions",
    "rollout_position",
    "rollout_ids",
    "group_ids",
    "total_lengths",
    "response_lengths",
    "raw_reward",
    "truncated",
)
_OPTIONAL = ("rollout_full_log_probs", "nucleus_ids", "nucleus_offsets", "nucleus_status")


def dump_path(template: str, recipe: Recipe, batch_id: int) -> Path:
    """Resolve a dump template of the recipe for one batch; `{run_dir}` is the run's folder."""
    return resolve_template(in_run_folder(template, recipe.run.dir), batch_id=batch_id)


class RolloutDumper:
    """The writer of rollout dumps: one file per batch, in the background."""

    def __init__(self, recipe: Recipe) -> None:
        """Write nothing when `dump.rollout` is empty."""
        self._recipe = recipe
        # Given up before the driver gives this actor up: so the error says which file it was.
        self._writer = BackgroundWriter(deadline_seconds=recipe.cluster.actor_timeout_seconds / 2)

    def write(self, batch_id: int, columns: dict[str, Column], samples: Sequence[Sample]) -> None:
        """Queue one batch.

        Raises:
            WriteError: an earlier file could not be written; the message names it.
        """
        if not self._recipe.dump.rollout:
            return
        absent = [
            None if index == ABSENT_INDEX else int(index)
            for index in np.asarray(columns["sample_index"])
        ]
        texts: dict[str, list[Any]] = {
            "prompt": [sample.prompt for sample in samples],
            "response": [sample.response for sample in samples],
            "label": [sample.label for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "metadata": [dict(sample.metadata) for sample in samples],
        }
        fields: dict[str, Column | list[Any]] = {**columns, "sample_index": absent, **texts}
        path = dump_path(self._recipe.dump.rollout, self._recipe, batch_id)
        write = partial(write_dump, path, contract=ROLLOUT_DUMP, batch_id=batch_id, columns=fields)
        self._writer.submit(write, path=path)

    def close(self) -> None:
        """Wait for pending files."""
        self._writer.close()


def loaded_dump_path(recipe: Recipe, batch_id: int) -> Path:
    """Name the file that `debug.load_rollout_dump` gives for a batch: its own, or one for all."""
    given = recipe.debug.load_rollout_dump
    return resolve_template(given, batch_id=batch_id) if "{batch_id" in given else Path(given)


def load_rollout_dump(recipe: Recipe, batch_id: int, *, vocab_size: int) -> dict[str, Column]:
    """Read the columns of a batch from `debug.load_rollout_dump`.

    Rewards are normalised anew, by the recipe's algorithm.

    Args:
        recipe: names the file, and the algorithm.
        batch_id: loop counter.
        vocab_size: token ids of the model that is trained.

    Raises:
        ConfigError: the file lacks a column that training needs, has one of another type, or has
            token ids that the model does not know.
        DumpError: the file cannot be read.
    """
    path = loaded_dump_path(recipe, batch_id)
    dump = open_dump(path)
    missing = [name for name in _NEEDED if name not in dump.fields]
    if missing:
        raise ConfigError(
            f"debug.load_rollout_dump = {path}: lacks the fields {missing}; give a rollout dump"
            " that this program wrote"
        )
    columns: dict[str, Column] = {}
    for name in (*_NEEDED, *(name for name in _OPTIONAL if name in dump.fields)):
        column = dump.column(name)
        if not isinstance(column, np.ndarray | RaggedArray):
            raise DumpError(f"{path}: field {name} is not a numeric column")
        if problem := column_problem(name, column):
            raise ConfigError(f"debug.load_rollout_dump = {path}: {problem}")
        columns[name] = column
    if problem := unknown_id_problem(columns, vocab_size):
        raise ConfigError(
            f"debug.load_rollout_dump = {path}: {problem}: set model.path to the model that it was"
            " sampled from"
        )
    columns["rewards"] = normalise_group_rewards(
        *(np.asarray(columns[name]) for name in ("raw_reward", "rollout_ids", "group_ids")),
        divide_by_std=divides_by_std(recipe.algorithm),
    )
    index = (
        dump.column("sample_index") if "sample_index" in dump.fields else [None] * dump.num_samples
    )
    columns["sample_index"] = np.array(
        [ABSENT_INDEX if value is None else int(value) for value in index], np.int64
    )
    return columns
