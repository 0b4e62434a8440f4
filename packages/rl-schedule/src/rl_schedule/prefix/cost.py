"""What samples cost that share a prefix: the prefix once, each response in its context.

Tokens of a causal model see only what stands before them, so whatever follows a prefix costs what
the model charges for the whole less what it charges for the prefix.

Invariants: a prefix with one response costs exactly the sample's own cost; further responses never
cost more than they would as samples of their own.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import FloatArray, IntArray
from rl_schedule.cost import CostModel, QuadraticCost, evaluate_cost
from rl_schedule.errors import ScheduleError

__all__ = ["PrefixCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCost:
    """Work of samples that share prefixes, by a cost model `c` of whole samples.

    A prefix of P tokens costs `c(P)`, once per micro-batch. A response of R tokens after it costs
    `c(P + R) - c(P)`. With a `TransformerCost` of t FLOPs per token and f per attended pair that is

    - prefix: `t P + f P^2 / 2`;
    - response: `t R + f (P R + R^2 / 2)`: every token of it sees the whole prefix, and half of the
      response on average;

    and its sliding windows are counted the same way. Example: t = 10, f = 4, one prefix of 3 tokens
    with responses of 2 and 1: 48 + (20 + 32) + (10 + 14) = 124, where two samples of their own cost
    100 + 72 = 172.
    """

    model: CostModel = field(default_factory=QuadraticCost)
    """Forward cost of a whole sample by its length; `TransformerCost` for FLOPs."""

    def prefixes(self, prefix_lengths: IntArray) -> npt.NDArray[Any]:
        """Return the cost of each prefix, `c(P)`, and 0 for one of no tokens.

        Args:
            prefix_lengths: int64 [p], tokens, each >= 0.

        Returns:
            Numbers [p] in the model's unit and dtype.

        Raises:
            ScheduleError: the model returns something that is no cost.
        """
        some = prefix_lengths > 0
        # A model is never asked about a sample of no tokens.
        costs = evaluate_cost(self.model, np.where(some, prefix_lengths, 1))
        return np.where(some, costs, np.zeros_like(costs))

    def responses(self, prefix_lengths: IntArray, response_lengths: IntArray) -> npt.NDArray[Any]:
        """Return the cost of each response after its prefix, `c(P + R) - c(P)`.

        Args:
            prefix_lengths: int64 [n], tokens before each response, each >= 0.
            response_lengths: int64 [n], tokens, each >= 1.

        Returns:
            Numbers [n] >= 0 in the model's unit and dtype.

        Raises:
            ScheduleError: the model returns something that is no cost, or charges less for a sample
                than for its prefix.
        """
        whole = evaluate_cost(self.model, prefix_lengths + response_lengths)
        costs: npt.NDArray[Any] = whole - self.prefixes(prefix_lengths).astype(
            whole.dtype, copy=False
        )
        falling = np.flatnonzero(costs < 0)
        if falling.size:
            first = int(falling[0])
            raise ScheduleError(
                f"the cost model charges less for {int((prefix_lengths + response_lengths)[first])}"
                f" tokens than for their first {int(prefix_lengths[first])}; shared prefixes need a"
                " cost that rises with the length"
            )
        return costs

    def micro_batch(
        self, prefix_ids: IntArray, prefix_lengths: IntArray, response_lengths: IntArray
    ) -> float:
        """Return the work of one micro-batch: each prefix once, and every response.

        Args:
            prefix_ids: int64 [m], which prefix each sample starts with.
            prefix_lengths: int64 [m], its tokens.
            response_lengths: int64 [m], tokens after it.

        Returns:
            The cost in the model's unit; 0.0 for no samples.
        """
        if not prefix_ids.size:
            return 0.0
        _, first = np.unique(prefix_ids, return_index=True)
        once: FloatArray = self.prefixes(prefix_lengths[first]).astype(np.float64)
        return float(once.sum() + self.responses(prefix_lengths, response_lengths).sum())
