"""How a dump's header is made, sealed and opened again.

The header is JSON with a checksum beside it, so that a flipped bit in it is an error and never
another batch id.

Invariant, matched by a test in `tests/unit/test_header.py`: a header that passes makes no reader of
this package fail on a type.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, cast, get_args

import numpy as np
from typing_extensions import Required

from rl_dump.columns import tagged_json
from rl_dump.columns.fields import Field
from rl_dump.contract import CONTRACTS, MINOR, DroppedSample, DumpHeader, FieldDocument, Form, Kind
from rl_dump.contract_header import check_header, producer
from rl_dump.errors import DumpError

__all__ = [
    "HeaderKeywords",
    "content_problem",
    "field_of",
    "header_of",
    "make_header",
    "open_header",
    "seal_header",
]

FORMAT_VERSION = 2
"""Version number of the layout that other tools know under this name."""

_DEFAULTS: dict[str, Any] = {
    "dp_shards": [],
    "raw_reward": None,
    "schedule": None,
    "dropped": [],
    "metadata": {},
    "row_groups": [],
    "checksums": {},
}


class HeaderKeywords(TypedDict, total=False):
    """What every writer of a dump takes for its header, as keywords."""

    contract: Required[str]
    """`train-dump.v2` or `rollout-dump.v1`."""
    batch_id: Required[int | str]
    """The batch counter, or a word such as `"eval_3"`."""
    writer_rank: int
    """Global rank of the writing process; default 0."""
    dp_shards: Sequence[Mapping[str, Any]]
    """One mapping per data-parallel rank; default none.

    Its keys: `rank`, `data_parallel_rank`, `sample_indices`, `partition`, `micro_batch_indices`,
    `num_microbatches`, `global_batch_sizes`.
    """
    schedule: Mapping[str, Any] | None
    """The plan document (`schedule-plan.v1`) the batch ran under."""
    raw_reward: Iterable[float] | None
    """Rewards before normalisation, of the whole batch in rollout order: float64 [batch]."""
    dropped: Sequence[DroppedSample]
    """Samples that were generated but not trained on, each with a `reason`."""
    metadata: Mapping[str, Any] | None
    """Anything else worth keeping, written as tagged JSON."""


def make_header(
    *,
    num_samples: int,
    fields: Iterable[Field],
    contract: str,
    batch_id: int | str,
    writer_rank: int = 0,
    dp_shards: Sequence[Mapping[str, Any]] = (),
    schedule: Mapping[str, Any] | None = None,
    raw_reward: Iterable[float] | None = None,
    dropped: Sequence[DroppedSample] = (),
    metadata: Mapping[str, Any] | None = None,
) -> DumpHeader:
    """Return the header of a new dump: of `num_samples` samples with `fields`.

    The other arguments are those of `HeaderKeywords`.

    Raises:
        UnsupportedContractError: `contract` is not one this package writes.
        DumpError: `batch_id` is neither a number nor a word, or a dropped sample gives no reason.
    """
    check_header({"contract": contract}, CONTRACTS, where="write_dump")
    if isinstance(batch_id, bool) or not isinstance(batch_id, (int, str)):
        raise DumpError(f"batch_id must be the batch counter or a word, got {batch_id!r}")
    for entry in dropped:
        if not entry.get("reason"):
            raise DumpError(
                f"dropped sample {dict(entry)} gives no reason; say why it was not trained on"
            )
    return {
        "contract": contract,
        "minor": MINOR,
        "producer": producer(),
        "format_version": FORMAT_VERSION,
        "batch_id": batch_id,
        "writer_rank": int(writer_rank),
        "num_samples": int(num_samples),
        "fields": {field.name: field.to_document() for field in fields},
        "dp_shards": [dict(shard) for shard in dp_shards],
        "raw_reward": None if raw_reward is None else [float(reward) for reward in raw_reward],
        "schedule": None if schedule is None else dict(schedule),
        "dropped": [cast("DroppedSample", dict(entry)) for entry in dropped],
        "metadata": dict(metadata or {}),
        "row_groups": [],
        "checksums": {},
    }


def seal_header(header: DumpHeader) -> tuple[str, str]:
    """Return the header as JSON and its CRC-32 in decimal."""
    text = tagged_json.dumps(dict(header), what="header")
    return text, str(zlib.crc32(text.encode()))


def open_header(text: bytes, crc: bytes | None, *, where: str) -> DumpHeader:
    """Read a sealed header; see `header_of`.

    Raises:
        DumpError: the checksum does not match, or a key is missing or of the wrong type.
        UnsupportedContractError: another contract.
    """
    if crc is None or not crc.isdigit() or int(crc) != zlib.crc32(text):
        raise DumpError(f"{where}: the header's checksum does not match: the file is damaged")
    return header_of(tagged_json.loads(text, what=f"{where}: header"), where=where)


def header_of(found: object, *, where: str) -> DumpHeader:
    """Check a header that was read, from wherever.

    Keys that a newer minor added are dropped, keys it may lack get their default.

    Raises:
        DumpError: a key, or what stands in it, is missing or of the wrong type.
        UnsupportedContractError: another contract.
    """
    check_header(found, CONTRACTS, where=where)
    assert isinstance(found, dict)
    header = {key: found.get(key, _DEFAULTS.get(key)) for key in DumpHeader.__annotations__}
    wrong = [key for key, value in header.items() if not isinstance(value, _TYPES[key])]
    if wrong:
        raise DumpError(f"{where}: header key {wrong[0]!r} is missing or of the wrong type")
    inside = content_problem(header)
    if inside is not None:
        raise DumpError(f"{where}: header key {inside} is of the wrong type")
    return cast("DumpHeader", header)


def field_of(name: str, document: FieldDocument, *, where: str) -> Field:
    """Return the field a header describes.

    Raises:
        DumpError: a key is missing or has a value outside the contract.
    """
    try:
        field = Field(
            name=name,
            kind=document["kind"],
            dtype=str(document["dtype"]),
            stored=str(document["stored"]),
            trailing=tuple(int(size) for size in document["trailing"]),
            nullable=bool(document["nullable"]),
            response_aligned=bool(document["response_aligned"]),
            form=document["form"],
        )
        numeric = field.kind in {"scalar", "ragged"}
        dtypes = [field.numpy_dtype, np.dtype(field.stored)] if numeric else []
        if (
            field.kind not in get_args(Kind)
            or field.form not in get_args(Form)
            or any(dtype.kind not in "iufb" or dtype.itemsize > 8 for dtype in dtypes)
        ):
            raise ValueError(document)
    except (KeyError, TypeError, ValueError) as error:
        raise DumpError(
            f"{where}: field {name!r} is described by {document!r}, which this rl-dump cannot read"
        ) from error
    return field


_TYPES: dict[str, tuple[type, ...]] = {
    "contract": (str,),
    "minor": (int,),
    "producer": (dict,),
    "format_version": (int,),
    "batch_id": (int, str),
    "writer_rank": (int,),
    "num_samples": (int,),
    "fields": (dict,),
    "dp_shards": (list,),
    "raw_reward": (list, type(None)),
    "schedule": (dict, type(None)),
    "dropped": (list,),
    "metadata": (dict,),
    "row_groups": (list,),
    "checksums": (dict,),
}


def content_problem(header: Mapping[str, Any]) -> str | None:
    """Return the first key whose content has a wrong type, such as `dropped[0].reason`, or None.

    A checksum tells damage, not sense: a header that another program wrote can be sealed well and
    still hold a word for a number.

    Args:
        header: keys of the right outer type; those that are missing are not looked at.
    """
    minor = header.get("minor", 0)
    if not _whole(minor) or minor < 0:
        return "minor"
    for name, document in header.get("fields", {}).items():
        if not isinstance(name, str) or not isinstance(document, dict):
            return f"fields[{name!r}]"
    for key, rules in (("dp_shards", _SHARD), ("dropped", _DROPPED)):
        for row, entry in enumerate(header.get(key) or []):
            if not isinstance(entry, dict):
                return f"{key}[{row}]"
            wrong = next(
                (name for name, holds in rules.items() if not holds(entry.get(name))), None
            )
            if wrong is not None:
                return f"{key}[{row}].{wrong}"
    rewards = header.get("raw_reward") or []
    wrong_reward = next((row for row, reward in enumerate(rewards) if not _number(reward)), None)
    return None if wrong_reward is None else f"raw_reward[{wrong_reward}]"


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole_or_none(value: object) -> bool:
    return value is None or _whole(value)


def _number(value: object) -> bool:
    # A whole number beyond the largest float would fail in whoever computes with it.
    return isinstance(value, (float, np.floating)) or (
        isinstance(value, (int, np.integer)) and abs(int(value)) <= sys.float_info.max
    )


def _numbers(value: object) -> bool:
    """Take None, a flat array of whole numbers, or a list or tuple of them.

    None stands for what is not known.
    """
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return value is None or (isinstance(value, (list, tuple)) and all(map(_whole_or_none, value)))


def _partition(value: object) -> bool:
    has_gaps = isinstance(value, (list, tuple)) and None in value
    return _numbers(value) and not has_gaps


_SHARD: dict[str, Callable[[object], bool]] = {
    "rank": _whole_or_none,
    "data_parallel_rank": _whole_or_none,
    "partition": _partition,
    "num_microbatches": _numbers,
    "global_batch_sizes": _numbers,
}
_DROPPED: dict[str, Callable[[object], bool]] = {
    "rollout_position": _whole_or_none,
    "sample_index": _whole_or_none,
    "reason": lambda value: value is None or isinstance(value, str),
}
