"""Masked, divided sums of per-token values: a constant number of kernels for any number of samples.

Layer: above ``packing``; tested against the loops of :mod:`rl_metrics.loss_reduction`.

Invariants, tested: the sum over CP ranks is the value of one rank that holds everything; masked positions are chosen away, not multiplied
away, so NaN and infinity there reach neither value nor gradient; an all-masked or empty slice gives 0 with a graph, so that the rank still
takes part in backward; calling the reducer takes four operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_metrics.aggregation import Aggregation
from rl_metrics.context_parallel import ContextParallel, IntArray, check_lengths, int_array
from rl_metrics.errors import MetricsError
from rl_metrics.loss_reduction import reducer_denominators
from rl_metrics.loss_scale import calculates_per_token_loss
from rl_metrics.packing import packed_responses

__all__ = ["LossReducer", "Masks", "get_sum_of_sample_mean", "loss_reducer", "megatron_num_tokens"]

Masks = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]] | Sequence[npt.NDArray[np.integer[Any]]]
"""Loss masks of a micro-batch: one [R_i] per sample, or all of them already concatenated in one tensor."""


class LossReducer:
    """The closure ``x -> scalar`` that :func:`get_sum_of_sample_mean` returns. Call it on this rank's local response values."""

    def __init__(self, trained: torch.Tensor, divisors: torch.Tensor | None) -> None:
        """Keep which local values are trained (bool [n]) and what each is divided by (float64 [n], or None for 1)."""
        self._trained = trained
        self._divisors = divisors

    @property
    def num_values(self) -> int:
        """How many local values a call expects: the response tokens this rank owns, trained or not."""
        return self._trained.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``sum_i (sum over local t of m_it x_it) / D_i`` as a 0-dim tensor in the dtype of ``x``.

        Args:
            x: float [n], this rank's response values, sample after sample in the order of ``response_indices``.

        Raises:
            MetricsError: when the shape is another one, or the dtype is no floating one: a mean of integers would be cut.
        """
        if not x.is_floating_point():
            raise MetricsError(f"got values of dtype {x.dtype}; give floating-point values, such as x.float()")
        if x.shape != self._trained.shape:
            raise MetricsError(
                f"got values of shape {tuple(x.shape)}; this rank owns {self.num_values} response tokens of the micro-batch, so give [{self.num_values}]"
            )
        if self._trained.device != x.device:
            self._trained = self._trained.to(x.device)
            self._divisors = None if self._divisors is None else self._divisors.to(x.device)
        chosen = torch.where(self._trained, x, 0.0)
        divided = chosen if self._divisors is None else chosen / self._divisors
        return divided.sum(dtype=torch.float64).to(x.dtype)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    loss_masks: Masks,
    sample_denoms: torch.Tensor | Sequence[float] | npt.NDArray[Any] | None = None,
    calculate_per_token_loss: bool = False,
    *,
    cp: ContextParallel | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
    stream_length: int | None = None,
    pad_multiple: int | None = None,
) -> LossReducer:
    """Return the reducer of one micro-batch: ``x -> sum_i (sum over local t of m_it x_it) / D_i``.

    ``D_i`` is the sample's own mask sum (the sum of sample means), ``sample_denoms[i]`` where given (with those of
    :func:`rl_metrics.rollout_denominators`: the sum of rollout means), or 1 with ``calculate_per_token_loss`` (the sum over tokens). Masks
    and denominators are of FULL responses, so summing over CP ranks, micro-batches and DP ranks gives the whole. A denominator of 0
    counts as 1.

    Args:
        total_lengths: int [N], prompt and response tokens of each sample, in stream order.
        response_lengths: int [N].
        loss_masks: N FULL masks [R_i], the same on every CP rank; a token is trained where it is not zero. One concatenated tensor
            [sum R_i] spares the concatenation of many small tensors.
        sample_denoms: [N], overrides the own mask sums.
        calculate_per_token_loss: True: no denominators.
        cp: this rank's place; None is one rank that holds everything.
        stream_offsets: int [N], for ``contiguous``; default: sequences back to back.
        stream_length: padded length of the packed stream, for ``contiguous``.
        pad_multiple: what each sequence is padded to a multiple of; as in :func:`rl_metrics.padded_lengths`.

    Returns:
        A callable; it moves its masks to the device of the first ``x`` and keeps them there.

    Raises:
        MetricsError: when lengths, masks and denominators do not fit together.
        GeometryError: as in :func:`rl_metrics.response_slice`.

    Example:
        Responses of 2 and 1 tokens, all trained: ``x = [1, 3, 5]`` gives (1 + 3) / 2 + 5 / 1 = 7.
    """
    totals, lengths = int_array(total_lengths), int_array(response_lengths)
    check_lengths(totals, lengths)
    trained = masks = _full_masks(loss_masks, lengths)
    samples = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
    if cp is not None and cp.size > 1:
        owned = packed_responses(totals, lengths, cp, pad_multiple=pad_multiple, stream_length=stream_length, stream_offsets=stream_offsets)
        trained = masks.index_select(0, torch.from_numpy(owned.flat_indices).to(masks.device))
        samples = owned.samples
    if calculate_per_token_loss:
        return LossReducer(trained, None)
    divisors = _own_mask_sums(masks, lengths) if sample_denoms is None else _given_denominators(sample_denoms, lengths.size)
    divisors = divisors.to(masks.device)
    return LossReducer(trained, divisors.index_select(0, torch.from_numpy(samples).to(masks.device)))


def loss_reducer(
    aggregation: Aggregation,
    total_lengths: Sequence[int] | IntArray,
    response_lengths: Sequence[int] | IntArray,
    loss_masks: Masks,
    *,
    denominators: torch.Tensor | Sequence[float] | npt.NDArray[Any] | None = None,
    cp: ContextParallel | None = None,
    stream_offsets: Sequence[int] | IntArray | None = None,
    stream_length: int | None = None,
    pad_multiple: int | None = None,
) -> LossReducer:
    """Return the reducer of one micro-batch for an aggregation.

    Its outputs, summed over micro-batches and ranks and divided by the step's units, are the loss; :func:`rl_metrics.megatron_loss_scale`
    gives the factor that makes Megatron do so. When a loss drops tokens of its own accord (rejection, masking by ratio), decide about the
    denominator: pass masks without those tokens and ``denominators`` of the original masks to keep the weights of the others.

    Args:
        aggregation: one of the five; see :mod:`rl_metrics.aggregation`.
        total_lengths: int [N], prompt and response tokens of each sample, in stream order.
        response_lengths: int [N].
        loss_masks: FULL masks, as in :func:`get_sum_of_sample_mean`.
        denominators: [N], from :func:`rl_metrics.loss_denominators` over the WHOLE step; required by ``rollout_mean`` and
            ``prompt_mean``, optional for ``sample_mean``, refused (other than ones) for ``token_mean`` and ``constant``.
        cp: this rank's place; None is one rank that holds everything.
        stream_offsets: as in :func:`get_sum_of_sample_mean`.
        stream_length: as in :func:`get_sum_of_sample_mean`.
        pad_multiple: as in :func:`get_sum_of_sample_mean`.

    Returns:
        As :func:`get_sum_of_sample_mean`.

    Raises:
        MetricsError: for an unknown aggregation or missing denominators, and as in :func:`get_sum_of_sample_mean`.
    """
    on_device = isinstance(denominators, torch.Tensor) and denominators.device.type != "cpu"
    if on_device and aggregation in ("token_mean", "constant"):
        denominators = torch.as_tensor(denominators).cpu()
    sample_denoms, per_token = reducer_denominators(aggregation, denominators)
    return get_sum_of_sample_mean(
        total_lengths,
        response_lengths,
        loss_masks,
        sample_denoms,
        per_token,
        cp=cp,
        stream_offsets=stream_offsets,
        stream_length=stream_length,
        pad_multiple=pad_multiple,
    )


def megatron_num_tokens(aggregation: Aggregation, loss_masks: Masks) -> torch.Tensor:
    """Return the second element of Megatron's loss function result for one micro-batch.

    Args:
        aggregation: one of the five.
        loss_masks: FULL masks of the micro-batch, as in :func:`get_sum_of_sample_mean`.

    Returns:
        int32 []: for ``token_mean`` the trained tokens (no fake token for masked samples), else 1, by which Megatron divides.

    Raises:
        MetricsError: for an unknown aggregation.
    """
    if not calculates_per_token_loss(aggregation):
        return torch.ones((), dtype=torch.int32, device=_device_of(loss_masks))
    return _concatenated(loss_masks).ne(0).sum(dtype=torch.int32)


def _device_of(loss_masks: Masks) -> torch.device:
    first = loss_masks if isinstance(loss_masks, torch.Tensor) else next(iter(loss_masks), None)
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")


def _concatenated(loss_masks: Masks) -> torch.Tensor:
    """Return all masks as one flat tensor."""
    if isinstance(loss_masks, torch.Tensor):
        return loss_masks.reshape(-1)
    masks = list(loss_masks)
    if not masks:
        return torch.empty(0, dtype=torch.int32)
    if isinstance(masks[0], torch.Tensor):
        return torch.cat([torch.as_tensor(mask).reshape(-1) for mask in masks])
    return torch.from_numpy(np.concatenate([np.asarray(mask).reshape(-1) for mask in masks]))


def _full_masks(loss_masks: Masks, lengths: IntArray) -> torch.Tensor:
    """Return which response tokens are trained, bool [sum R_i], after checking the sizes of the masks."""
    if not isinstance(loss_masks, torch.Tensor):
        sizes = [len(mask) for mask in loss_masks]
        if len(sizes) != lengths.size:
            raise MetricsError(f"{len(sizes)} loss masks for {lengths.size} samples; give one per sample")
        for i, (size, length) in enumerate(zip(sizes, lengths.tolist(), strict=True)):
            if size != length:
                raise MetricsError(
                    f"sample {i}: loss mask has {size} entries, the response {length} tokens; give the FULL mask on every rank"
                )
    masks = _concatenated(loss_masks)
    if masks.numel() != int(lengths.sum()):
        raise MetricsError(f"the concatenated loss mask has {masks.numel()} entries, the responses {int(lengths.sum())} tokens")
    return masks.ne(0)


def _own_mask_sums(masks: torch.Tensor, lengths: IntArray) -> torch.Tensor:
    """Return each sample's denominator: its trained tokens, 0 as 1; float64 [N] on the masks' device."""
    if not lengths.size:
        return torch.empty(0, dtype=torch.float64, device=masks.device)
    sizes = torch.from_numpy(lengths).to(masks.device)
    sums = torch.segment_reduce(masks.to(torch.float64), "sum", lengths=sizes, initial=0.0, unsafe=True)
    return sums.clamp_min_(1.0)


def _given_denominators(sample_denoms: Any, num_samples: int) -> torch.Tensor:
    """Return each sample's given denominator, 0 as 1; float64 [N]."""
    if not isinstance(sample_denoms, torch.Tensor):
        sample_denoms = torch.from_numpy(np.asarray([float(value) for value in sample_denoms], np.float64))
    if sample_denoms.shape != (num_samples,):
        raise MetricsError(f"sample_denoms has shape {tuple(sample_denoms.shape)} for {num_samples} samples; give one per sample")
    denominators = sample_denoms.to(torch.float64)
    if denominators.device.type == "cpu":
        # On a device the check would wait for it; denominators come from the host.
        values = denominators.numpy()
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if wrong.size:
            raise MetricsError(
                f"sample {wrong[0]}: denominator {values[wrong[0]]}; give a finite number that is not negative, 0 counts as 1"
            )
    return torch.where(denominators == 0, 1.0, denominators)
