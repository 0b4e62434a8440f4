"""The training loop: warm start, then generate, train and sync, batch by batch.

Data flows one way: the rollout actor generates and plans, the trainers train, their weights go back
to the engines.

Invariants: a batch is sampled by the weights of the batch before it; an evaluation is made before
the first batch and after the last; whatever ends the loop, every actor and server is ended with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from rl_runtime.cluster.actor_group import ActorGroup
from rl_runtime.cluster.placement import reserve
from rl_runtime.process.logs import log_driver_to_file
from rl_runtime.cluster.ray_session import ray_session
from rl_runtime.cluster.waiting import Waiter
from rl_runtime.config import recipe_to_toml
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.process.interrupts import delayed_interrupts
from rl_runtime.training.lr_schedule import reinforcement_lr, warm_start_lr
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.tracking.console import Display
from rl_runtime.tracking.tracker import Tracker

__all__ = ["run_training"]

_INITIAL_FOLDER = "initial"
_WARM_START_FOLDER = "warm_start"
_FINAL_FOLDER = "final"


def run_training(recipe: Recipe, display: Display) -> None:
    """Run a checked recipe to its end.

    Args:
        recipe: already passed by `preflight.check_before_start`.
        display: where progress is shown.

    Raises:
        ActorError: an actor died.
        EngineError: an engine died.
        TrainerError: a trainer could not go on.
        DeadlineError: something took longer than its deadline.
        RuntimeSetupError: Ray, the placement or a server did not start.
    """
    run_dir = recipe.run.dir
    try:
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise RuntimeSetupError(
            f"run.dir = {run_dir}: cannot be created ({error.strerror or error}): choose another"
            " folder"
        ) from error
    log_driver_to_file(run_dir / "logs" / "driver.log")
    (run_dir / "recipe.toml").write_text(recipe_to_toml(recipe), encoding="utf-8")
    display.print(f"{run_dir}: starting Ray, trainers and engines, which takes up to a minute")
    model_folder = Path(recipe.model.path) if recipe.model.path else run_dir / _INITIAL_FOLDER
    if not recipe.model.path:
        write_tiny_model(model_folder, recipe.model, rng=recipe.run.rng)
    waiter = Waiter(run_deadline=time.monotonic() + recipe.run.deadline_seconds)
    with (
        Tracker(run_dir, tensorboard=recipe.tracking.tensorboard) as tracker,
        ray_session(recipe) as daemons,
        _actors(recipe, waiter, daemons) as actors,
    ):
        _Loop(recipe, actors, waiter, tracker, display, model_folder).run()


@contextmanager
def _actors(
    recipe: Recipe, waiter: Waiter, daemons: Sequence[psutil.Process]
) -> Iterator[ActorGroup]:
    placement = reserve(recipe)
    actors = ActorGroup(recipe, placement, waiter, daemons=daemons)
    try:
        yield actors
    finally:
        with delayed_interrupts():
            actors.close()
            placement.release()


class _Loop:
    def __init__(
        self,
        recipe: Recipe,
        actors: ActorGroup,
        waiter: Waiter,
        tracker: Tracker,
        display: Display,
        model_folder: Path,
    ) -> None:
        self._recipe = recipe
        self._actors = actors
        self._waiter = waiter
        self._tracker = tracker
        self._display = display
        self._model_folder = model_folder
        self._uses_engines = not recipe.debug.load_rollout_dump
        self._trains = not recipe.debug.rollout_only
        self._version = 0
        self._step = 0

    def run(self) -> None:
        """Warm up where the recipe asks for it, then train batch by batch."""
        self._display.row("start", total=None)
        self._display.update("start", phase="Ray actors, Megatron-Core trainers, SGLang engines")
        starting = self._actors.start(self._model_folder)
        warm_up = not self._recipe.model.path and self._trains
        if warm_up:
            self._warm_start_until_first_check()
        if self._uses_engines:
            self._actors.finish_engines(starting)
        self._display.finish("start")
        if warm_up:
            self._finish_warm_start()
        elif self._trains and self._recipe.engine.url:
            # Servers that others run hold whatever they were given last.
            self._sync()
        if self._trains:
            self._actors.call_trainers(
                "start_reinforcement", what="starting reinforcement learning"
            )
        self._evaluate(batches_trained=0)
        self._train_batches()
        if self._trains:
            self._save(_FINAL_FOLDER)
        limit = self._recipe.cluster.actor_timeout_seconds
        self._waiter.one(
            self._actors.rollout.close.remote(),
            "writing the last rollout dumps",
            timeout_seconds=limit,
        )
        if self._trains:
            self._actors.call_trainers("close", what="writing the last train dumps")

    def _warm_start_until_first_check(self) -> None:
        section = self._recipe.warm_start
        self._display.row("warm-up", total=section.steps)
        self._sft_steps(0, min(section.first_check, section.steps))

    def _finish_warm_start(self) -> None:
        section = self._recipe.warm_start
        done = min(section.first_check, section.steps)
        reward = self._check_warm_start(done)
        while done < section.steps and reward < section.stop_at_reward:
            count = min(section.check_interval, section.steps - done)
            self._sft_steps(done, count)
            done += count
            reward = self._check_warm_start(done)
        self._display.finish("warm-up")
        self._display.print(f"warm start: {done} steps, held-out reward {reward:.3f}")
        self._save(_WARM_START_FOLDER)

    def _sft_steps(self, done: int, count: int) -> None:
        lrs = [warm_start_lr(self._recipe.warm_start, step) for step in range(done, done + count)]
        batches = self._waiter.one(
            self._actors.rollout.sft_batches.remote(count),
            "preparing supervised batches",
            timeout_seconds=120,
        )
        reports = self._actors.train_sft(batches, lrs)
        self._display.update(
            "warm-up",
            advance=count,
            phase=f"loss {reports[-1]['warm_start/loss']:.3f}" if reports else "",
        )

    def _check_warm_start(self, done: int) -> float:
        self._sync()
        scores = self._scores("check", self._recipe.warm_start.check_samples)
        self._display.update(
            "warm-up", phase=f"held-out reward {scores['reward']:.3f} after {done} steps"
        )
        return scores["reward"]

    def _train_batches(self) -> None:
        num_batches = self._recipe.train.num_batches
        self._display.row("batches", total=num_batches)
        for batch_id in range(num_batches):
            self._one_batch(batch_id)
            interval = self._recipe.eval.interval
            if batch_id + 1 == num_batches or (interval and (batch_id + 1) % interval == 0):
                self._evaluate(batches_trained=batch_id + 1)
        self._display.finish("batches")

    def _one_batch(self, batch_id: int) -> None:
        start = time.perf_counter()
        self._display.update("batches", phase="rollout")
        if self._uses_engines:
            generating = self._actors.rollout.generate_batch.remote(batch_id, self._version)
            limit = self._recipe.rollout.rollout_deadline_seconds + 60
        else:
            generating = self._actors.rollout.load_batch.remote(batch_id)
            limit = self._recipe.cluster.actor_timeout_seconds
        rank_batches, metrics = self._waiter.one(
            generating, f"generating batch {batch_id}", timeout_seconds=limit
        )
        generated = time.perf_counter()
        metrics["time/rollout_seconds"] = generated - start
        reports: list[dict[str, float]] = []
        if self._trains:
            self._display.update("batches", phase="train")
            reports = self._actors.train_batch(
                rank_batches, reinforcement_lr(self._recipe, batch_id), batch_id=batch_id
            )
            trained = time.perf_counter()
            metrics["time/train_seconds"] = trained - generated
            self._display.update("batches", phase="weights to engines")
            if self._uses_engines:
                self._sync()
            metrics["time/sync_seconds"] = time.perf_counter() - trained
        metrics["time/batch_seconds"] = time.perf_counter() - start
        self._log_batch(batch_id, metrics, reports)
        self._display.update("batches", advance=1)

    def _log_batch(
        self, batch_id: int, metrics: dict[str, float], reports: Sequence[dict[str, float]]
    ) -> None:
        for index, report in enumerate(reports or [{}]):
            line = {**(metrics if index == 0 else {}), **report}
            self._tracker.log(batch=batch_id, step=self._step, metrics=line)
            self._display.step_line(
                batch=batch_id,
                num_batches=self._recipe.train.num_batches,
                step=index,
                num_steps=len(reports),
                metrics=line,
            )
            self._step += bool(reports)

    def _evaluate(self, *, batches_trained: int) -> None:
        if not self._uses_engines:
            return
        scores = self._scores("eval", self._recipe.eval.samples)
        metrics: dict[str, float | None] = {
            f"eval/{'reward_mean' if name == 'reward' else name}": value
            for name, value in scores.items()
        }
        self._tracker.log(batch=batches_trained, step=self._step, metrics=metrics)
        shown = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items()
        )
        self._display.print(f"held-out after {batches_trained} batches: {shown}")

    def _scores(self, split: str, count: int) -> dict[str, float]:
        limit = self._recipe.rollout.rollout_deadline_seconds + 60
        scores: dict[str, float] = self._waiter.one(
            self._actors.rollout.evaluate.remote(split, count),
            f"evaluating on {split}",
            timeout_seconds=limit,
        )
        return scores

    def _sync(self) -> None:
        self._version += 1
        self._actors.sync_weights(self._version)

    def _save(self, name: str) -> None:
        folder = self._recipe.run.dir / name
        self._actors.call_trainers("save_hf", folder, what=f"saving {folder}")
