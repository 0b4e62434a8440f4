"""Pack the samples of one micro-batch into this rank's share of one stream.

Every sequence is padded to a multiple of 2 * cp, the stream's tail to what tensor parallelism
needs. A filler is a stream of `2 * cp * tp` padding tokens without samples: it runs through the
model like any other micro-batch and weighs nothing.

Axes: n samples, T local tokens of the stream, R tokens of one response, K local response tokens.

Invariants: the K entries are the response tokens that rl-metrics' geometry gives to this rank,
sample by sample, ascending; padding tokens are never scored; every trained token has a score; loss
masks are kept whole on every context-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rl_dump import RaggedArray
from rl_metrics import packed_responses, packed_token_index, padded_lengths
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.attention import PackedStream, pack_stream
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.megatron.rotary import rotary_frequencies
from rl_runtime.megatron.shape import ModelShape
from rl_topp import NucleusSet

__all__ = ["MicroBatch", "MicroBatchPacker"]

_Arrays = Sequence[npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward's samples on one rank. All tensors are on the device."""

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
    nucleus: NucleusSet
    """Nuclei of the K tokens; the whole vocabulary where none are used."""
    total_lengths: npt.NDArray[np.int64]
    """int64 [n], tokens."""
    response_lengths: npt.NDArray[np.int64]
    """int64 [n], tokens."""
    loss_masks: tuple[npt.NDArray[np.int32], ...]
    """Per sample int32 [R]: the whole mask, on every rank."""
    denominators: npt.NDArray[np.float32] | None
    """float32 [n]: what each sample's masked sum is divided by; None where nothing is needed."""
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    """Response-aligned values, float32 [K] each, by contract name.

    What was computed before and what this rank computes.
    """

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of the whole micro-batch, over all context-parallel ranks."""
        return int(sum(int(mask.sum()) for mask in self.loss_masks))

    def local_values(self, column: RaggedArray) -> torch.Tensor:
        """Pick the K local values of a response-aligned column of the rank.

        Args:
            column: whole responses of all of the rank's samples.

        Returns:
            [K], in the column's dtype, on the device.
        """
        # Where each token's response begins in the column, plus its place in the response.
        starts_K = np.repeat(column.offsets[self.samples], self.counts)
        return torch.from_numpy(column.values[starts_K + self.response_indices]).to(
            self.targets_K.device
        )


class MicroBatchPacker:
    """The way a rank packs micro-batches: its place in the mesh, and the model."""

    def __init__(
        self, shape: ModelShape, topology: Topology, *, dtype: torch.dtype, use_nucleus: bool
    ) -> None:
        """Say what packing depends on, besides the samples.

        Args:
            shape: the model's shape.
            topology: this rank's place.
            dtype: dtype of activations.
            use_nucleus: whether log-probs are taken over recorded nuclei.
        """
        self._cp = topology.context_parallel
        self._tp_size = topology.tp_size
        self._device = topology.device
        self._vocab_size = shape.vocab_size
        self._frequencies = rotary_frequencies(shape).to(topology.device)
        self._dtype = dtype
        self._use_nucleus = use_nucleus

    def pack(self, columns: Mapping[str, Column], samples: npt.NDArray[np.int64]) -> MicroBatch:
        """Pack samples.

        Args:
            columns: the rank's columns; `tokens` and `loss_masks` are needed, `rollout_log_probs`,
                `loss_denominators` and the nuclei are used where present.
            samples: int64 [n], which of them; none makes a filler.

        Returns:
            The micro-batch.

        Raises:
            MetricsError: a sample without a prompt token.
            NucleusError: nuclei that do not form a record.
            TrainerError: a token that is trained and whose nucleus gives it no log-prob.
        """
        tokens, masks = (_items(columns[name], samples) for name in ("tokens", "loss_masks"))
        total_lengths = np.array([item.size for item in tokens], np.int64)
        response_lengths = np.array([item.size for item in masks], np.int64)
        stream_lengths, source_T = self._layout(total_lengths)
        owned = packed_responses(total_lengths, response_lengths, self._cp)
        positions_1T = self._along_stream([np.arange(size) for size in total_lengths], source_T)

        def pick(responses: _Arrays, dtype: type[np.generic]) -> torch.Tensor:
            """Lay whole responses end to end, and keep the K tokens that this rank owns."""
            return torch.from_numpy(_flat(responses, dtype)[owned.flat_indices]).to(self._device)

        responses = [
            item[item.size - length :]
            for item, length in zip(tokens, response_lengths, strict=True)
        ]
        denominators, rollout_log_probs = (
            columns.get(name) for name in ("loss_denominators", "rollout_log_probs")
        )
        return MicroBatch(
            samples=samples,
            tokens_1T=self._along_stream(tokens, source_T),
            positions_1T=positions_1T,
            stream=pack_stream(
                stream_lengths,
                positions_1T[0],
                self._frequencies,
                cp_size=self._cp.size,
                cp_rank=self._cp.rank,
                dtype=self._dtype,
            ),
            counts=owned.counts,
            response_indices=owned.response_indices,
            rows_K=torch.from_numpy(owned.logit_rows).to(self._device),
            targets_K=pick(responses, np.int64),
            trained_K=pick(masks, np.bool_),
            nucleus=self._nucleus(columns, samples, masks, owned.flat_indices),
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            loss_masks=tuple(mask.astype(np.int32, copy=False) for mask in masks),
            denominators=(
                None
                if denominators is None
                else np.asarray(denominators)[samples].astype(np.float32)
            ),
            fields=(
                {"rollout_log_probs": pick(_items(rollout_log_probs, samples), np.float32)}
                if rollout_log_probs is not None
                else {}
            ),
        )

    def _layout(
        self, total_lengths: npt.NDArray[np.int64]
    ) -> tuple[list[int], npt.NDArray[np.int64]]:
        """Lay out the stream.

        Returns:
            Padded length of every sequence, a padding tail among them; and [T], for each local row
                its place in the unpadded tokens, -1 where it is padding.
        """
        padded = padded_lengths(total_lengths, self._cp)
        # Zigzag cuts the stream into 2 * cp chunks, sequence parallelism each rank's T into tp.
        multiple = math.lcm(2 * self._cp.size, self._cp.size * self._tp_size)
        used = int(padded.sum())
        length = -(-used // multiple) * multiple if used else 2 * self._cp.size * self._tp_size
        lengths = [*padded.tolist(), *([length - used] if length > used else [])]
        return lengths, packed_token_index(total_lengths, self._cp, stream_length=length)

    def _along_stream(self, sequences: _Arrays, source_T: npt.NDArray[np.int64]) -> torch.Tensor:
        """Give the local rows [1, T] of per-token values; 0 where padding."""
        # Index -1, which stands for padding, finds the 0 at the end.
        values_T = np.append(_flat(sequences, np.int64), 0)[source_T]
        return torch.from_numpy(values_T).to(self._device).unsqueeze(0)

    def _nucleus(
        self,
        columns: Mapping[str, Column],
        samples: npt.NDArray[np.int64],
        masks: _Arrays,
        flat_indices: npt.NDArray[np.int64],
    ) -> NucleusSet:
        if not self._use_nucleus or "nucleus_ids" not in columns:
            return NucleusSet.unfiltered(flat_indices.size, vocab_size=self._vocab_size)
        recorded = (
            _items(columns[f"nucleus_{name}"], samples) for name in ("ids", "offsets", "status")
        )
        nuclei = [
            NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=self._vocab_size)
            for ids, offsets, status in zip(*recorded, strict=True)
        ]
        for sample, nucleus, mask in zip(samples, nuclei, masks, strict=True):
            unscored = np.flatnonzero((mask != 0) & ~nucleus.scored_mask())
            if unscored.size:
                token = int(unscored[0])
                raise TrainerError(
                    f"sample {sample} of this rank: response token {token} is trained, but it was"
                    " not sampled or its kept set is incomplete (status"
                    f" {nucleus.status[token]}), so it has no log-prob: give it loss mask 0, or set"
                    " rollout.replay = false"
                )
        return NucleusSet.concat(nuclei, vocab_size=self._vocab_size).take(flat_indices)


def _items(column: Column, samples: npt.NDArray[np.int64]) -> list[npt.NDArray[np.generic]]:
    assert isinstance(column, RaggedArray)
    return [column[int(index)] for index in samples]


def _flat(items: _Arrays, dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """Lay arrays end to end in a dtype; the empty one in front stands in where there are none."""
    flat: npt.NDArray[np.generic] = np.concatenate([np.zeros(0, dtype), *items])
    return flat.astype(dtype, copy=False)
