"""The training loop: generate, plan, train and sync, batch by batch.

Data flows one way: the rollout actor generates and plans, the trainers train, their weights go back
to the engines. Only references pass through here, and every call of actors waits until it is done.

Invariants: a batch is sampled by the weights of the batch before it; an evaluation is made before
the first batch and after the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_runtime.cluster.actor import Ref
from rl_runtime.config.recipe import Recipe
from rl_runtime.stages.evaluate import evaluate
from rl_runtime.stages.run import Run, open_run
from rl_runtime.stages.sft import run_sft
from rl_runtime.tracking.console import Display
from rl_runtime.training.lr_schedule import reinforcement_lr

__all__ = ["run_training"]

_FINAL_FOLDER = "final"


def run_training(recipe: Recipe, display: Display) -> None:
    """Run a checked recipe to its end.

    Args:
        recipe: already passed by `setup.preflight`.
        display: where progress is shown.

    Raises:
        ActorError: an actor died.
        EngineError: an engine died.
        TrainerError: a trainer could not go on.
        DeadlineError: something took longer than its deadline.
        RuntimeSetupError: Ray, the placement or a server did not start.
    """
    with open_run(recipe, display) as run:
        _start(run)
        evaluate(run, batches_trained=0)
        _train_batches(run)
        _finish(run)


def _start(run: Run) -> None:
    """Wait for trainers and engines, and give the engines the weights to begin with."""
    run.display.row("start", total=None)
    run.display.update("start", phase="Ray actors, Megatron-Core trainers, SGLang engines")
    starting = run.actors.start(run.model_folder)

    def engines_answer() -> None:
        if run.has_engines:
            run.actors.finish_engines(starting)
        run.display.finish("start")

    if run.has_trainers and not run.recipe.model.path:
        run_sft(run, engines_answer)
    else:
        engines_answer()
        if run.has_trainers and run.recipe.engine.url:
            # Servers that others run hold whatever they were given last.
            run.sync_weights()
    if run.has_trainers:
        run.actors.call_trainers("start_reinforcement", what="starting reinforcement learning")


def _train_batches(run: Run) -> None:
    num_batches, interval = run.recipe.train.num_batches, run.recipe.eval.interval
    run.display.row("batches", total=num_batches)
    for batch_id in range(num_batches):
        _one_batch(run, batch_id)
        done = batch_id + 1
        if done == num_batches or (interval and done % interval == 0):
            evaluate(run, batches_trained=done)
    run.display.finish("batches")


def _one_batch(run: Run, batch_id: int) -> None:
    seconds: dict[str, float] = {}
    reports: list[dict[str, float]] = []
    with _timed(seconds, "batch"):
        with _timed(seconds, "rollout"):
            run.display.update("batches", phase="rollout")
            # Waits for the engines: sampled, scored, dumped and planned.
            rank_batches, metrics = _generate(run, batch_id)
        if run.has_trainers:
            with _timed(seconds, "train"):
                run.display.update("batches", phase="train")
                # Waits for every rank's optimizer steps.
                lr = reinforcement_lr(run.recipe, batch_id)
                reports = run.actors.train(
                    "train_batch", rank_batches, lr, what=f"training on batch {batch_id}"
                )
            with _timed(seconds, "sync"):
                run.display.update("batches", phase="weights to engines")
                if run.has_engines:
                    # Waits for every engine to say that it holds the new version.
                    run.sync_weights()
    _log_batch(run, batch_id, metrics | seconds, reports)
    run.display.update("batches", advance=1)


def _generate(run: Run, batch_id: int) -> tuple[list[Ref], dict[str, float]]:
    """Wait for a batch that is sampled, scored and planned, or read from a dump and planned."""
    rollout = run.actors.rollout
    generated: tuple[list[Ref], dict[str, float]] = run.waiter.one(
        rollout.generate_batch.remote(batch_id, run.version)
        if run.has_engines
        else rollout.load_batch.remote(batch_id),
        f"generating batch {batch_id}",
        timeout_seconds=(
            run.rollout_seconds if run.has_engines else run.recipe.cluster.actor_timeout_seconds
        ),
    )
    return generated


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[f"time/{name}_seconds"] = time.perf_counter() - start


def _log_batch(
    run: Run, batch_id: int, metrics: dict[str, float], reports: Sequence[dict[str, float]]
) -> None:
    """Log one line per optimizer step; the first carries the batch's metrics."""
    for index, report in enumerate(reports or [{}]):
        line = {**(metrics if index == 0 else {}), **report}
        run.tracker.log(batch=batch_id, step=run.step, metrics=line)
        run.display.step_line(
            batch=batch_id,
            num_batches=run.recipe.train.num_batches,
            step=index,
            num_steps=len(reports),
            metrics=line,
        )
        run.step += bool(reports)


def _finish(run: Run) -> None:
    """Save the model, and wait until the last dumps are written."""
    if run.has_trainers:
        run.save(_FINAL_FOLDER)
    run.waiter.one(
        run.actors.rollout.close.remote(),
        "writing the last rollout dumps",
        timeout_seconds=run.recipe.cluster.actor_timeout_seconds,
    )
    if run.has_trainers:
        run.actors.call_trainers("close", what="writing the last train dumps")
