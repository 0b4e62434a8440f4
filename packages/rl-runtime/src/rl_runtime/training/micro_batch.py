"""Pack the samples of one micro-batch into this rank's part of one stream.

Every sequence is padded to a multiple of 2 * cp, the stream's tail to what tensor parallelism
needs. A filler is a stream of `2 * cp * tp` padding tokens without samples: it runs through the
model like any other micro-batch and weighs nothing.

Legend: T = local tokens of the stream, K = local response tokens, n = samples.

Invariants: the K entries are the response tokens that rl-metrics' geometry gives to this rank,
sample by sample, ascending; padding tokens are never scored; every trained token has a score; loss
masks are kept whole on every context-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rl_dump import RaggedArray
from rl_metrics import ContextParallel, packed_responses, packed_token_index, padded_lengths
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.attention import PackedStream, pack_stream
from rl_runtime.megatron.rotary import RotaryTable
from rl_topp import NucleusSet

__all__ = ["MicroBatch", "PackingRules", "local_values", "pack_micro_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """What packing depends on, besides the samples."""

    cp: ContextParallel
    """This rank's place in its context-parallel group."""
    tp_size: int
    """Tensor-parallel ranks."""
    vocab_size: int
    """Token ids of the model, without padding."""
    rotary: RotaryTable
    """The model's rotary angles."""
    device: torch.device
    """Where tensors go."""
    dtype: torch.dtype
    """Dtype of activations."""
    use_kept_sets: bool
    """Whether log-probs are taken over recorded kept sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on one rank. All tensors are on the device."""

    samples: npt.NDArray[np.int64]
    """int64 [n]: indices into the rank's columns; empty for a filler."""
    tokens_1T: torch.Tensor
    """int64 [1, T], token ids; 0 where padding."""
    positions_1T: torch.Tensor
    """int64 [1, T], position of each token in its sequence; 0 where padding."""
    stream: PackedStream
    """Description of the stream for the model."""
    counts: npt.NDArray[np.int64]
    """int64 [n]: local response tokens of each sample; sums to K."""
    response_indices: npt.NDArray[np.int64]
    """int64 [K]: index of each local response token in its own response."""
    rows_K: torch.Tensor
    """int64 [K]: local row whose logits predict the token."""
    targets_K: torch.Tensor
    """int64 [K]: the token's id."""
    trained_K: torch.Tensor
    """bool [K]: loss mask."""
    kept_sets: NucleusSet
    """Kept sets of the K tokens; whole vocabulary where none are used."""
    total_lengths: npt.NDArray[np.int64]
    """int64 [n], tokens."""
    response_lengths: npt.NDArray[np.int64]
    """int64 [n], tokens."""
    loss_masks: tuple[npt.NDArray[np.int32], ...]
    """Per sample int32 [R]: the whole mask, on every rank."""
    denominators: npt.NDArray[np.float32] | None
    """float32 [n]: what each sample's masked sum is divided by; None where the aggregation needs none."""
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    """Response-aligned values, float32 [K] each, by contract name: what was computed before and what this rank computes."""

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of the whole micro-batch, over all context-parallel ranks."""
        return int(sum(int(mask.sum()) for mask in self.loss_masks))

    @property
    def num_local_tokens(self) -> int:
        """K."""
        return self.targets_K.numel()


def pack_micro_batch(
    columns: Mapping[str, Column], samples: npt.NDArray[np.int64], rules: PackingRules
) -> MicroBatch:
    """Pack samples.

    Args:
        columns: the rank's columns; `tokens` and `loss_masks` are needed, `rollout_log_probs`,
            `loss_denominators` and the kept sets are used where present.
        samples: int64 [n], which of them; none makes a filler.
        rules: this rank's place and the model.

    Returns:
        The micro-batch.

    Raises:
        MetricsError: a sample without a prompt token.
        NucleusError: kept sets that do not form a record.
        TrainerError: a token that is trained and whose kept set gives it no log-prob.
    """
    tokens, masks = _items(columns["tokens"], samples), _items(columns["loss_masks"], samples)
    totals = np.array([item.size for item in tokens], np.int64)
    responses = np.array([item.size for item in masks], np.int64)
    stream_lengths, local = _layout(totals, rules)
    owned = packed_responses(totals, responses, rules.cp)
    positions = _along_stream(
        (
            np.concatenate([np.arange(size) for size in totals])
            if totals.size
            else np.zeros(0, np.int64)
        ),
        local,
    )
    positions_1T = torch.from_numpy(positions).to(rules.device).unsqueeze(0)

    def pick(
        full_responses: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]
    ) -> torch.Tensor:
        flat = np.concatenate(full_responses) if full_responses else np.zeros(0)
        return torch.from_numpy(flat.astype(dtype)[owned.flat_indices]).to(rules.device)

    return MicroBatch(
        samples=samples,
        tokens_1T=torch.from_numpy(
            _along_stream(np.concatenate(tokens) if tokens else np.zeros(0, np.int64), local)
        )
        .to(rules.device)
        .unsqueeze(0),
        positions_1T=positions_1T,
        stream=pack_stream(
            stream_lengths,
            positions_1T[0],
            rules.rotary,
            cp_size=rules.cp.size,
            cp_rank=rules.cp.rank,
            dtype=rules.dtype,
        ),
        counts=owned.counts,
        response_indices=owned.response_indices,
        rows_K=torch.from_numpy(owned.logit_rows).to(rules.device),
        targets_K=pick(
            [item[item.size - mask.size :] for item, mask in zip(tokens, masks, strict=True)],
            np.int64,
        ),
        trained_K=pick(masks, np.bool_),
        kept_sets=_kept_sets(columns, samples, masks, owned.flat_indices, rules),
        total_lengths=totals,
        response_lengths=responses,
        loss_masks=tuple(mask.astype(np.int32, copy=False) for mask in masks),
        denominators=_scalars(columns, "loss_denominators", samples),
        fields=_given_fields(columns, samples, pick),
    )


def local_values(full: RaggedArray, part: MicroBatch) -> torch.Tensor:
    """Pick a micro-batch's local values of a response-aligned column of the rank.

    Args:
        full: whole responses of the rank's samples.
        part: the micro-batch.

    Returns:
        [K], in the column's dtype, on the micro-batch's device.
    """
    starts = np.repeat(full.offsets[part.samples], part.counts)
    return torch.from_numpy(full.values[starts + part.response_indices]).to(part.targets_K.device)


def _layout(
    totals: npt.NDArray[np.int64], rules: PackingRules
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Padded length of every sequence, a padding tail among them, and the source of each local row in the unpadded tokens (-1: padding)."""
    padded = padded_lengths(totals, rules.cp)
    multiple = math.lcm(2 * rules.cp.size, rules.cp.size * rules.tp_size)
    used = int(padded.sum())
    length = -(-used // multiple) * multiple if used else 2 * rules.cp.size * rules.tp_size
    lengths = [*padded.tolist(), *([length - used] if length > used else [])]
    return lengths, packed_token_index(totals, rules.cp, stream_length=length)


def _along_stream(
    values: npt.NDArray[np.int64], local: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Values of the local rows; 0 where padding."""
    placed = np.append(values, 0)[local]
    placed[local < 0] = 0
    return placed.astype(np.int64, copy=False)


def _items(column: Column, samples: npt.NDArray[np.int64]) -> list[npt.NDArray[np.generic]]:
    assert isinstance(column, RaggedArray)
    return [column[int(index)] for index in samples]


def _scalars(
    columns: Mapping[str, Column], name: str, samples: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32] | None:
    column = columns.get(name)
    return None if column is None else np.asarray(column)[samples].astype(np.float32)


def _kept_sets(
    columns: Mapping[str, Column],
    samples: npt.NDArray[np.int64],
    masks: Sequence[npt.NDArray[np.generic]],
    flat_indices: npt.NDArray[np.int64],
    rules: PackingRules,
) -> NucleusSet:
    if not rules.use_kept_sets or "nucleus_ids" not in columns:
        return NucleusSet.unfiltered(flat_indices.size, vocab_size=rules.vocab_size)
    parts = (
        _items(columns[name], samples)
        for name in ("nucleus_ids", "nucleus_offsets", "nucleus_status")
    )
    sets = [
        NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=rules.vocab_size)
        for ids, offsets, status in zip(*parts, strict=True)
    ]
    for sample, item, mask in zip(samples, sets, masks, strict=True):
        unscored = np.flatnonzero((mask != 0) & ~item.scored_mask())
        if unscored.size:
            token = int(unscored[0])
            raise TrainerError(
                f"sample {sample} of this rank: response token {token} is trained, but it was not"
                f" sampled or its kept set is incomplete (status {item.status[token]}), so it has"
                " no log-prob: give it loss mask 0, or set rollout.replay = false"
            )
    return NucleusSet.concat(sets, vocab_size=rules.vocab_size).take(flat_indices)


def _given_fields(
    columns: Mapping[str, Column],
    samples: npt.NDArray[np.int64],
    pick: Callable[[Sequence[npt.NDArray[np.generic]], type[np.generic]], torch.Tensor],
) -> dict[str, torch.Tensor]:
    if "rollout_log_probs" not in columns:
        return {}
    return {"rollout_log_probs": pick(_items(columns["rollout_log_probs"], samples), np.float32)}
