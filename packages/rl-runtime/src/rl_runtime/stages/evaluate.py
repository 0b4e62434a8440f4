"""Held-out scores: what the engines' present weights make of prompts that are never trained on."""

from __future__ import annotations

from typing import Literal

from rl_runtime.stages.run import Run

__all__ = ["evaluate", "held_out_scores"]


def evaluate(run: Run, *, batches_trained: int) -> None:
    """Log and show the scores on the prompts of `[eval]`; without engines there are none."""
    if not run.has_engines:
        return
    scores = held_out_scores(run, "eval", run.recipe.eval.samples)
    scores = {"reward_mean" if name == "reward" else name: value for name, value in scores.items()}
    run.tracker.log(
        batch=batches_trained,
        step=run.step,
        metrics={f"eval/{name}": value for name, value in scores.items()},
    )
    shown = "  ".join(f"{name} {value:.3f}" for name, value in scores.items())
    run.display.print(f"held-out after {batches_trained} batches: {shown}")


def held_out_scores(run: Run, split: Literal["check", "eval"], count: int) -> dict[str, float]:
    """Wait for the answers to `count` prompts of a split, and return their mean scores by name."""
    scores: dict[str, float] = run.waiter.one(
        run.actors.rollout.evaluate.remote(split, count),
        f"evaluating on {split}",
        timeout_seconds=run.rollout_seconds,
    )
    return scores
