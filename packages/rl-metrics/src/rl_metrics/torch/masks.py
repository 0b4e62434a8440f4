"""Loss masks of a micro-batch, wherever they lie, held to the one rule for masks.

Checking a mask means looking at it, so masks on a device are copied to the host: one transfer per
call whatever the number of samples, which waits for the device. Masks that are on the host already,
as lists, arrays or CPU tensors, cost no wait. Invariant, tested: what passes here passes in the
numpy code, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_metrics.aggregation.masks import (
    check_mask_lengths,
    concatenated_masks,
    listed_masks,
    trained_tokens,
)
from rl_metrics.arguments import BoolArray, IntArray, as_array
from rl_metrics.errors import MetricsError

__all__ = ["Masks", "as_masks", "device_of", "host_masks"]

Masks = (
    torch.Tensor
    | Sequence[torch.Tensor]
    | Sequence[Sequence[int]]
    | Sequence[npt.NDArray[np.integer[Any]]]
)
"""Loss masks of a micro-batch, of booleans or of 0 and 1.

One [R_i] per sample, or all of them already concatenated in one tensor.
"""


def as_masks(loss_masks: Masks) -> torch.Tensor | list[Any]:
    """Return masks as what the functions below take: a tensor, or a list.

    Raises:
        MetricsError: as in `rl_metrics.aggregation.masks.listed_masks`.
    """
    return loss_masks if isinstance(loss_masks, torch.Tensor) else listed_masks(loss_masks)


def device_of(loss_masks: torch.Tensor | list[Any]) -> torch.device:
    """Return the device the masks lie on; the CPU for lists and arrays."""
    first = loss_masks if isinstance(loss_masks, torch.Tensor) else next(iter(loss_masks), None)
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")


def host_masks(
    loss_masks: torch.Tensor | list[Any], response_lengths: IntArray | None
) -> BoolArray:
    """Return which response tokens of a micro-batch are trained, on the host.

    Args:
        loss_masks: FULL masks in any form.
        response_lengths: int64 [N], tokens of each response; None where only the masks are known.

    Returns:
        bool [sum R_i], sample after sample.

    Raises:
        MetricsError: when the sizes of masks and responses differ, or a mask holds something else
            than booleans or 0 and 1; it names sample and token.
    """
    if isinstance(loss_masks, torch.Tensor):
        whole = np.array([loss_masks.numel()], np.int64)
        lengths = whole if response_lengths is None else response_lengths
        if loss_masks.dim() != 1 or whole[0] != lengths.sum():
            raise MetricsError(
                f"the concatenated loss mask has shape {tuple(loss_masks.shape)}, the responses"
                f" {lengths.sum()} tokens; give one flat tensor of all of them, or use"
                " padded_loss_reducer"
            )
        return trained_tokens(as_array(loss_masks, "the concatenated loss mask"), lengths)
    if loss_masks and isinstance(loss_masks[0], torch.Tensor):
        flat, lengths = _concatenated(loss_masks)
        trained = trained_tokens(flat, lengths)
    else:
        trained, lengths = concatenated_masks(loss_masks)
    if response_lengths is not None:
        check_mask_lengths(lengths, response_lengths)
    return trained


def _concatenated(masks: list[Any]) -> tuple[npt.NDArray[Any], IntArray]:
    """Return masks that are tensors in one host array, with one transfer, and their lengths."""
    for i, mask in enumerate(masks):
        if not isinstance(mask, torch.Tensor):
            raise MetricsError(
                f"sample {i}: loss mask is {type(mask).__name__} where sample 0 has a tensor; give"
                " all masks in one form"
            )
        if mask.dim() != 1:
            raise MetricsError(
                f"sample {i}: loss mask has shape {tuple(mask.shape)}; give one entry per response"
                " token"
            )
        if mask.device != masks[0].device:
            raise MetricsError(
                f"sample {i}: loss mask lies on {mask.device}, that of sample 0 on"
                f" {masks[0].device}; give all on one device"
            )
    lengths = np.array([mask.numel() for mask in masks], np.int64)
    # Joined where they lie: one transfer, whatever the number of samples.
    return as_array(torch.cat(masks), "the loss masks"), lengths
