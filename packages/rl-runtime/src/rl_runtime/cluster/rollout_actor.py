"""The rollout side as a Ray actor: generates and plans batches and cuts them for the trainers.

What a data-parallel rank trains on is one object in the object store; only references leave here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import ray

from rl_runtime.algorithms.advantages import divides_by_std
from rl_runtime.batch.columns import batch_columns, flatten_groups
from rl_runtime.batch.plan import plan_batch
from rl_runtime.batch.rank_batch import Column
from rl_runtime.cluster.actor import Actor, ActorHandle, Ref
from rl_runtime.engine.client import EngineClient
from rl_runtime.megatron.shape import read_model_config
from rl_runtime.rollout.batch_generator import BatchGenerator
from rl_runtime.rollout.batch_metrics import mean_scores, rollout_report, schedule_report
from rl_runtime.rollout.data.source import make_data_source
from rl_runtime.rollout.dump import RolloutDumper, load_rollout_dump
from rl_runtime.rollout.sft_examples import sft_batch
from rl_schedule import TransformerCost

__all__ = ["RolloutActor"]


class RolloutActor(Actor):
    """The holder of the data source and of the batch generator."""

    async def live(self) -> None:
        """Last as long as the actor; see `cluster.liveness`."""
        await asyncio.Event().wait()

    async def start(self, model_folder: Path) -> None:
        """Load tokenizer, data source and hooks."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._source = make_data_source(
            self._recipe.data, self._tokenizer, rng=self._recipe.run.rng
        )
        self._dumper = RolloutDumper(self._recipe)
        self._clients: list[EngineClient] = []
        config = read_model_config(model_folder)
        self._vocab_size = int(config["vocab_size"])
        self._cost = TransformerCost.from_hf_config(config)

    async def connect(self, urls: list[str], engines: list[ActorHandle]) -> None:
        """Connect to engines.

        Args:
            urls: where they answer.
            engines: handles of the engine actors behind the first urls, which know when a server is
                dead; none for servers that others run.
        """
        self._clients = [
            EngineClient(
                url,
                self._recipe.engine,
                vocab_size=self._vocab_size,
                failure=engine.failure.remote if engine else None,
            )
            for url, engine in zip_longest(urls, engines)
        ]
        self._external = self._clients[len(engines) :]
        self._generator = BatchGenerator(self._recipe, self._source, self._tokenizer, self._clients)

    async def update_external_weights(
        self, weights: dict[str, npt.NDArray[np.generic]], version: int
    ) -> None:
        """Load weights into the servers that others run, and check that they took them.

        See `weights.sync`.
        """
        await asyncio.gather(
            *(client.update_weights(weights, version) for client in self._external)
        )

    async def sft_batches(self, count: int) -> list[list[Ref]]:
        """Put the next `count` batches of the warm start into the object store.

        Returns:
            Per data-parallel rank, one reference per batch.
        """
        batches = [
            [
                ray.put(examples)
                for examples in sft_batch(self._source, self._tokenizer, self._recipe)
            ]
            for _ in range(count)
        ]
        return [[batch[rank] for batch in batches] for rank in range(self._recipe.parallel.data)]

    async def generate_batch(
        self, batch_id: int, weight_version: int
    ) -> tuple[list[Ref], dict[str, float]]:
        """Generate, score, dump and plan one batch.

        Args:
            batch_id: loop counter.
            weight_version: version that the engines hold; tells how stale a sample is.

        Returns:
            One reference per data-parallel rank, and the batch's metrics.
        """
        generated = await self._generator.generate_batch()
        samples = flatten_groups(generated.groups)
        columns = batch_columns(samples, divide_by_std=divides_by_std(self._recipe.algorithm))
        self._dumper.write(batch_id, columns, samples)
        metrics = rollout_report(generated, columns, weight_version=weight_version)
        rank_batches, schedule_metrics = self._plan(columns, batch_id)
        return rank_batches, {**metrics, **schedule_metrics}

    async def load_batch(self, batch_id: int) -> tuple[list[Ref], dict[str, float]]:
        """Plan a batch that was dumped earlier; see `generate_batch`."""
        return self._plan(
            load_rollout_dump(self._recipe, batch_id, vocab_size=self._vocab_size), batch_id
        )

    async def evaluate(self, split: Literal["check", "eval"], count: int) -> dict[str, float]:
        """Answer held-out prompts and return mean scores.

        Example:
            {"reward": 0.6, "exact_match": 0.2}.
        """
        return mean_scores(await self._generator.evaluate(split, count))

    async def close(self) -> None:
        """Finish pending dumps and leave the engines."""
        self._dumper.close()
        await asyncio.gather(*(client.aclose() for client in self._clients))

    def _plan(
        self, columns: Mapping[str, Column], batch_id: int
    ) -> tuple[list[Ref], dict[str, float]]:
        if self._recipe.debug.rollout_only:
            return [], {}
        planned = plan_batch(columns, self._recipe, batch_id=batch_id, cost=self._cost)
        plans = self._recipe.run.dir / "plans"
        plans.mkdir(exist_ok=True)
        (plans / f"plan_{batch_id}.json").write_text(
            json.dumps(planned.plan.to_document()), encoding="utf-8"
        )
        rank_batches = [ray.put(rank_batch) for rank_batch in planned.rank_batches]
        return rank_batches, schedule_report(planned)
