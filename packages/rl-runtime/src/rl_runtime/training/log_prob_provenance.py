"""How the log-probs of a train dump came about: what is needed to compute them again.

Stands in the metadata of every train dump that this program writes, under `scoring`.

Invariants: a note read back equals the one written; a file without a note, or with another one, is
refused and never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ReplayError

__all__ = ["ScoringNote"]

_KEY = "scoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringNote:
    """One run's way of scoring: `ScoringNote(temperature=1.0, kept_sets=True, weights="batch")`."""

    temperature: float
    """Divisor of the logits."""
    kept_sets: bool
    """Whether log-probs are over the recorded kept sets, where there are some."""
    weights: Literal["batch", "step"]
    """Under which weights: those that the batch began with, or those of the sample's step."""

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """Say how a run by this recipe scores."""
        return cls(
            temperature=recipe.rollout.temperature,
            kept_sets=recipe.rollout.replay,
            weights="step" if recipe.algorithm.old_log_probs == "rollout" else "batch",
        )

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any], *, where: str) -> Self:
        """Read the note from a dump's metadata.

        Args:
            metadata: the dump's metadata.
            where: the file, for errors.

        Raises:
            ReplayError: there is none, or not one that this program wrote.
        """
        note = metadata.get(_KEY)
        if isinstance(note, dict):
            temperature, kept_sets, weights = (
                note.get(name) for name in ("temperature", "kept_sets", "weights")
            )
            if (
                isinstance(temperature, float)
                and temperature > 0
                and isinstance(kept_sets, bool)
                and weights in ("batch", "step")
            ):
                return cls(temperature=temperature, kept_sets=kept_sets, weights=weights)
        raise ReplayError(
            f"{where}: does not say how its log-probs were computed (metadata {_KEY!r} is"
            f" {note!r}); give a dump that `rl-runtime train` wrote"
        )

    def to_metadata(self) -> dict[str, Any]:
        """Return the note as an entry for a dump's metadata."""
        return {_KEY: asdict(self)}
