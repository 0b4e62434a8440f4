"""Attention over packed sequences for Megatron-Core's local layer spec.

Megatron-Core's own core attention handles neither packed sequences nor context parallelism.
`PackedAttention` rotates queries and keys, gathers keys and values over the context-parallel group,
and attends by the micro-batch's plan, densely or with torch's varlen kernel.

Axes: T local tokens, S segments, B segments of one dense call, Q queries, K keys, H heads, D width.

Invariants: packed and single sequences give the same numbers; keys and values cross the group once
per layer, and their gradients once back; every rank takes part, whatever rows it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from rl_runtime.errors import RuntimeSetupError
from rl_runtime.megatron.attention_plan import plan_attention
from rl_runtime.megatron.calls import ModelConfig
from rl_runtime.megatron.rotary import apply_rotary, rotary_angles

__all__ = ["PackedAttention", "PackedStream", "pack_stream"]


@dataclass(kw_only=True)
class PackedStream(PackedSeqParams):  # type: ignore[misc]
    """Megatron-Core's description of a packed stream, with what all attention layers share."""

    cos_T1D: torch.Tensor
    """float32 [T, 1, D]: cosines of the local tokens' rotary angles."""
    sin_T1D: torch.Tensor
    """float32 [T, 1, D]: sines of the same."""
    dense_calls: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...] = ()
    """Per call: query rows [B, Q], key rows [B, K], visible [B, 1, Q, K] or None.

    Empty where the varlen kernel is used.
    """
    restore_T: torch.Tensor | None = None
    """int64 [T]: local rows' places in the calls' outputs."""
    varlen: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int] | None = None
    """Key rows [sum of K], offsets of queries and of keys int32 [S + 1], longest Q and K."""


def pack_stream(
    padded_lengths: Sequence[int],
    positions_T: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    cp_size: int,
    cp_rank: int,
    dtype: torch.dtype,
) -> PackedStream:
    """Describe a packed stream to the model.

    Args:
        padded_lengths: tokens of each sequence over all context-parallel ranks.
        positions_T: int64 [T], positions of this rank's tokens in their own sequences, on the
            device to compute on.
        frequencies: the model's rotary frequencies, on the same device.
        cp_size: context-parallel ranks.
        cp_rank: this rank.
        dtype: dtype of activations.

    Returns:
        What goes to the model as `packed_seq_params`.
    """
    device = positions_T.device
    plan = plan_attention(padded_lengths, cp_size=cp_size, cp_rank=cp_rank)
    cos_T1D, sin_T1D = rotary_angles(positions_T, frequencies)
    offsets = _offsets(padded_lengths, device)
    stream = PackedStream(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(padded_lengths),
        max_seqlen_kv=max(padded_lengths),
        cos_T1D=cos_T1D,
        sin_T1D=sin_T1D,
    )
    # torch's varlen kernel is flash attention: on GPUs only, and in half precision only.
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        stream.varlen = (
            torch.from_numpy(plan.key_rows).to(device),
            _offsets(plan.num_queries_S, device),
            _offsets(plan.num_keys_S, device),
            int(plan.num_queries_S.max()),
            int(plan.num_keys_S.max()),
        )
    else:
        stream.restore_T = torch.from_numpy(plan.restore_T).to(device)
        stream.dense_calls = tuple(
            (
                torch.from_numpy(query_rows_BQ).to(device),
                torch.from_numpy(key_rows_BK).to(device),
                # One mask for all heads.
                None if visible is None else torch.from_numpy(visible).unsqueeze(1).to(device),
            )
            for query_rows_BQ, key_rows_BK, visible in plan.dense_calls
        )
    return stream


def _offsets(lengths: Sequence[int] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return where each of some runs begins and where the last one ends, as kernels want it."""
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)


class PackedAttention(torch.nn.Module):
    """Core attention of one layer over a `PackedStream`."""

    def __init__(
        self,
        config: ModelConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Take what Megatron-Core gives to a core attention.

        Args:
            config: the model's TransformerConfig.
            layer_number: 1-based; not used.
            attn_mask_type: not used; attention is causal.
            attention_type: "self".
            cp_comm_type: not used; keys and values are gathered.
            softmax_scale: factor on scores; None: 1 / sqrt(head_dim).
            pg_collection: process groups; `cp` is used.

        Raises:
            RuntimeSetupError: attention dropout, or another attention than self-attention.
        """
        del layer_number, attn_mask_type, cp_comm_type
        super().__init__()
        if config.attention_dropout or attention_type != "self":
            raise RuntimeSetupError(
                "packed attention has no dropout and attends within a sequence; got"
                f" attention_dropout = {config.attention_dropout}, {attention_type!r}"
            )
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, heads, head_dim], local rows of the packed stream.
            key: [T, key-value heads, head_dim].
            value: [T, key-value heads, head_dim].
            attention_mask: None; the plan decides.
            attn_mask_type: not used.
            attention_bias: None.
            packed_seq_params: the stream that `pack_stream` described.

        Returns:
            [T, heads * head_dim].
        """
        del attn_mask_type
        assert attention_mask is None and attention_bias is None
        assert isinstance(packed_seq_params, PackedStream)
        stream = packed_seq_params
        query = apply_rotary(query, stream.cos_T1D, stream.sin_T1D)
        # Keys are rotated where their positions are known, before they travel.
        key = apply_rotary(key, stream.cos_T1D, stream.sin_T1D)
        if self._cp_group.size() > 1:
            # One collective for both. It lays ranks end to end, and sums gradients on the way back;
            # that it is named for sequence parallelism means nothing here.
            both = gather_from_sequence_parallel_region(
                torch.stack([key, value], dim=1),
                tensor_parallel_output_grad=True,
                group=self._cp_group,
            )
            key, value = both.unbind(1)
        attend = self._varlen if stream.varlen is not None else self._dense
        return attend(query, key, value, stream).flatten(1)

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PackedStream
    ) -> torch.Tensor:
        # Grouped queries: every key-value head serves `repeats` query heads that lie together.
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        outputs = []
        for query_rows_BQ, key_rows_BK, visible in stream.dense_calls:
            # Rows of [T, H, D] by [B, Q] give [B, Q, H, D]; attention wants heads before rows.
            q_BHQD, k_BHKD, v_BHKD = (
                x[rows].transpose(1, 2)
                for x, rows in ((query, query_rows_BQ), (key, key_rows_BK), (value, key_rows_BK))
            )
            output_BHQD = F.scaled_dot_product_attention(
                q_BHQD,
                k_BHKD,
                v_BHKD,
                attn_mask=visible,
                is_causal=visible is None,
                scale=self._scale,
            )
            outputs.append(output_BHQD.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[stream.restore_T]

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: PackedStream
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        assert stream.varlen is not None
        rows, query_offsets, key_offsets, longest_query, longest_key = stream.varlen
        # On one rank the keys lie in the kernel's order already.
        if self._cp_group.size() > 1:
            key, value = key[rows], value[rows]
        output = varlen_attn(
            query,
            key,
            value,
            query_offsets,
            key_offsets,
            longest_query,
            longest_key,
            scale=self._scale,
            # Any number of keys back, none ahead, counted from the segment's last key.
            window_size=(-1, 0),
        )
        assert isinstance(output, torch.Tensor)
        return output
