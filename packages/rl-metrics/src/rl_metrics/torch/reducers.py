"""Masked, divided sums of per-token values: a constant number of kernels for any number of samples.

A reducer is made on the host, once per micro-batch: masks are checked and counted there, and what
each token is divided by is laid out. Calling it is tensor code that never waits for a device. Axes:
N samples of the micro-batch, T response tokens that this rank owns.

Invariants, tested: the sum over CP ranks is the value of one rank that holds everything; masked
positions are chosen away, not multiplied away, so NaN and infinity there reach neither value nor
gradient; an all-masked or empty slice gives 0 with a graph, so that the rank still takes part in
backward; making a reducer launches no kernel, calling it takes four operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from rl_metrics.aggregation.aggregation import Aggregation
from rl_metrics.aggregation.denominators import checked_denominators
from rl_metrics.aggregation.loss_reduction import reducer_denominators
from rl_metrics.aggregation.loss_scale import calculates_per_token_loss
from rl_metrics.aggregation.masks import sums_of_pieces, trained_tokens
from rl_metrics.arguments import BoolArray, FloatArray, IntArray, as_array, flag
from rl_metrics.errors import MetricsError
from rl_metrics.geometry.context_parallel import ContextParallel, check_place, int_array
from rl_metrics.geometry.packing import packed_responses
from rl_metrics.geometry.responses import check_lengths
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.step_report import MicroBatchMetrics
from rl_metrics.torch.masks import Masks, as_masks, device_of, host_masks

__all__ = [
    "LossReducer",
    "Masks",
    "get_sum_of_sample_mean",
    "loss_reducer",
    "megatron_num_tokens",
    "padded_loss_reducer",
]


class LossReducer:
    """The closure `x -> scalar` that `get_sum_of_sample_mean` returns.

    Call it on this rank's local response values. It may be made and called under
    `torch.inference_mode` and still be used for training afterwards.
    """

    num_tokens: int
    """Trained tokens by the FULL masks of the micro-batch, the same on every CP rank."""

    weight: float
    """What the trained values of this rank weigh: `sum_i (sum_t m_it) / D_i`.

    Added up over micro-batches and ranks it is the number of samples, rollouts or prompts of the
    step that have a trained token; of trained tokens for `token_mean` and `constant`. The divisor
    of a diagnostic, which leaves out what has no trained token.
    """

    def __init__(
        self,
        trained: BoolArray,
        divisors: FloatArray | None,
        device: torch.device,
        *,
        num_tokens: int,
        weight: float,
    ) -> None:
        """Keep which local values are trained, and what each is divided by, None for 1.

        Both have the shape of the values, or `divisors` one that broadcasts to it.
        """
        self.num_tokens, self.weight = num_tokens, weight
        # Tensors made in inference mode could not be saved for a backward pass later.
        with torch.inference_mode(False):
            # A copy: the caller may go on to change the memory of a boolean mask.
            self._trained = torch.from_numpy(np.array(trained)).to(device)
            self._divisors = None if divisors is None else torch.from_numpy(divisors).to(device)

    @property
    def num_values(self) -> int:
        """How many values a call expects: the response tokens this rank owns, trained or not."""
        return self._trained.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `sum_i (sum_t m_it x_it) / D_i`, 0-dim: float64 for float64, else float32.

        A result of 16 bits would round away what ranks add up, and float16 overflows at 65,504
        tokens of 1. The gradient has the dtype of `x`. What reaches `x` is chosen, so a masked NaN
        adds nothing to the gradient of `x`; but an operation before it, such as `log` or a
        division, multiplies that 0 by its own slope, and 0 times infinity is NaN. Mask before such
        an operation.

        Args:
            x: float [T], this rank's response values, sample after sample in the order of
                `response_indices`, on any device; float [N, T] for a padded micro-batch.

        Raises:
            MetricsError: when `x` is no tensor, the shape is another one, or the dtype is no
                floating one: a mean of integers would be cut.
        """
        shape = list(self._trained.shape)
        if not isinstance(x, torch.Tensor):
            raise MetricsError(
                f"got values of type {type(x).__name__}; give a floating-point tensor {shape}"
            )
        if not x.is_floating_point():
            raise MetricsError(
                f"got values of dtype {x.dtype}; give floating-point values, such as x.float()"
            )
        if x.shape != self._trained.shape:
            raise MetricsError(
                f"got values of shape {tuple(x.shape)}; this rank owns {self.num_values} response"
                f" tokens of the micro-batch, so give {shape}"
            )
        if self._trained.device != x.device:
            with torch.inference_mode(False):
                self._trained = self._trained.to(x.device)
                self._divisors = None if self._divisors is None else self._divisors.to(x.device)
        # Chosen, not multiplied: 0 times NaN is NaN.
        chosen = torch.where(self._trained, x, 0.0)
        divided = chosen if self._divisors is None else chosen / self._divisors
        return divided.sum(dtype=torch.float64).to(
            torch.float64 if x.dtype == torch.float64 else torch.float32
        )

    def diagnostic(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return numerator and weight of a diagnostic, such as an entropy, without a graph.

        For `MicroBatchMetrics(diagnostics={"entropy": reduce.diagnostic(entropy)}, ...)`. Its mean
        over the step is that over the units that have a trained token, whereas a loss is divided
        by all units.

        Args:
            x: as in a call.

        Returns:
            `(self(x), self.weight)`; the former a 0-dim tensor on the device of `x`.

        Raises:
            MetricsError: as in a call.

        Example:
            2.0 on every trained token of two rollouts, one of them fully masked, by `rollout_mean`:
            2.0 and 1.0, so the mean is 2.0.
        """
        with torch.no_grad():
            return self(x), self.weight

    def metrics(
        self,
        *,
        sums: Mapping[str, torch.Tensor],
        diagnostics: Mapping[str, torch.Tensor] | None = None,
        metrics: Sequence[Metric] = (),
    ) -> MicroBatchMetrics:
        """Return what this micro-batch reports, for `rl_metrics.torch.reduce_train_step_metrics`.

        Args:
            sums: name -> output of this reducer, unscaled, such as `{"loss": reduce(losses)}`; kept
                as a copy without its graph, since Megatron divides the loss in place.
            diagnostics: name -> values as in a call, reduced by `diagnostic`.
            metrics: further records with a kind of their own.

        Raises:
            MetricsError: as in a call, and for sums or diagnostics that are no tensors by name.
        """
        _check_tensors("sums", sums)
        _check_tensors("diagnostics", {} if diagnostics is None else diagnostics)
        return MicroBatchMetrics(
            sums={name: total.detach().clone() for name, total in sums.items()},
            num_tokens=self.num_tokens,
            metrics=metrics,
            diagnostics={name: self.diagnostic(x) for name, x in (diagnostics or {}).items()},
        )


def _check_tensors(what: str, given: object) -> None:
    """Refuse what is no mapping from names to tensors, naming the key."""
    wanted = "reduce(losses)" if what == "sums" else "the values per token"
    if not isinstance(given, Mapping):
        raise MetricsError(
            f"{what} is {type(given).__name__}; give a mapping from names to tensors, such as"
            f' {{"loss": {wanted}}}'
        )
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise MetricsError(
                f"{what}[{name!r}] is {type(value).__name__}; give a tensor, {wanted}"
            )


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
    """Return the reducer of one micro-batch: `x -> sum_i (sum over local t of m_it x_it) / D_i`.

    `D_i` is the sample's own mask sum (the sum of sample means), `sample_denoms[i]` where given
    (with those of `rl_metrics.rollout_denominators`: the sum of rollout means), or 1 with
    `calculate_per_token_loss` (the sum over tokens). Masks and denominators are of FULL responses,
    so summing over CP ranks, micro-batches and DP ranks gives the whole. A denominator of 0 counts
    as 1.

    Args:
        total_lengths: int [N], prompt and response tokens of each sample, in stream order.
        response_lengths: int [N].
        loss_masks: N FULL masks [R_i], the same on every CP rank, of booleans or exactly 0 and 1:
            lists, arrays or tensors. One concatenated tensor [sum R_i] spares the concatenation of
            many small tensors. They are checked here, on the host: masks on a device are copied to
            it, one transfer that waits for the device; masks on the host cost no wait.
        sample_denoms: [N], overrides the own mask sums; checked on the host like the masks.
        calculate_per_token_loss: True: no denominators.
        cp: this rank's place; None is one rank that holds everything.
        stream_offsets: int [N], for `contiguous`; default: sequences back to back.
        stream_length: padded length of the packed stream, for `contiguous`.
        pad_multiple: what each sequence is padded to a multiple of; as in
            `rl_metrics.padded_lengths`.

    Returns:
        A callable; it keeps what it needs on the masks' device and moves it to that of the first
        `x` where that is another.

    Raises:
        MetricsError: when lengths, masks and denominators do not fit together, a mask holds
            something else than 0 and 1 (it names sample and token), or a denominator is negative or
            not finite.
        GeometryError: as in `rl_metrics.response_slice`.

    Example:
        Responses of 2 and 1 tokens, all trained: `x = [1, 3, 5]` gives (1 + 3) / 2 + 5 / 1 = 7.
    """
    totals, lengths = int_array(total_lengths), int_array(response_lengths)
    check_lengths(totals, lengths)
    given_masks = as_masks(loss_masks)
    masks = host_masks(given_masks, lengths)
    trained_T, counts_N = masks, lengths
    place = ContextParallel() if cp is None else cp
    check_place(place)
    stream: dict[str, Any] = {
        "pad_multiple": pad_multiple,
        "stream_length": stream_length,
        "stream_offsets": stream_offsets,
    }
    # One rank without a stream holds all response tokens in their order.
    if place.size > 1 or any(value is not None for value in stream.values()):
        owned = packed_responses(totals, lengths, place, **stream)
        trained_T, counts_N = masks[owned.flat_indices], owned.counts
    divisors_T, num_tokens = None, int(np.count_nonzero(masks))
    weight = float(np.count_nonzero(trained_T))
    if not flag(calculate_per_token_loss, "calculate_per_token_loss"):
        own = sums_of_pieces(masks, lengths)
        divisors_N = checked_denominators(own if sample_denoms is None else sample_denoms, own.size)
        divisors_T = np.repeat(divisors_N, counts_N)
        weight = float(np.sum(sums_of_pieces(trained_T, counts_N) / divisors_N))
    device = device_of(given_masks)
    return LossReducer(trained_T, divisors_T, device, num_tokens=num_tokens, weight=weight)


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

    Its outputs, summed over micro-batches and ranks and divided by the step's units, are the loss;
    `rl_metrics.megatron_loss_scale` gives the factor that makes Megatron do so. When a loss drops
    tokens of its own accord (rejection, masking by ratio), decide about the denominator: pass masks
    without those tokens and `denominators` of the original masks to keep the weights of the others.

    Args:
        aggregation: one of the five; see `rl_metrics.aggregation`.
        total_lengths: int [N], prompt and response tokens of each sample, in stream order.
        response_lengths: int [N].
        loss_masks: FULL masks, as in `get_sum_of_sample_mean`.
        denominators: [N], from `rl_metrics.loss_denominators` over the WHOLE step; required by
            `rollout_mean` and `prompt_mean`, optional for `sample_mean`, refused (other than ones)
            for `token_mean` and `constant`.
        cp: this rank's place; None is one rank that holds everything.
        stream_offsets: as in `get_sum_of_sample_mean`.
        stream_length: as in `get_sum_of_sample_mean`.
        pad_multiple: as in `get_sum_of_sample_mean`.

    Returns:
        As `get_sum_of_sample_mean`.

    Raises:
        MetricsError: for an unknown aggregation or missing denominators, and as in
            `get_sum_of_sample_mean`.
    """
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


def padded_loss_reducer(
    aggregation: Aggregation,
    loss_masks: torch.Tensor | npt.NDArray[Any] | Sequence[Sequence[int]],
    *,
    denominators: torch.Tensor | Sequence[float] | npt.NDArray[Any] | None = None,
) -> LossReducer:
    """Return the reducer of a micro-batch whose samples are the rows of one padded tensor.

    Padding, on either side, and prompt tokens have mask 0; what stands there enters nothing. The
    result is that of `loss_reducer` on the same samples without their padding, so that the width to
    which a micro-batch is padded does not matter. Rows are whole samples: there is no context
    parallelism here.

    Args:
        aggregation: one of the five; see `rl_metrics.aggregation`.
        loss_masks: [N, T], of booleans or exactly 0 and 1. Checked here, on the host: a mask on a
            device is copied to it, one transfer that waits for the device. An empty list is no
            samples, [0, 0].
        denominators: as in `loss_reducer`.

    Returns:
        A callable on values [N, T]; as in `get_sum_of_sample_mean`.

    Raises:
        MetricsError: when the masks are no [N, T], a mask holds something else than 0 and 1 (it
            names sample and token), and as in `loss_reducer`.

    Example:
        Rows `[1, 3]` and `[5, 9]` with masks `[1, 1]` and `[1, 0]`, `sample_mean`: (1 + 3) / 2 + 5
        / 1 = 7.
    """
    sample_denoms, per_token = reducer_denominators(aggregation, denominators)
    rows = as_array(cast("Any", loss_masks), "the padded loss mask")
    if rows.shape == (0,) and not isinstance(loss_masks, torch.Tensor | np.ndarray):
        rows = rows.reshape(0, 0)
    if rows.ndim != 2:
        raise MetricsError(
            f"the padded loss mask has shape {rows.shape}; give [samples, tokens], 0 at padding, or"
            " use loss_reducer for masks of unequal length"
        )
    widths = np.full(rows.shape[0], rows.shape[1], np.int64)
    trained_NT = trained_tokens(rows.reshape(-1), widths).reshape(rows.shape)
    own = trained_NT.sum(axis=1, dtype=np.float64)
    divisors_N1, weight = None, float(own.sum())
    if not per_token:
        given = own if sample_denoms is None else sample_denoms
        divisors_N = checked_denominators(given, own.size)
        divisors_N1, weight = divisors_N[:, None], float(np.sum(own / divisors_N))
    device = loss_masks.device if isinstance(loss_masks, torch.Tensor) else torch.device("cpu")
    num_tokens = int(own.sum())
    return LossReducer(trained_NT, divisors_N1, device, num_tokens=num_tokens, weight=weight)


def megatron_num_tokens(aggregation: Aggregation, loss_masks: Masks) -> torch.Tensor:
    """Return the second element of Megatron's loss function result for one micro-batch.

    Args:
        aggregation: one of the five.
        loss_masks: FULL masks of the micro-batch, as in `get_sum_of_sample_mean`, checked for every
            aggregation. One flat tensor of booleans is counted where it lies; other masks on a
            device are brought to the host to be checked, which waits for the device.

    Returns:
        int32 [], on the masks' device: for `token_mean` the trained tokens (no fake token for
        masked samples), else 1, by which Megatron divides.

    Raises:
        MetricsError: for an unknown aggregation, or masks that hold something else than booleans or
            0 and 1.
    """
    per_token, masks = calculates_per_token_loss(aggregation), as_masks(loss_masks)
    if isinstance(masks, torch.Tensor) and masks.dtype == torch.bool and masks.dim() == 1:
        one = torch.ones((), dtype=torch.int32, device=masks.device)
        return masks.sum(dtype=torch.int32) if per_token else one
    trained = int(np.count_nonzero(host_masks(masks, None)))
    return torch.tensor(trained if per_token else 1, dtype=torch.int32, device=device_of(masks))
