"""Attention of SGLang's `torch_native` backend over whole batches, for the CPU.

SGLang's own loops over the sequences of a batch in Python, once per layer and step: with 512 short
sequences that is most of a decode step. Here the sequences are padded to the longest and go through
one call of torch's attention; rows are taken in groups, so that the padded keys stay small.

Axes: B sequences, N tokens of all sequences, Q longest query, L longest sequence, H query heads, G
key-value heads, D head size.

Invariants: values equal SGLang's own up to the order of float32 sums; whatever is not plain causal
self-attention is left to SGLang's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_runtime.engine.sglang_calls import Hooks

__all__ = ["attend_decode", "attend_extend", "install"]

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

_GROUP_ELEMENTS = 16 * 2**20
"""Most elements of the padded keys of one group of rows: 64 MiB in float32."""


def install() -> None:
    """Register both functions with SGLang's `HookRegistry`; the caller applies the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: Hooks = HookRegistry
    hooks.register(f"{_BACKEND}._run_sdpa_forward_decode", _decode_hook, HookType.AROUND)
    hooks.register(f"{_BACKEND}._run_sdpa_forward_extend", _extend_hook, HookType.AROUND)


def attend_decode(
    query_NHD: Tensor,
    output_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    slots_BL: Tensor,
    lengths_B: Tensor,
    scale: float | None,
) -> None:
    """Attend from the last token of each sequence to all of it.

    Args:
        query_NHD: float [B, H, D], one token per sequence.
        output_NHD: float [B, H, D], written.
        keys: float [slots, G, D], the cache of keys.
        values: float [slots, G, D], the cache of values.
        slots_BL: integer [B, L], cache slots of each sequence; anything valid past its end.
        lengths_B: integer [B], tokens of each sequence, its last one included.
        scale: factor of the logits; None: 1 / sqrt(D).
    """
    mask_B11L = (torch.arange(slots_BL.shape[1]) < lengths_B.view(-1, 1))[:, None, None, :]
    for rows in _row_groups(slots_BL.shape[0], slots_BL.shape[1] * keys.shape[1] * keys.shape[2]):
        output_NHD[rows] = _attend(
            query_NHD[rows].unsqueeze(2), keys, values, slots_BL[rows], mask_B11L[rows], scale
        ).squeeze(2)


def attend_extend(
    query_NHD: Tensor,
    output_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    slots_BL: Tensor,
    lengths_B: Tensor,
    new_lengths_B: Tensor,
    scale: float | None,
) -> None:
    """Attend from the new tokens of each sequence to all of it, causally.

    Args:
        query_NHD: float [N, H, D], the new tokens of all sequences one after the other.
        output_NHD: float [N, H, D], written.
        keys: float [slots, G, D], the cache of keys, which holds the new tokens already.
        values: float [slots, G, D], the cache of values.
        slots_BL: integer [B, L], cache slots of each sequence; anything valid past its end.
        lengths_B: integer [B], tokens of each sequence, the new ones included.
        new_lengths_B: integer [B], its new tokens, at least one.
        scale: factor of the logits; None: 1 / sqrt(D).
    """
    starts_B = torch.cumsum(new_lengths_B, 0) - new_lengths_B
    offset_Q = torch.arange(int(new_lengths_B.max()))
    is_new_BQ = offset_Q < new_lengths_B.view(-1, 1)
    # Padded queries repeat the last token of all: they attend to something, and nobody reads them.
    token_BQ = torch.where(is_new_BQ, starts_B.view(-1, 1) + offset_Q, query_NHD.shape[0] - 1)
    position_BQ = (lengths_B - new_lengths_B).view(-1, 1) + offset_Q
    position_L = torch.arange(slots_BL.shape[1])
    width = max(slots_BL.shape[1], len(offset_Q) * query_NHD.shape[1] // keys.shape[1])
    for rows in _row_groups(slots_BL.shape[0], width * keys.shape[1] * keys.shape[2]):
        mask_B1QL = (position_L <= position_BQ[rows].unsqueeze(-1)).unsqueeze(1)
        attended_BHQD = _attend(
            query_NHD[token_BQ[rows]].transpose(1, 2),
            keys,
            values,
            slots_BL[rows],
            mask_B1QL,
            scale,
        )
        chosen = is_new_BQ[rows]
        output_NHD[token_BQ[rows][chosen]] = attended_BHQD.transpose(1, 2)[chosen]


def _attend(
    query_BHQD: Tensor,
    keys: Tensor,
    values: Tensor,
    slots_BL: Tensor,
    mask_B1QL: Tensor,
    scale: float | None,
) -> Tensor:
    """Return masked attention of a group of padded rows, float [B, H, Q, D]."""
    key_BGLD = keys[slots_BL].transpose(1, 2).to(query_BHQD.dtype)
    value_BGLD = values[slots_BL].transpose(1, 2).to(query_BHQD.dtype)
    return scaled_dot_product_attention(
        query_BHQD, key_BGLD, value_BGLD, attn_mask=mask_B1QL, scale=scale, enable_gqa=True
    )


def _row_groups(num_rows: int, elements_per_row: int) -> Iterator[slice]:
    """Yield slices of rows whose padded keys fit `_GROUP_ELEMENTS`; at least one row each."""
    step = max(1, _GROUP_ELEMENTS // elements_per_row)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


class _Options(TypedDict):
    """The keyword arguments that the backend passes."""

    scaling: float | None
    """Factor of the logits; None: 1 / sqrt(D)."""
    enable_gqa: bool
    """Whether query heads share key-value heads; attention here finds that out by itself."""
    causal: bool
    """Whether a token attends to no later one."""
    is_cross_attn: bool
    """Whether keys are those of an encoder."""
    sliding_window_size: int | None
    """Tokens back that a token attends to; None: all."""


_Decode = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""query, output, keys, values, req_to_token, req_pool_indices, lengths, encoder lengths."""
_Extend = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None
]
"""The same with prefix lengths and new lengths before the encoder lengths."""


class _DecodeCall(Protocol):
    def __call__(
        self, backend: object, *args: Unpack[_Decode], **options: Unpack[_Options]
    ) -> Tensor: ...


class _ExtendCall(Protocol):
    def __call__(
        self, backend: object, *args: Unpack[_Extend], **options: Unpack[_Options]
    ) -> Tensor: ...


def _decode_hook(
    original: _DecodeCall, backend: object, *args: Unpack[_Decode], **options: Unpack[_Options]
) -> Tensor:
    """Stand in for `_run_sdpa_forward_decode`."""
    query, output, keys, values, req_to_token, req_pool_indices, lengths_B, encoder_lens = args
    if not _is_plain(encoder_lens, options):
        return original(backend, *args, **options)
    slots_BL = req_to_token[req_pool_indices, : int(lengths_B.max())]
    attend_decode(query, output, keys, values, slots_BL, lengths_B, options["scaling"])
    return output


def _extend_hook(
    original: _ExtendCall, backend: object, *args: Unpack[_Extend], **options: Unpack[_Options]
) -> Tensor:
    """Stand in for `_run_sdpa_forward_extend`."""
    query, output, keys, values, req_to_token, req_pool_indices, *lengths, encoder_lens = args
    if not _is_plain(encoder_lens, options) or not options["causal"]:
        return original(backend, *args, **options)
    lengths_B, _, new_lengths_B = lengths
    slots_BL = req_to_token[req_pool_indices, : int(lengths_B.max())]
    attend_extend(
        query, output, keys, values, slots_BL, lengths_B, new_lengths_B, options["scaling"]
    )
    return output


def _is_plain(encoder_lens: Tensor | None, options: _Options) -> bool:
    """Tell whether this is self-attention without a window."""
    return (
        encoder_lens is None
        and not options["is_cross_attn"]
        and options["sliding_window_size"] is None
    )
