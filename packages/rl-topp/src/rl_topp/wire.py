"""Kept sets on the wire: what engines put into a reply, and how it becomes a `NucleusSet`.

Which engine writes what stands at `_READERS`.

Axes: T generated tokens of a reply.

Invariants: `from_sglang_meta(to_wire(s))` gives back `s`; a reply that carries only half of a
representation, two representations, or a malformed one raises, it never yields a guessed set.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, NucleusStatus
from rl_topp.sglang.keys import (
    KEPT_IDS_KEY,
    KEPT_LOG_PROBS_KEY,
    KEPT_OFFSETS_KEY,
    KEPT_STATUS_KEY,
)
from rl_topp.validation import as_integers, check_count, find_offset_problems, refuse_first

__all__ = ["from_sglang_meta", "kept_log_probs_from_sglang_meta", "to_wire"]

_NATIVE_KEY: Final = "output_token_sampling_mask"
_NATIVE_LOG_PROBS_KEY: Final = "output_token_sampling_logprobs"
_VLLM_KEY: Final = "sampling_mask"
_OFFSETS_OF: Final = {
    KEPT_IDS_KEY: KEPT_OFFSETS_KEY,
    "top_p_token_ids": "top_p_token_offsets",
    "top_p_kept_token_ids": "top_p_kept_token_offsets",
    f"{_VLLM_KEY}.token_ids": f"{_VLLM_KEY}.offsets",
}
"""By key of flat ids, the key of their offsets."""


def from_sglang_meta(
    meta_info: Mapping[str, Any], *, expected_num_tokens: int, vocab_size: int
) -> NucleusSet:
    """Read the kept sets of one reply, whichever of the known representations it carries.

    Args:
        meta_info: the reply's `meta_info` (for vLLM: a mapping with `sampling_mask`).
        expected_num_tokens: number of tokens the reply generated. With 0 the keys may be absent.
        vocab_size: number of token ids.

    Returns:
        A set of `expected_num_tokens` tokens.

    Raises:
        NucleusError: `meta_info` is not a mapping, or the number of tokens not a count; no
            representation or two; one of a pair missing; offsets empty, not starting at 0,
            decreasing, not ending at the number of ids, or not one more than the tokens; ids
            outside the vocabulary, repeated, or missing; undecodable base64.
    """
    _refuse_other_than_mapping(meta_info)
    check_count(expected_num_tokens, "expected_num_tokens")
    present = [key for key in _READERS if meta_info.get(key) is not None]
    NucleusError.raise_if(
        [
            f"{offsets} is there, but {ids} is missing; the two belong together"
            for ids, offsets in _OFFSETS_OF.items()
            if meta_info.get(offsets) is not None and meta_info.get(ids) is None
        ]
    )
    if not present:
        if expected_num_tokens == 0:
            return NucleusSet.empty(vocab_size=vocab_size)
        raise NucleusError(
            f"the reply carries no kept sets for its {expected_num_tokens} tokens: expected one of"
            f" {', '.join(_READERS)} in meta_info; ask for them in the request and check that the"
            " engine has them (`rl-topp sglang-check`)"
        )
    if len(present) > 1:
        raise NucleusError(
            f"the reply carries kept sets under {' and '.join(present)}; one representation is"
            " expected"
        )
    return _READERS[present[0]](meta_info, present[0], expected_num_tokens, vocab_size)


def kept_log_probs_from_sglang_meta(
    meta_info: Mapping[str, Any], *, expected_num_tokens: int
) -> npt.NDArray[np.float32] | None:
    """Read the log-prob of each sampled id over its kept set, where the reply carries one.

    Args:
        meta_info: the reply's `meta_info`; keys `rl_topp_kept_log_probs` or
            `output_token_sampling_logprobs`.
        expected_num_tokens: number of tokens the reply generated.

    Returns:
        float32 [expected_num_tokens], nats; None when neither key is there.

    Raises:
        NucleusError: another length, or an entry that is not a finite number; names the token.
    """
    _refuse_other_than_mapping(meta_info)
    keys = (KEPT_LOG_PROBS_KEY, _NATIVE_LOG_PROBS_KEY)
    key = next((key for key in keys if meta_info.get(key) is not None), None)
    if key is None:
        return None
    try:
        given = np.asarray(_detach(meta_info[key]))
    except (TypeError, ValueError) as error:
        raise NucleusError(f"{key} must hold one number per token: {error}") from error
    if given.ndim == 1 and given.size and given.dtype.kind not in "fiu":
        is_number = [isinstance(value, (int, float, np.number)) for value in given]
        token = is_number.index(False) if False in is_number else 0
        raise NucleusError(
            f"{key}: token {token} has {given[token]!r}, expected one number per token"
        )
    if given.shape != (expected_num_tokens,):
        raise NucleusError(
            f"{key} has shape {list(given.shape)}, expected [{expected_num_tokens}], one number per"
            " token"
        )
    with np.errstate(over="ignore"):  # What float32 cannot hold becomes inf and is named below.
        values = given.astype(np.float32)
    refuse_first(
        ~np.isfinite(values),
        lambda token: (
            f"{key}: token {token} has log-prob {values[token]}, expected a finite number"
        ),
    )
    return values


def to_wire(nucleus: NucleusSet) -> dict[str, str]:
    """Return `nucleus` as JSON-safe text under our keys, in the flat form.

    Base64 of little-endian int32 ids, int32 offsets and uint8 status: 4/3 of (4 bytes per id + 5
    bytes per token). `from_sglang_meta(to_wire(s))` gives back `s`.

    Raises:
        NucleusError: 2**31 ids or more, which int32 offsets cannot count; send the tokens in
            several pieces.
    """
    if nucleus.ids.size > np.iinfo(np.int32).max:
        raise NucleusError(
            f"{nucleus.ids.size} ids do not fit int32 offsets; send the tokens in several pieces"
        )
    return {
        KEPT_IDS_KEY: _encode(nucleus.ids, "<i4"),
        KEPT_OFFSETS_KEY: _encode(nucleus.offsets, "<i4"),
        KEPT_STATUS_KEY: _encode(nucleus.status, "<u1"),
    }


def _read_ours(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    raw_status = meta_info.get(KEPT_STATUS_KEY)
    if meta_info.get(KEPT_OFFSETS_KEY) is not None:
        ids, offsets = _flat_arrays(meta_info, key, num_tokens)
        if raw_status is None:
            raise NucleusError(
                f"{key} and {KEPT_OFFSETS_KEY} come without {KEPT_STATUS_KEY}; the three belong"
                " together"
            )
    elif isinstance(meta_info[key], Mapping) or _is_per_token(meta_info[key]):
        base = _read_per_token(
            meta_info, key, num_tokens, vocab_size, allow_empty=raw_status is not None
        )
        if raw_status is None:
            return base
        ids, offsets = base.ids, base.offsets
    else:
        raise NucleusError(
            f"{key} is flat, but {KEPT_OFFSETS_KEY} is missing; the two belong together"
        )
    status = _integers(raw_status, KEPT_STATUS_KEY, "<u1")
    if status.size != num_tokens:
        raise NucleusError(
            f"{KEPT_STATUS_KEY} has {status.size} entries, expected {num_tokens}, one per token"
        )
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


def _read_flat(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    """Read a foreign form, which has no status: a token without ids had no filter."""
    ids, offsets = _flat_arrays(meta_info, key, num_tokens)
    status = np.where(np.diff(offsets) > 0, NucleusStatus.KEPT, NucleusStatus.NO_FILTER)
    return NucleusSet(
        ids=ids, offsets=offsets, status=status.astype(np.uint8), vocab_size=vocab_size
    )


def _read_per_token(
    meta_info: Mapping[str, Any],
    key: str,
    num_tokens: int,
    vocab_size: int,
    *,
    allow_empty: bool = True,
) -> NucleusSet:
    """Read a list of T entries; `allow_empty` takes [] for a token without a filter."""
    value = meta_info[key]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise NucleusError(
            f"{key} must be a list with one entry per token, got {type(value).__name__}"
        )
    if len(value) != num_tokens:
        raise NucleusError(f"{key} has {len(value)} entries, expected {num_tokens}, one per token")
    rows = [
        None if entry is None else _integers(entry, f"{key}[{token}]", "<i4")
        for token, entry in enumerate(value)
    ]
    if allow_empty:
        rows = [None if row is not None and row.size == 0 else row for row in rows]
    return NucleusSet.from_lists(rows, vocab_size=vocab_size)


def _read_vllm(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    mask = meta_info[key]
    if isinstance(mask, (list, tuple)):
        return _read_per_token(meta_info, key, num_tokens, vocab_size)
    parts = {
        f"{key}.{name}": mask.get(name) if isinstance(mask, Mapping) else getattr(mask, name, None)
        for name in ("token_ids", "offsets")
    }
    if all(part is None for part in parts.values()):
        raise NucleusError(
            f"{key} must be a list with one entry per token, or hold token_ids and offsets; got"
            f" {type(mask).__name__} without them"
        )
    return _read_flat(parts, f"{key}.token_ids", num_tokens, vocab_size)


_READERS: Final = {
    KEPT_IDS_KEY: _read_ours,
    "top_p_token_ids": _read_flat,
    "top_p_kept_token_ids": _read_flat,
    _NATIVE_KEY: _read_per_token,
    _VLLM_KEY: _read_vllm,
}
"""By key of the reply's `meta_info`, what reads it.

| writer | ids | beside it | form |
| --- | --- | --- | --- |
| our SGLang plugin | `rl_topp_kept_ids` | `rl_topp_kept_status` (optional) | per token |
| `to_wire` | `rl_topp_kept_ids` | `rl_topp_kept_offsets`, `rl_topp_kept_status` | flat |
| slime | `top_p_token_ids`, `top_p_kept_token_ids` | `top_p[_kept]_token_offsets` | flat |
| SGLang, native | `output_token_sampling_mask` | | per token |
| vLLM | `sampling_mask` | its `token_ids` and `offsets`, keys or attributes | either |

Per token: a list of T entries, each ids or null = no filter. Flat: arrays, each base64 text or
bytes of little-endian int32, an ndarray, a tensor or a list. All cover generated tokens only, so a
token without ids in a foreign form was sampled without a filter (status 1).
"""


def _refuse_other_than_mapping(meta_info: object) -> None:
    if not isinstance(meta_info, Mapping):
        raise NucleusError(
            f"meta_info must be a mapping, the reply's, got {type(meta_info).__name__}"
        )


def _flat_arrays(
    meta_info: Mapping[str, Any], ids_key: str, num_tokens: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    offsets_key = _OFFSETS_OF[ids_key]
    NucleusError.raise_where(
        {
            f"{other} is there, but {name} is missing; the two belong together": (
                meta_info.get(name) is None
            )
            for name, other in ((ids_key, offsets_key), (offsets_key, ids_key))
        }
    )
    ids = _integers(meta_info[ids_key], ids_key, "<i4")
    offsets = _integers(meta_info[offsets_key], offsets_key, "<i4").astype(np.int64)
    problems = find_offset_problems(offsets, num_ids=ids.size, num_tokens=num_tokens)
    NucleusError.raise_if([f"{offsets_key}: {problem}" for problem in problems])
    return ids, offsets


def _is_per_token(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not any(
        isinstance(entry, (int, np.integer)) for entry in value
    )


def _integers(value: Any, name: str, dtype: str) -> npt.NDArray[Any]:
    """Decode one flat array of integers from any of its forms."""
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise NucleusError(f"{name} is text but not base64: {error}") from error
    if isinstance(value, (bytes, bytearray, memoryview)):
        value, width = bytes(value), np.dtype(dtype).itemsize
        if len(value) % width:
            raise NucleusError(f"{name} has {len(value)} bytes, not a multiple of {width}")
        return np.frombuffer(value, dtype=dtype)
    return as_integers(_detach(value), np.int64, name)


def _detach(value: Any) -> Any:
    """Give tensors of any framework as ndarrays, without importing one."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _encode(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode("ascii")
