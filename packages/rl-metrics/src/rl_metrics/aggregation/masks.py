"""Which tokens are trained: the one rule for masks.

A mask holds booleans, or numbers that are exactly 0 or 1. Anything else (0.5, 2, -1, NaN) is an
error that names sample and position: such a value is a weight, and weights belong into the loss.

Invariant, tested: all functions of this package that take a mask, on arrays and on tensors, refuse
the same masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rl_metrics.arguments import BoolArray, FloatArray, IntArray, as_array, listed
from rl_metrics.errors import MetricsError

__all__ = [
    "check_mask_lengths",
    "concatenated_masks",
    "is_trained",
    "listed_masks",
    "sums_of_pieces",
    "trained_tokens",
    "trained_values",
]

_RULE = (
    "a mask holds booleans, or exactly 0 and 1; weights belong into the values, not into the mask"
)
"""The end of every error about a mask."""


def is_trained(mask: npt.ArrayLike, what: str) -> BoolArray:
    """Return a mask as booleans.

    Args:
        mask: any shape, of booleans or of 0 and 1.
        what: subject of the error.

    Raises:
        MetricsError: naming the first entry that is neither 0 nor 1, and its index.
    """
    array = as_array(mask, what)
    wrong = _first_wrong(array)
    if wrong is not None:
        index = tuple(int(i) for i in np.unravel_index(wrong, array.shape))
        place = ", ".join(map(str, index)) or "()"
        raise MetricsError(f"{what} holds {array[index].item()!r} at index {place}; {_RULE}")
    return array.astype(np.bool_, copy=False)


def listed_masks(loss_masks: Iterable[Any]) -> list[Any]:
    """Return one mask per sample, unchecked, from any iterable, which is gone through once.

    Args:
        loss_masks: N masks.

    Raises:
        MetricsError: for anything that is no list, and for one array of several dimensions: its
            rows are padded to one length, which is not that of the responses.
    """
    if getattr(loss_masks, "ndim", 1) > 1:
        raise MetricsError(
            f"loss_masks is one array of shape {tuple(getattr(loss_masks, 'shape', ()))}; give one"
            " flat mask per sample, cut to its response, or use padded_loss_reducer"
        )
    return listed(loss_masks, "loss_masks, one per sample")


def trained_tokens(flat: npt.NDArray[Any], lengths: IntArray) -> BoolArray:
    """Return the concatenated masks of several samples as booleans.

    Args:
        flat: [sum R_i], of booleans or of 0 and 1.
        lengths: int64 [N], `R_i`, to name the sample.

    Raises:
        MetricsError: naming sample and response token of the first entry that is neither 0 nor 1.
    """
    wrong = _first_wrong(flat)
    if wrong is not None:
        ends = np.cumsum(lengths)
        i = int(np.searchsorted(ends, wrong, side="right"))
        token = wrong - int(ends[i] - lengths[i])
        raise MetricsError(
            f"sample {i}: loss mask holds {flat[wrong].item()!r} at response token {token}; {_RULE}"
        )
    return flat.astype(np.bool_, copy=False)


def concatenated_masks(loss_masks: Iterable[Any]) -> tuple[BoolArray, IntArray]:
    """Return the masks of several samples in one array.

    Args:
        loss_masks: N masks [R_i]: lists, numpy arrays or tensors; or one array or tensor [N, T].

    Returns:
        bool [sum R_i], and the lengths int64 [N], `T` for each row of an array.

    Raises:
        MetricsError: when there is no list of masks, a mask is not flat, or as in `trained_tokens`.
    """
    if getattr(loss_masks, "ndim", 1) == 2:
        # One array, one transfer where it lies on a device.
        rows = as_array(cast("Any", loss_masks), "loss_masks")
        widths = np.full(rows.shape[0], rows.shape[1], np.int64)
        return trained_tokens(rows.reshape(-1), widths), widths
    masks = [
        as_array(mask, f"sample {i}: loss mask") for i, mask in enumerate(listed_masks(loss_masks))
    ]
    for i, mask in enumerate(masks):
        if mask.ndim != 1:
            raise MetricsError(
                f"sample {i}: loss mask has shape {mask.shape}; give one entry per response token"
            )
    lengths = np.array([mask.size for mask in masks], np.int64)
    flat = (
        np.concatenate([mask for mask in masks if mask.size])
        if lengths.any()
        else np.empty(0, np.bool_)
    )
    return trained_tokens(flat, lengths), lengths


def check_mask_lengths(sizes: IntArray, response_lengths: IntArray) -> None:
    """Raise `MetricsError` unless every sample has one mask with an entry per response token.

    Args:
        sizes: int64 [N], entries of each mask.
        response_lengths: int64 [N], tokens of each response.
    """
    if sizes.size != response_lengths.size:
        raise MetricsError(
            f"{sizes.size} loss masks for {response_lengths.size} samples; give one per sample"
        )
    wrong = np.flatnonzero(sizes != response_lengths)
    if wrong.size:
        i = int(wrong[0])
        raise MetricsError(
            f"sample {i}: loss mask has {sizes[i]} entries, the response {response_lengths[i]}"
            " tokens; give the FULL mask on every rank"
        )


def sums_of_pieces(trained: BoolArray, lengths: IntArray) -> FloatArray:
    """Return how many entries of each piece of a flat mask are set.

    Args:
        trained: bool [sum R_i].
        lengths: int64 [N], `R_i`.

    Returns:
        float64 [N].
    """
    sums = np.zeros(lengths.size, np.float64)
    # Empty pieces have no start of their own: reduceat would give them the entry of the next piece.
    filled = lengths > 0
    if filled.any():
        starts = (np.cumsum(lengths) - lengths)[filled]
        sums[filled] = np.add.reduceat(trained, starts, dtype=np.int64)
    return sums


def trained_values(values: FloatArray, mask: npt.ArrayLike | None) -> FloatArray:
    """Return the entries of an array that its mask trains, flat; all of them without a mask.

    Args:
        values: float64, any shape.
        mask: same shape, of booleans or 0 and 1, or None.

    Raises:
        MetricsError: when the shapes differ, or as in `is_trained`.
    """
    if mask is None:
        return values.reshape(-1)
    trained = is_trained(mask, "the mask")
    if trained.shape != values.shape:
        raise MetricsError(f"values have shape {values.shape} but the mask {trained.shape}")
    chosen: FloatArray = values[trained]
    return chosen


def _first_wrong(array: npt.NDArray[Any]) -> int | None:
    """Return the flat index of the first entry that is neither 0 nor 1; NaN is neither."""
    if array.dtype.kind == "b":
        return None
    # 0 and 1 alone equal their own truth value.
    wrong = np.flatnonzero(array != (array != 0))
    return int(wrong[0]) if wrong.size else None
