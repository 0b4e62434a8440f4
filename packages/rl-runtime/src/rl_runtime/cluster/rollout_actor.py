"""The rollout side as a Ray actor: generates, plans and cuts batches, and puts one object per data-parallel rank into the object store."""

from __future__ import annotations

import asyncio
import json
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray

from rl_runtime.process.logs import log_to_file
from rl_runtime.config.recipe import Recipe
from rl_runtime.contract_table import ContractTable, installed_contracts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["RolloutActor"]


class RolloutActor:
    """Holds the data source and the rollout manager."""

    def __init__(self, recipe: Recipe, *, log_path: Path) -> None:
        """Remember the recipe; loading is `start`'s task."""
        log_to_file(log_path)
        self._recipe = recipe

    async def live(self) -> None:
        """Last as long as the actor; see `cluster.lives`."""
        await asyncio.Event().wait()

    async def contracts(self) -> ContractTable:
        """Say which contracts the packages on this node write and read."""
        return installed_contracts()

    async def start(self, tokenizer_folder: Path) -> None:
        """Load tokenizer, data source and hooks."""
        from transformers import AutoTokenizer

        from rl_runtime.rollout.data.source import make_data_source
        from rl_runtime.rollout.dump import RolloutDumper

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        self._source = make_data_source(
            self._recipe.data, self._tokenizer, rng=self._recipe.run.rng
        )
        self._dumper = RolloutDumper(self._recipe)
        config = json.loads((tokenizer_folder / "config.json").read_text(encoding="utf-8"))
        self._vocab_size = int(config["vocab_size"])

    async def connect(self, urls: list[str], engines: list[Any]) -> None:
        """Connect to engines.

        Args:
            urls: where they answer.
            engines: handles of the engine actors behind the first urls, which know when a server is
                dead; none for servers that others run.
        """
        from rl_runtime.engine.client import EngineClient
        from rl_runtime.rollout.manager import RolloutManager

        clients = [
            EngineClient(
                url,
                self._recipe.engine,
                vocab_size=self._vocab_size,
                failure=engine and engine.failure.remote,
            )
            for url, engine in zip_longest(urls, engines)
        ]
        self._external = [
            client for client, engine in zip_longest(clients, engines) if engine is None
        ]
        self._manager = RolloutManager(self._recipe, self._source, self._tokenizer, clients)

    async def update_external_weights(
        self, weights: dict[str, npt.NDArray[np.generic]], version: int
    ) -> None:
        """Load weights into the servers that others run, and check that they took them; see `weights.sync_tensor`."""
        await asyncio.gather(
            *(client.update_weights(weights, version) for client in self._external)
        )

    async def warm_start_batches(self, count: int) -> list[list[Any]]:
        """Put the next `count` supervised batches into the object store.

        Returns:
            Per batch, one reference per data-parallel rank.
        """
        from rl_runtime.rollout.sft_examples import warm_start_batch

        return [
            [
                ray.put(part)
                for part in warm_start_batch(self._source, self._tokenizer, self._recipe)
            ]
            for _ in range(count)
        ]

    async def generate_batch(
        self, batch_id: int, weight_version: int
    ) -> tuple[list[Any], dict[str, float]]:
        """Generate, score, dump and plan one batch.

        Args:
            batch_id: loop counter.
            weight_version: version that the engines hold; tells how stale a sample is.

        Returns:
            One reference per data-parallel rank, and the batch's metrics.
        """
        from rl_runtime.batch.columns import batch_columns, flatten_groups
        from rl_runtime.algorithms.group_rewards import divides_by_std
        from rl_runtime.rollout.batch_metrics import rollout_report

        generated = await self._manager.generate_batch()
        samples = flatten_groups(generated.groups)
        columns = batch_columns(samples, divide_by_std=divides_by_std(self._recipe.algorithm))
        self._dumper.write(batch_id, columns, samples)
        metrics = rollout_report(generated, columns, weight_version=weight_version)
        refs, schedule_metrics = self._assign(columns, batch_id)
        return refs, {**metrics, **schedule_metrics}

    async def load_batch(self, batch_id: int) -> tuple[list[Any], dict[str, float]]:
        """Plan a batch that was dumped earlier; see `generate_batch`."""
        from rl_runtime.rollout.dump import load_rollout_dump

        return self._assign(
            load_rollout_dump(self._recipe, batch_id, vocab_size=self._vocab_size), batch_id
        )

    async def evaluate(self, split: Literal["check", "eval"], count: int) -> dict[str, float]:
        """Answer held-out prompts; gives mean scores by name, such as {"reward": 0.6, "exact_match": 0.2}."""
        from rl_runtime.rollout.batch_metrics import mean_scores

        return mean_scores(await self._manager.evaluate(split, count))

    async def close(self) -> None:
        """Finish pending dumps."""
        self._dumper.close()

    def _assign(self, columns: Any, batch_id: int) -> tuple[list[Any], dict[str, float]]:
        if self._recipe.debug.rollout_only:
            return [], {}
        from rl_runtime.batch_document import message_of_rank_batch
        from rl_runtime.batch.plan import assign_batch
        from rl_runtime.rollout.batch_metrics import schedule_report

        assignment = assign_batch(columns, self._recipe, batch_id=batch_id)
        plans = self._recipe.run.dir / "plans"
        plans.mkdir(exist_ok=True)
        (plans / f"plan_{batch_id}.json").write_text(
            json.dumps(assignment.plan.to_document()), encoding="utf-8"
        )
        return [
            ray.put(message_of_rank_batch(part)) for part in assignment.rank_batches
        ], schedule_report(assignment)
