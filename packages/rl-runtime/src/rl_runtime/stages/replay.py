"""Run one micro-batch of a train dump again, alone, on the CPU, and compare.

The micro-batch comes from `rl-dump replay`, the weights from a Hugging Face folder; packing, model
and scoring are the trainer's.

Invariants: everything that can be wrong with file or folder is found before the model is built,
except weights that do not fit their own config.json; every response token is compared, also those
that are not trained; a difference that is not a number counts as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rl_dump import REPLAY_KEY, TRAIN_DUMP, Dump, RaggedArray, open_dump
from rl_runtime.batch.columns import unknown_id_problem
from rl_runtime.batch.rank_batch import Column
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ReplayError
from rl_runtime.megatron.shape import ModelShape, read_model_config
from rl_runtime.training.log_prob_provenance import LogProbProvenance

__all__ = ["MicroBatchFile", "Replayed", "compare_log_probs", "read_micro_batch", "replay"]

_NEEDED = ("tokens", "loss_masks", "response_lengths", "rollout_position", "log_probs")
_NUCLEUS = ("nucleus_ids", "nucleus_offsets", "nucleus_status")
_TIMEOUT_SECONDS = 60.0
"""For the process group of this one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchFile:
    """One exported micro-batch."""

    batch_id: int | str
    """Loop counter of the run that dumped it."""
    step: int
    """Optimizer step within the batch, 0-based."""
    data_parallel_rank: int
    """Rank that trained on it."""
    micro_batch: int
    """Micro-batch within the step on that rank, 0-based."""
    provenance: LogProbProvenance
    """How its log-probs were computed."""
    columns: Mapping[str, Column]
    """What the trainer packs."""
    log_probs: RaggedArray
    """The dumped log-probs, float32 [R] per sample."""
    rollout_positions: npt.NDArray[np.int64]
    """int64 [n]: where each sample stands in its rollout batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The largest difference over all tokens, and where it is."""

    num_samples: int
    """Samples compared."""
    num_tokens: int
    """Response tokens compared."""
    largest: float
    """Largest |replayed - dumped| log-prob, nats; infinite where one is not a number."""
    rollout_position: int | None = None
    """Sample of the largest difference; None without tokens."""
    token: int | None = None
    """Index of the token in its response."""
    dumped: float | None = None
    """Its dumped log-prob."""
    replayed: float | None = None
    """Its replayed log-prob."""


def read_micro_batch(path: Path, *, vocab_size: int) -> MicroBatchFile:
    """Read a file that `rl-dump replay` wrote.

    Args:
        path: the file.
        vocab_size: token ids of the model that it is to be replayed with.

    Raises:
        DumpError: the file is not a dump, or damaged.
        ReplayError: it is a dump of another kind, lacks something, or holds ids that the model does
            not have.
    """
    with open_dump(path) as dump:
        place = _place(dump)
        problems = dump.verify()
        if problems:
            raise ReplayError(
                f"{path}: {problems[0].message} ({len(problems)} problems; `rl-dump verify` lists"
                " them)"
            )
        provenance = LogProbProvenance.of_metadata(dump.metadata, where=str(path))
        if provenance.weights == "step" and place["step"] > 0:
            raise ReplayError(
                f"{path}: the log-probs of step {place['step']} are under weights that changed"
                " within the batch (algorithm.old_log_probs = 'rollout') and were not saved:"
                " export a micro-batch of step 0"
            )
        missing = [name for name in _NEEDED if name not in dump.fields]
        if missing:
            raise ReplayError(f"{path}: lacks the fields {', '.join(missing)}")
        columns = {
            name: _numbers(dump, name) for name in (*_NEEDED, *_NUCLEUS) if name in dump.fields
        }
    if problem := unknown_id_problem(columns, vocab_size):
        raise ReplayError(f"{path}: {problem}: give the model that the batch was trained with")
    log_probs = columns.pop("log_probs")
    assert isinstance(log_probs, RaggedArray)
    return MicroBatchFile(
        batch_id=dump.batch_id,
        **place,
        provenance=provenance,
        columns=columns,
        log_probs=log_probs,
        rollout_positions=np.asarray(columns["rollout_position"], np.int64),
    )


def replay(path: Path, model_folder: Path) -> tuple[MicroBatchFile, Replayed]:
    """Score a micro-batch again and compare with what the dump says.

    The model runs in float32, in this process, which must have no process group of its own.

    Args:
        path: file that `rl-dump replay` wrote.
        model_folder: the weights that the batch began with, in Hugging Face layout: for batch 0 the
            run's `warm_start` folder.

    Returns:
        The micro-batch, and how far its log-probs are from the dumped ones.

    Raises:
        DumpError: the file is not a dump, or damaged.
        ReplayError: the file is not an exported micro-batch, or does not fit the model.
        RuntimeSetupError: the folder is missing something or holds a model that the trainer does
            not know.
    """
    if not model_folder.is_dir():
        raise ReplayError(
            f"{model_folder}: no such folder; give one in Hugging Face layout, for batch 0 the"
            " run's `warm_start` folder"
        )
    vocab_size = ModelShape.from_hf_config(read_model_config(model_folder)).vocab_size
    given = read_micro_batch(path, vocab_size=vocab_size)
    scored = _scored(given, model_folder)
    return given, compare_log_probs(given, scored)


def _scored(given: MicroBatchFile, model_folder: Path) -> npt.NDArray[np.float32]:
    from rl_runtime.megatron.parallel_state import end_process_groups
    from rl_runtime.process.ports import choose_port
    from rl_runtime.training.trainer import Trainer

    recipe = Recipe.model_validate(
        {
            "model": {"path": str(model_folder), "dtype": "float32"},
            "parallel": {"data": 1},
            "rollout": {
                "temperature": given.provenance.temperature,
                "replay": given.provenance.nucleus,
            },
            "dump": {"rollout": "", "train": ""},
            "cluster": {"actor_timeout_seconds": _TIMEOUT_SECONDS},
        }
    )
    rendezvous = f"127.0.0.1:{choose_port('127.0.0.1')}"
    try:
        return Trainer(
            recipe, rank=0, world_size=1, rendezvous=rendezvous, model_folder=model_folder
        ).score(given.columns)
    finally:
        # Not `Trainer.close`: weights that do not fit are found when the groups exist, but no
        # trainer does.
        end_process_groups()


def compare_log_probs(given: MicroBatchFile, scored: npt.NDArray[np.float32]) -> Replayed:
    """Find the largest difference to the dumped log-probs.

    Args:
        given: the micro-batch.
        scored: float32 [tokens], log-probs of its response tokens, sample by sample.
    """
    dumped, offsets = given.log_probs.values, given.log_probs.offsets
    if not dumped.size:
        return Replayed(num_samples=len(given.log_probs), num_tokens=0, largest=0.0)
    gaps = np.abs(scored.astype(np.float64) - dumped)
    gaps[~np.isfinite(gaps)] = math.inf
    at = int(np.argmax(gaps))
    # The last sample that begins at or before that token; one without tokens begins there too.
    row = int(np.searchsorted(offsets, at, side="right")) - 1
    return Replayed(
        num_samples=len(given.log_probs),
        num_tokens=dumped.size,
        largest=float(gaps[at]),
        rollout_position=int(given.rollout_positions[row]),
        token=at - int(offsets[row]),
        dumped=float(dumped[at]),
        replayed=float(scored[at]),
    )


def _place(dump: Dump) -> dict[str, int]:
    place = dump.metadata.get(REPLAY_KEY)
    names = ("step", "data_parallel_rank", "micro_batch")
    if (
        dump.contract != TRAIN_DUMP
        or not isinstance(place, dict)
        or not all(isinstance(place.get(name), int) for name in names)
    ):
        raise ReplayError(
            f"{dump.path}: a {dump.contract} of a whole batch; export one micro-batch of a train"
            " dump with `rl-dump replay TRAIN_DUMP FILE`"
        )
    return {name: place[name] for name in names}


def _numbers(dump: Dump, name: str) -> Column:
    column = dump.column(name)
    if not isinstance(column, np.ndarray | RaggedArray):
        raise ReplayError(
            f"{dump.path}: field {name} is missing for some samples, or is not a numeric column"
        )
    return column
