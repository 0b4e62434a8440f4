"""A trainer rank as a Ray actor.

The trainer itself knows nothing of Ray; torch and Megatron-Core are imported when `start` is
called, so that all actors start side by side.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rl_runtime.batch.rank_batch import RankBatch
from rl_runtime.cluster.actor import Actor, Ref
from rl_runtime.process.ports import choose_port

if TYPE_CHECKING:
    from rl_runtime.training.trainer import Trainer

__all__ = ["TrainerActor"]


class TrainerActor(Actor):
    """One rank of the trainer's mesh: a `Trainer`, once `start` was called."""

    _trainer: Trainer

    def live(self) -> None:
        """Last as long as the actor; see `cluster.liveness`."""
        threading.Event().wait()

    def rendezvous(self) -> str:
        """Choose "host:port" on this node for the process group."""
        host = ray.util.get_node_ip_address()
        return f"{host}:{choose_port(host)}"

    def start(self, rendezvous: str, model_folder: Path) -> tuple[int, bool]:
        """Join the process group and load the model.

        Returns:
            The rank's data-parallel rank, and whether it is the writer.
        """
        from rl_runtime.training.trainer import Trainer

        self._trainer = Trainer(
            self._recipe,
            rank=self._index,
            world_size=self._recipe.parallel.world_size,
            rendezvous=rendezvous,
            model_folder=model_folder,
        )
        topology = self._trainer.topology
        return topology.dp_rank, topology.is_writer

    def train_sft(self, examples: list[Ref], lrs: list[float]) -> list[dict[str, float]]:
        """Take one step of the warm start per batch of examples; see `Trainer.train_sft_step`."""
        batches = ray.get(examples, timeout=self._recipe.cluster.actor_timeout_seconds)
        return [
            self._trainer.train_sft_step(batch, lr) for batch, lr in zip(batches, lrs, strict=True)
        ]

    def train_batch(self, rank_batch: RankBatch, lr: float) -> list[dict[str, float]]:
        """Check what came and train on it, one report per step; see `Trainer.train_batch`."""
        rank_batch.check()
        return self._trainer.train_batch(rank_batch, lr)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the `Trainer` that takes nothing from the rollout side.

        `start_reinforcement`, `export_weights`, `save_hf` or `close`.
        """
        return getattr(self._trainer, method)(*args)
