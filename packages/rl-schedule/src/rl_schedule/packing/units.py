"""Samples that must share a micro-batch, as one thing to pack.

Invariant: every sample is in exactly one unit; units are numbered by their first sample.

Axis letters: N samples, U units.
"""

from dataclasses import dataclass

import numpy as np

from rl_schedule.arrays import IntArray

__all__ = ["Units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Samples grouped by what they are kept together with.

    Example: lengths 7, 3, 5 kept together by 4, 9, 4 are two units, of 12 tokens in 2 samples
    (longest 7) and of 3 tokens in 1 sample.
    """

    of: IntArray
    """int64 [N]: unit of each sample."""
    first: IntArray
    """int64 [U]: first sample of each unit."""
    counts: IntArray
    """int64 [U]: samples."""
    tokens: IntArray
    """int64 [U]: padded tokens of all its samples."""
    longest: IntArray
    """int64 [U]: padded tokens of its longest sample."""

    @classmethod
    def of_samples(cls, lengths: IntArray, keep_together: object = None) -> "Units":
        """Group samples by id; without ids each is a unit of its own.

        Args:
            lengths: int64 [N], padded tokens.
            keep_together: int64 [N] or None.
        """
        if keep_together is None:
            alone = np.arange(lengths.size, dtype=np.int64)
            return cls(
                of=alone, first=alone, counts=np.ones_like(alone), tokens=lengths, longest=lengths
            )
        _, first, inverse, counts = np.unique(
            np.asarray(keep_together), return_index=True, return_inverse=True, return_counts=True
        )
        # unique sorts by id; the argsort of a permutation is its inverse: the number of each id.
        order = np.argsort(first, kind="stable")
        of = np.argsort(order)[inverse.reshape(-1)].astype(np.int64)
        tokens, longest = np.zeros((2, order.size), dtype=np.int64)
        np.add.at(tokens, of, lengths)
        np.maximum.at(longest, of, lengths)
        return cls(
            of=of,
            first=first[order].astype(np.int64),
            counts=counts[order].astype(np.int64),
            tokens=tokens,
            longest=longest,
        )

    def footprints(self, padded: bool) -> IntArray:
        """Return the tokens each unit takes alone, padded to its longest or not, int64 [U]."""
        return self.longest * self.counts if padded else self.tokens
