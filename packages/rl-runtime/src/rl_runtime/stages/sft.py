"""The warm start: steps on right answers until the model is good enough to be rewarded.

Invariants: steps end at `warm_start.steps`, or at the first check whose held-out reward is at least
`warm_start.stop_at_reward`; the engines hold the last step's weights afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from rl_runtime.stages.evaluate import held_out_scores
from rl_runtime.stages.run import Run
from rl_runtime.training.lr_schedule import sft_lr

__all__ = ["run_sft"]

_FOLDER = "warm_start"
_EXAMPLES_SECONDS = 120.0
"""For the rollout actor to tokenise the examples of the steps between two checks."""


def run_sft(run: Run, engines_answer: Callable[[], None]) -> None:
    """Make the warm start and save the model.

    Args:
        run: with trainers that have started.
        engines_answer: waits for the engines; called when the steps before the first check, which
            need none, are done.
    """
    section = run.recipe.warm_start
    run.display.row("warm start", total=section.steps)
    done = min(section.first_check, section.steps)
    _take_steps(run, 0, done)
    engines_answer()
    reward = _check(run, done)
    while done < section.steps and reward < section.stop_at_reward:
        count = min(section.check_interval, section.steps - done)
        _take_steps(run, done, count)
        done += count
        reward = _check(run, done)
    run.display.finish("warm start")
    run.display.print(f"warm start: {done} steps, held-out reward {reward:.3f}")
    run.save(_FOLDER)


def _take_steps(run: Run, done: int, count: int) -> None:
    shares = run.waiter.one(
        run.actors.rollout.sft_batches.remote(count),
        "preparing batches of the warm start",
        timeout_seconds=_EXAMPLES_SECONDS,
    )
    lrs = [sft_lr(run.recipe.warm_start, step) for step in range(done, done + count)]
    reports = run.actors.train(
        "train_sft", shares, lrs, what="training on batches of the warm start"
    )
    phase = f"loss {reports[-1]['warm_start/loss']:.3f}" if reports else ""
    run.display.update("warm start", advance=count, phase=phase)


def _check(run: Run, done: int) -> float:
    run.sync_weights()
    reward = held_out_scores(run, "check", run.recipe.warm_start.check_samples)["reward"]
    run.display.update("warm start", phase=f"held-out reward {reward:.3f} after {done} steps")
    return reward
