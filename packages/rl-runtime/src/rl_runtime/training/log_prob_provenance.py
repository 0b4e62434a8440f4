"""How the log-probs of a train dump came about: what is needed to compute them again.

Stands in the metadata of every train dump that this program writes, under `scoring`.

Invariants: what is read back equals what was written; a file without it, or with something else in
its place, is refused and never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from rl_runtime.config.recipe import Recipe
from rl_runtime.errors import ReplayError

__all__ = ["LogProbProvenance"]

_KEY = "scoring"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbProvenance:
    """One run's way of scoring.

    Example: `LogProbProvenance(temperature=1.0, nucleus=True, weights="batch")`.
    """

    temperature: float
    """Divisor of the logits."""
    nucleus: bool
    """Whether log-probs are over the recorded nuclei, where there are some."""
    weights: Literal["batch", "step"]
    """Under which weights: those that the batch began with, or those of the sample's step."""

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """Say how a run by this recipe scores."""
        return cls(
            temperature=recipe.rollout.temperature,
            nucleus=recipe.rollout.replay,
            weights="step" if recipe.algorithm.old_log_probs == "rollout" else "batch",
        )

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any], *, where: str) -> Self:
        """Read it from a dump's metadata.

        Args:
            metadata: the dump's metadata.
            where: the file, for errors.

        Raises:
            ReplayError: there is none, or not one that this program wrote.
        """
        match metadata.get(_KEY):
            case {
                "temperature": float() as temperature,
                "kept_sets": bool() as nucleus,
                "weights": "batch" | "step" as weights,
            } if temperature > 0:
                return cls(temperature=temperature, nucleus=nucleus, weights=weights)
            case found:
                raise ReplayError(
                    f"{where}: does not say how its log-probs were computed (metadata {_KEY!r} is"
                    f" {found!r}); give a dump that `rl-runtime train` wrote"
                )

    def to_metadata(self) -> dict[str, Any]:
        """Return the entry for a dump's metadata; files say `kept_sets` for the nuclei."""
        return {
            _KEY: {
                "temperature": self.temperature,
                "kept_sets": self.nucleus,
                "weights": self.weights,
            }
        }
