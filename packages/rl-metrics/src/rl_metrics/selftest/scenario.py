"""A random training step that contains what usually goes wrong, with its exact answers.

The self-test and the tests run it on every layout. A step always holds: responses of one token,
sequences mostly of prompt (so that some context-parallel ranks own no response token), masks with
holes, rollouts of one to three siblings that land on different ranks and micro-batches, one rollout
that is masked throughout, and NaN at every masked position.

The per-token loss is `x = (a w_0 + b w_1)^2` for two parameters `w` and random features `a, b`; so
value and gradient of every aggregation are known in closed form. Axes: N samples, R_i response
tokens of sample `i`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rl_metrics.aggregation.aggregation import Aggregation
from rl_metrics.aggregation.denominators import count_step_units, loss_denominators, mask_sums
from rl_metrics.aggregation.loss_reduction import aggregate
from rl_metrics.arguments import FloatArray, count
from rl_metrics.errors import MetricsError

__all__ = ["CONSTANT", "Scenario", "make_scenario"]

CONSTANT = 64.0
"""The divisor the scenario uses with `constant`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One step: samples in rollout order."""

    total_lengths: tuple[int, ...]
    """[N], tokens."""

    response_lengths: tuple[int, ...]
    """[N], tokens."""

    loss_masks: tuple[npt.NDArray[np.int32], ...]
    """N masks [R_i]."""

    features: tuple[FloatArray, ...]
    """N arrays [R_i, 2], the features `a` and `b`, exact in float32."""

    rollout_ids: tuple[int, ...]
    """[N], equal for siblings."""

    group_ids: tuple[int, ...]
    """[N], equal for the rollouts of one prompt."""

    parameters: tuple[float, float]
    """The parameters `w`."""

    @property
    def num_samples(self) -> int:
        """Count the samples."""
        return len(self.total_lengths)

    @property
    def num_tokens(self) -> int:
        """Count the trained tokens."""
        return int(mask_sums(self.loss_masks).sum())

    @property
    def _ids(self) -> dict[str, tuple[int, ...]]:
        return {"rollout_ids": self.rollout_ids, "group_ids": self.group_ids}

    def denominators(self, aggregation: Aggregation) -> FloatArray:
        """Return the denominators of the whole step, float64 [N], at least 1."""
        return loss_denominators(aggregation, self.loss_masks, **self._ids)

    def part(self, samples: Sequence[int]) -> Scenario:
        """Return the step of some of the samples, in the order given."""
        columns = ("total_lengths", "response_lengths", "loss_masks", "features", *self._ids)
        picked = {name: tuple(getattr(self, name)[i] for i in samples) for name in columns}
        return replace(self, **picked)

    def step_units(self, aggregation: Aggregation) -> float:
        """Return the step's units: tokens, samples, rollouts, prompt groups, or `CONSTANT`."""
        return count_step_units(aggregation, self.loss_masks, **self._ids, constant=CONSTANT)

    @property
    def values(self) -> list[FloatArray]:
        """The losses of each sample, float64 [R_i], without the NaN at masked positions."""
        return [np.square(feature @ np.array(self.parameters)) for feature in self.features]

    def expected_value(self, aggregation: Aggregation) -> float:
        """Return the loss every layout must report; `MetricsError` when no token is trained."""
        return self._aggregate(aggregation, self.values)

    def expected_gradient(self, aggregation: Aggregation) -> FloatArray:
        """Return the gradient with respect to `w`, float64 [2], that every layout must reach."""
        outer = [2.0 * (feature @ np.array(self.parameters)) for feature in self.features]
        slopes = (
            [x * feature[:, k] for x, feature in zip(outer, self.features, strict=True)]
            for k in range(2)
        )
        return np.array([self._aggregate(aggregation, slope) for slope in slopes])

    def _aggregate(self, aggregation: Aggregation, values: list[FloatArray]) -> float:
        result = aggregate(aggregation, values, self.loss_masks, **self._ids, constant=CONSTANT)
        if result is None:
            raise MetricsError("the scenario has no trained token")
        return result


def make_scenario(seed: int, *, num_rollouts: int = 8, max_response: int = 90) -> Scenario:
    """Return a step drawn from `seed`.

    Args:
        seed: an integer of at least 0.
        num_rollouts: rollouts of the step, two per prompt, at least 4.
        max_response: longest response, tokens, at least 4.

    Raises:
        MetricsError: for numbers below those.
    """
    num_rollouts = count(num_rollouts, "num_rollouts", minimum=4)
    max_response = count(max_response, "max_response", minimum=4)
    rng = np.random.default_rng(count(seed, "seed", minimum=0))
    siblings = rng.integers(1, 4, num_rollouts)
    siblings[0] = 3
    rollout_ids = np.repeat(rng.permutation(num_rollouts) + 100, siblings)
    n = rollout_ids.size
    responses = rng.integers(1, max_response + 1, n)
    responses[rng.integers(0, n)] = 1
    prompts = rng.integers(1, 20, n)
    mostly_prompt = rng.permutation(n)[: max(n // 4, 1)]
    prompts[mostly_prompt] = responses[mostly_prompt] * 6 + 40
    masks = [(rng.random(length) < 0.8).astype(np.int32) for length in responses]
    for mask, rollout_id in zip(masks, rollout_ids, strict=True):
        mask[-1] = 1
        mask[:] *= rollout_id != rollout_ids[-1]
    features = tuple(
        rng.normal(size=(int(length), 2)).astype(np.float32).astype(np.float64)
        for length in responses
    )
    return Scenario(
        total_lengths=tuple((prompts + responses).tolist()),
        response_lengths=tuple(responses.tolist()),
        loss_masks=tuple(masks),
        features=features,
        rollout_ids=tuple(rollout_ids.tolist()),
        group_ids=tuple((rollout_ids // 2).tolist()),
        parameters=(0.75, -1.25),
    )
