"""The errors of this package.

Every error is a `MetricsError` and therefore a `ValueError`: a caller who does not care about the
kind catches one class. Messages say what was given, where (sample, rank, key), what was expected
and what to do.
"""

__all__ = ["GeometryError", "KeyAgreementError", "MetricsError"]


class MetricsError(ValueError):
    """A wrong loss or metric: shapes that disagree, masks with weights, records of two kinds."""


class GeometryError(MetricsError):
    """Lengths, places or paddings that do not fit, or samples that overlap in a stream."""


class KeyAgreementError(MetricsError):
    """Different metrics or settings on the ranks of a group, or a rank that failed before."""
