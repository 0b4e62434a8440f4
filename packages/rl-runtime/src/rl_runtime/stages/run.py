"""A run under way: what all of its stages share, made before the first and ended after the last.

Invariants: the run's folder is new; whatever ends a run, every actor and server is ended with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_runtime.cluster.actor_group import ActorGroup
from rl_runtime.cluster.placement import reserve
from rl_runtime.cluster.ray_session import ray_session
from rl_runtime.cluster.waiting import Waiter
from rl_runtime.config import recipe_to_toml
from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import RuntimeSetupError
from rl_runtime.process.logs import log_driver_to_file
from rl_runtime.setup.tiny_model import write_tiny_model
from rl_runtime.tracking.console import Display
from rl_runtime.tracking.tracker import Tracker

__all__ = ["Run", "open_run"]

_INITIAL_FOLDER = "initial"
_AFTER_ROLLOUTS_SECONDS = 60.0
"""For what comes after a batch's last rollout: late answers, rewards, dump and plan."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Recipe, actors and counters of one run."""

    recipe: Recipe
    """Checked by `setup.preflight`."""
    actors: ActorGroup
    """Created, not yet started."""
    waiter: Waiter
    """Ends every wait at its own deadline, at `run.deadline_seconds`, or when an actor dies."""
    tracker: Tracker
    """Where metrics go."""
    display: Display
    """What a person sees."""
    model_folder: Path
    """What trainers and engines begin with."""
    version: int = 0
    """Of the weights that the engines hold; 0: those of `model_folder`."""
    step: int = 0
    """Optimizer steps since the first batch."""

    @property
    def has_trainers(self) -> bool:
        """Whether there are trainers."""
        return not self.recipe.debug.rollout_only

    @property
    def has_engines(self) -> bool:
        """Whether there are engines."""
        return not self.recipe.debug.load_rollout_dump

    @property
    def rollout_seconds(self) -> float:
        """Deadline of a batch of rollouts, or of an evaluation."""
        return self.recipe.rollout.rollout_deadline_seconds + _AFTER_ROLLOUTS_SECONDS

    def sync_weights(self) -> None:
        """Bring the trainers' weights to the engines, under the next version."""
        self.version += 1
        self.actors.sync_weights(self.version)

    def save(self, name: str) -> None:
        """Save the trainers' weights as a Hugging Face folder within the run's."""
        folder = self.recipe.run.dir / name
        self.actors.call_trainers("save_hf", folder, what=f"saving {folder}")


@contextmanager
def open_run(recipe: Recipe, display: Display) -> Iterator[Run]:
    """Make the run's folder, Ray and the actors for the time of a `with` block.

    Raises:
        RuntimeSetupError: the folder cannot be made, or Ray or the placement did not start.
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
    model_folder = Path(recipe.model.path or run_dir / _INITIAL_FOLDER)
    if not recipe.model.path:
        write_tiny_model(model_folder, recipe.model, rng=recipe.run.rng)
    waiter = Waiter(run_deadline=time.monotonic() + recipe.run.deadline_seconds)
    with (
        Tracker(run_dir, tensorboard=recipe.tracking.tensorboard) as tracker,
        ray_session(recipe) as daemons,
        closing(ActorGroup(recipe, reserve(recipe), waiter, daemons=daemons)) as actors,
    ):
        yield Run(
            recipe=recipe,
            actors=actors,
            waiter=waiter,
            tracker=tracker,
            display=display,
            model_folder=model_folder,
        )
