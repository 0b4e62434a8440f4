"""A trainer rank as a Ray actor.

The trainer itself knows nothing of Ray; torch and Megatron-Core are imported when `start` is
called, so that all actors start side by side.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from rl_runtime.process.logs import log_to_file
from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import ContractTable, installed_contracts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rl_runtime.batch.rank_batch import Column
    from rl_runtime.batch_document import RankMessage
    from rl_runtime.training.trainer import Trainer

__all__ = ["TrainerActor"]


class TrainerActor:
    """One rank of the trainer's mesh."""

    def __init__(self, recipe: Recipe, *, rank: int, log_path: Path) -> None:
        """Remember what to start; starting is `start`'s task."""
        log_to_file(log_path)
        self._recipe = recipe
        self._rank = rank
        self._trainer: Trainer | None = None

    def live(self) -> None:
        """Last as long as the actor; see `cluster.lives`."""
        threading.Event().wait()

    def contracts(self) -> ContractTable:
        """Say which contracts the packages on this node write and read."""
        return installed_contracts()

    def rendezvous(self) -> str:
        """Choose "host:port" on this node for the process group."""
        from rl_runtime.process.ports import free_port

        host = ray.util.get_node_ip_address()
        return f"{host}:{free_port(host)}"

    def start(self, rendezvous: str, model_folder: Path) -> tuple[int, bool]:
        """Join the process group and load the model.

        Returns:
            The rank's data-parallel rank, and whether it is the one that exports weights.
        """
        from rl_runtime.training.trainer import Trainer

        self._trainer = Trainer(
            self._recipe,
            rank=self._rank,
            world_size=self._recipe.parallel.world_size,
            rendezvous=rendezvous,
            model_folder=model_folder,
        )
        return self._trainer.data_parallel_rank, self._trainer.is_writer

    def train_sft(
        self, batches: list[ray.ObjectRef[dict[str, Column]]], lrs: list[float]
    ) -> list[dict[str, float]]:
        """Take one supervised step per batch; see `Trainer.train_sft_step`."""
        trainer = self._started()
        loaded = ray.get(batches, timeout=self._recipe.cluster.actor_timeout_seconds)
        return [trainer.train_sft_step(batch, lr) for batch, lr in zip(loaded, lrs, strict=True)]

    def start_reinforcement(self) -> None:
        """See `Trainer.start_reinforcement`."""
        self._started().start_reinforcement()

    def train_batch(self, message: RankMessage, lr: float) -> list[dict[str, float]]:
        """Read the rank's part of a batch and train on it; see `Trainer.train_batch`."""
        from rl_runtime.batch_document import rank_batch_of_message

        return self._started().train_batch(rank_batch_of_message(message), lr)

    def export_weights(self) -> dict[str, npt.NDArray[np.generic]] | None:
        """See `Trainer.export_weights`."""
        return self._started().export_weights()

    def save_hf(self, folder: Path) -> None:
        """See `Trainer.save_hf`."""
        self._started().save_hf(folder)

    def close(self) -> None:
        """Leave the process group and finish pending writes."""
        if self._trainer is not None:
            self._trainer.close()

    def _started(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError(f"trainer rank {self._rank} was not started: call start first")
        return self._trainer
