"""Kept sets on the wire: what engines put into a reply, and how it becomes a `NucleusSet`.

Invariants: `from_sglang_meta(to_wire(s))` gives back `s`; a reply that carries only half of a
representation, two representations, or a malformed one raises, it never yields a guessed set.

Representations, by key of the reply's `meta_info`:

| writer | ids | beside it | form |
| --- | --- | --- | --- |
| our SGLang plugin | `rl_topp_kept_ids` | `rl_topp_kept_status` (optional) | one entry per token: ids, or null = no filter |
| `to_wire` | `rl_topp_kept_ids` | `rl_topp_kept_offsets`, `rl_topp_kept_status` | flat arrays |
| slime | `top_p_token_ids`, `top_p_kept_token_ids` | `top_p_token_offsets`, `top_p_kept_token_offsets` | flat arrays |
| SGLang, native | `output_token_sampling_mask` | | one entry per token: ids, or null = no filter |
| vLLM | `sampling_mask` | its `token_ids` and `offsets`, as keys or attributes | flat arrays, or one entry per token |

A flat array is base64 text or bytes of little-endian int32, an ndarray, a tensor, or a list of
integers. All of them cover generated tokens only, so a token without ids in a foreign form was
sampled without a filter (status 1).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_topp.errors import NucleusError
from rl_topp.nucleus import NucleusSet, NucleusStatus
from rl_topp.validation import as_integers, check_count, find_offset_problems

__all__ = [
    "KEPT_IDS_KEY",
    "KEPT_LOG_PROBS_KEY",
    "KEPT_OFFSETS_KEY",
    "KEPT_STATUS_KEY",
    "from_sglang_meta",
    "kept_log_probs_from_sglang_meta",
    "to_wire",
    "wire_bytes_per_token",
]

KEPT_IDS_KEY: Final = "rl_topp_kept_ids"
"""Our key of the kept ids: a list with one entry per generated token, or flat ids when `KEPT_OFFSETS_KEY` is there."""
KEPT_OFFSETS_KEY: Final = "rl_topp_kept_offsets"
"""Our key of the flat form's offsets, [T+1]."""
KEPT_STATUS_KEY: Final = "rl_topp_kept_status"
"""Our key of the status, one `NucleusStatus` value per token; absent in the per-token form = 0 where there are ids, 1 where there is null."""
KEPT_LOG_PROBS_KEY: Final = "rl_topp_kept_log_probs"
"""Our key of the sampled ids' log-probs, one number per token, nats: over the kept set, or over the vocabulary where no filter applied."""
_NATIVE_LOG_PROBS_KEY: Final = "output_token_sampling_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatKeys:
    """One spelling of the flat form."""

    ids: str
    offsets: str


_FLAT: Final = (
    _FlatKeys(ids="top_p_token_ids", offsets="top_p_token_offsets"),
    _FlatKeys(ids="top_p_kept_token_ids", offsets="top_p_kept_token_offsets"),
)
_NATIVE_KEY: Final = "output_token_sampling_mask"
_VLLM_KEY: Final = "sampling_mask"
_ALL_KEYS: Final = (KEPT_IDS_KEY, *(keys.ids for keys in _FLAT), _NATIVE_KEY, _VLLM_KEY)


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
        NucleusError: `meta_info` is no mapping, or the number of tokens no count; no representation
            or two; one of a pair missing; offsets empty, not starting at 0, decreasing, not ending
            at the number of ids, or not one more than the tokens; ids outside the vocabulary,
            repeated, or missing; undecodable base64.
    """
    _refuse_other_than_mapping(meta_info)
    check_count(expected_num_tokens, "expected_num_tokens")
    present = [key for key in _ALL_KEYS if meta_info.get(key) is not None]
    _refuse_lone_offsets(meta_info)
    if not present:
        if expected_num_tokens == 0:
            return NucleusSet.empty(vocab_size=vocab_size)
        raise NucleusError(
            f"the reply carries no kept sets for its {expected_num_tokens} tokens: expected one of"
            f" {', '.join(_ALL_KEYS)} in meta_info; ask for them in the request and check that the"
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
        NucleusError: another length, or an entry that is no finite number; names the token.
    """
    _refuse_other_than_mapping(meta_info)
    key = next(
        (
            key
            for key in (KEPT_LOG_PROBS_KEY, _NATIVE_LOG_PROBS_KEY)
            if meta_info.get(key) is not None
        ),
        None,
    )
    if key is None:
        return None
    try:
        given = np.asarray(_detach(meta_info[key]))
    except (TypeError, ValueError) as error:
        raise NucleusError(f"{key} must hold one number per token: {error}") from error
    if given.ndim == 1 and given.size and given.dtype.kind not in "fiu":
        token = next(
            (
                token
                for token, value in enumerate(given)
                if not isinstance(value, (int, float, np.number))
            ),
            0,
        )
        raise NucleusError(
            f"{key}: token {token} has {given[token]!r}, which is none of the numbers expected, one"
            " per token"
        )
    if given.shape != (expected_num_tokens,):
        raise NucleusError(
            f"{key} has shape {list(given.shape)}, expected [{expected_num_tokens}], one number per"
            " token"
        )
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is named below
        values = given.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise NucleusError(
            f"{key}: token {bad[0]} has log-prob {values[bad[0]]}, expected a finite number"
        )
    return values


def to_wire(nucleus: NucleusSet) -> dict[str, str]:
    """Return `nucleus` as JSON-safe text under our keys, flat form: base64 of little-endian int32
    ids, int32 offsets and uint8 status.

    Costs 4/3 of (4 bytes per id + 5 bytes per token), see `wire_bytes_per_token`.

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


def wire_bytes_per_token(wire: Mapping[str, Any], *, num_tokens: int) -> float:
    """Return the size of `to_wire`'s text per token, bytes.

    Example: 3 tokens with 4 ids in all take (24 + 24 + 4) / 3 = 17.3.

    Raises:
        NucleusError: `num_tokens` is not positive.
    """
    if num_tokens <= 0:
        raise NucleusError(f"bytes per token need at least one token, got {num_tokens}")
    keys = (KEPT_IDS_KEY, KEPT_OFFSETS_KEY, KEPT_STATUS_KEY)
    return sum(len(wire[key]) for key in keys if key in wire) / num_tokens


# Readers, one per representation
# -----------------------------------------------------------------------------------------------------


def _read_ours(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    flat = meta_info.get(KEPT_OFFSETS_KEY)
    raw_status = meta_info.get(KEPT_STATUS_KEY)
    if flat is not None:
        ids, offsets = _flat_arrays(
            meta_info, _FlatKeys(ids=key, offsets=KEPT_OFFSETS_KEY), num_tokens
        )
        if raw_status is None:
            raise NucleusError(
                f"{key} and {KEPT_OFFSETS_KEY} come without {KEPT_STATUS_KEY}; the three belong"
                " together"
            )
        status = _integers(raw_status, KEPT_STATUS_KEY, "<u1")
    elif isinstance(meta_info[key], Mapping):
        raise NucleusError(
            f"{key} must be a list with one entry per token, or a flat array, got"
            f" {type(meta_info[key]).__name__}"
        )
    elif not _is_per_token(meta_info[key]):
        raise NucleusError(
            f"{key} is flat, but {KEPT_OFFSETS_KEY} is missing; the two belong together"
        )
    else:
        base = _from_per_token(
            meta_info[key], key, num_tokens, vocab_size, allow_empty=raw_status is not None
        )
        if raw_status is None:
            return base
        ids, offsets, status = base.ids, base.offsets, _integers(raw_status, KEPT_STATUS_KEY, "<u1")
    if status.size != num_tokens:
        raise NucleusError(
            f"{KEPT_STATUS_KEY} has {status.size} entries, expected {num_tokens}, one per token"
        )
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


def _read_flat(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    keys = next(keys for keys in _FLAT if keys.ids == key)
    ids, offsets = _flat_arrays(meta_info, keys, num_tokens)
    return _without_status(ids, offsets, vocab_size)


def _read_native(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    return _from_per_token(meta_info[key], key, num_tokens, vocab_size, allow_empty=True)


def _read_vllm(
    meta_info: Mapping[str, Any], key: str, num_tokens: int, vocab_size: int
) -> NucleusSet:
    mask = meta_info[key]
    if isinstance(mask, (list, tuple)):
        return _from_per_token(mask, key, num_tokens, vocab_size, allow_empty=True)
    names = ("token_ids", "offsets")
    if not any(
        name in mask if isinstance(mask, Mapping) else hasattr(mask, name) for name in names
    ):
        raise NucleusError(
            f"{key} must be a list with one entry per token, or hold token_ids and offsets; got"
            f" {type(mask).__name__} without them"
        )
    parts = {
        f"{key}.{name}": mask.get(name) if isinstance(mask, Mapping) else getattr(mask, name, None)
        for name in names
    }
    ids, offsets = _flat_arrays(
        parts, _FlatKeys(ids=f"{key}.token_ids", offsets=f"{key}.offsets"), num_tokens
    )
    return _without_status(ids, offsets, vocab_size)


_READERS: Final = {
    KEPT_IDS_KEY: _read_ours,
    **{keys.ids: _read_flat for keys in _FLAT},
    _NATIVE_KEY: _read_native,
    _VLLM_KEY: _read_vllm,
}


# Pieces
# ------------------------------------------------------------------------------------------------------------------------------


def _refuse_other_than_mapping(meta_info: object) -> None:
    if not isinstance(meta_info, Mapping):
        raise NucleusError(
            f"meta_info must be a mapping, the reply's, got {type(meta_info).__name__}"
        )


def _refuse_lone_offsets(meta_info: Mapping[str, Any]) -> None:
    pairs = (*_FLAT, _FlatKeys(ids=KEPT_IDS_KEY, offsets=KEPT_OFFSETS_KEY))
    NucleusError.raise_if(
        [
            f"{keys.offsets} is there, but {keys.ids} is missing; the two belong together"
            for keys in pairs
            if meta_info.get(keys.offsets) is not None and meta_info.get(keys.ids) is None
        ]
    )


def _flat_arrays(
    meta_info: Mapping[str, Any], keys: _FlatKeys, num_tokens: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    if meta_info.get(keys.ids) is None and meta_info.get(keys.offsets) is None:
        raise NucleusError(f"{keys.ids} and {keys.offsets} are both missing")
    for name, other in ((keys.ids, keys.offsets), (keys.offsets, keys.ids)):
        if meta_info.get(name) is None:
            raise NucleusError(f"{other} is there, but {name} is missing; the two belong together")
    ids = _integers(meta_info[keys.ids], keys.ids, "<i4")
    offsets = _integers(meta_info[keys.offsets], keys.offsets, "<i4").astype(np.int64)
    problems = find_offset_problems(offsets, num_ids=ids.size, num_tokens=num_tokens)
    NucleusError.raise_if([f"{keys.offsets}: {problem}" for problem in problems])
    return ids, offsets


def _without_status(
    ids: npt.NDArray[Any], offsets: npt.NDArray[np.int64], vocab_size: int
) -> NucleusSet:
    """Foreign forms have no status: a generated token without ids had no filter."""
    status = np.where(np.diff(offsets) > 0, NucleusStatus.KEPT, NucleusStatus.NO_FILTER).astype(
        np.uint8
    )
    return NucleusSet(ids=ids, offsets=offsets, status=status, vocab_size=vocab_size)


def _from_per_token(
    value: Any, key: str, num_tokens: int, vocab_size: int, *, allow_empty: bool
) -> NucleusSet:
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
        width = np.dtype(dtype).itemsize
        if len(bytes(value)) % width:
            raise NucleusError(f"{name} has {len(bytes(value))} bytes, not a multiple of {width}")
        return np.frombuffer(bytes(value), dtype=dtype)
    return as_integers(_detach(value), np.int64, name)


def _detach(value: Any) -> Any:
    """Give tensors of any framework as ndarrays, without importing one."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _encode(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode("ascii")
