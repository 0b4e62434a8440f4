"""The errors of this package.

Every error is a `MetricsError` and therefore a `ValueError`: a caller who does not care about the
kind catches one class. Messages say what was given, where (sample, rank, key), what was expected
and what to do.
"""

from __future__ import annotations

__all__ = ["GeometryError", "KeyAgreementError", "MetricsError", "UnsupportedContractError"]


class MetricsError(ValueError):
    """Something about a loss or a metric is wrong: shapes that disagree, a mask that is none, an unknown aggregation, a record that cannot be merged."""


class GeometryError(MetricsError):
    """A sequence or a stream cannot be cut over the context-parallel ranks as asked: lengths, places or paddings that do not fit, samples that overlap."""


class KeyAgreementError(MetricsError):
    """Ranks or micro-batches of one step report different metrics, ranks pass different settings, or another rank failed before its collective."""


class UnsupportedContractError(MetricsError):
    """A document carries another contract id than the one this package reads, or is no JSON object."""
