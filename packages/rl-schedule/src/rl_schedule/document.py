"""Between `schedule-plan.v1` documents and arrays; layer above `contract` and `arrays`, below the
records.

Decides what a reader accepts. Invariants: another contract id is refused with both ids; every other
fault of a document is collected and reported at once; unknown keys and newer minors are read past,
a newer minor is logged once.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, cast

import numpy as np

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.contract import (
    ARRAY_NAMES,
    CONTRACT_ID,
    MINOR,
    ArrayDocument,
    PlanArrays,
    SchedulePlanDocument,
    SettingsDocument,
    StatsDocument,
    StepStatsDocument,
)
from rl_schedule.errors import PlanDocumentError, UnsupportedContractError

__all__ = ["DecodedPlan", "decode_plan", "encode_plan"]

_DISTRIBUTION = "rl-schedule"
_log = logging.getLogger("rl_schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPlan:
    """The checked content of a document."""

    dp_size: int
    """Data-parallel ranks."""
    digest: str
    """The digest the document claims; not yet compared."""
    settings: SettingsDocument
    """The request without its data."""
    stats: StatsDocument
    """The figures."""
    arrays: dict[str, IntArray]
    """The arrays of the contract, int64, read-only."""


def encode_plan(
    *,
    dp_size: int,
    digest: str,
    settings: SettingsDocument,
    stats: StatsDocument,
    arrays: Mapping[str, IntArray],
) -> SchedulePlanDocument:
    """Return the document of plain JSON values for one plan."""
    columns: dict[str, ArrayDocument] = {
        name: {
            "dtype": "int64",
            "shape": list(arrays[name].shape),
            "data": arrays[name].ravel().tolist(),
        }
        for name in ARRAY_NAMES
    }
    return {
        "contract": CONTRACT_ID,
        "minor": MINOR,
        "producer": {"distribution": _DISTRIBUTION, "version": _version()},
        "dp_size": dp_size,
        "digest": digest,
        "settings": settings,
        "stats": stats,
        "arrays": cast("PlanArrays", columns),
    }


def decode_plan(document: Mapping[str, object]) -> DecodedPlan:
    """Check a document and return its content.

    Raises:
        UnsupportedContractError: the id is not `schedule-plan.v1`.
        PlanDocumentError: any other fault, all of them at once.
    """
    if not isinstance(document, Mapping):
        raise PlanDocumentError([f"a document is a JSON object, got {type(document).__name__}"])
    contract = document.get("contract")
    if contract != CONTRACT_ID:
        raise UnsupportedContractError(
            f"this reader understands {CONTRACT_ID!r}, the document says {contract!r}; "
            f"install the {_DISTRIBUTION} version that wrote it, or write it again with this one"
        )
    problems: list[str] = []
    _check_minor(document.get("minor"), problems)
    dp_size = document.get("dp_size")
    if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
        problems.append(f"dp_size must be an integer >= 1, got {dp_size!r}")
    digest = document.get("digest")
    if not isinstance(digest, str):
        problems.append(f"digest must be a string, got {digest!r}")
    settings = _object(document, "settings", SettingsDocument, problems)
    stats = _object(document, "stats", StatsDocument, problems)
    for number, step in enumerate(_steps(stats, problems)):
        _require(step, StepStatsDocument, f"stats.steps[{number}]", problems)
    arrays = _arrays(document.get("arrays"), problems)
    if not problems:
        _check_consistency(cast("int", dp_size), arrays, problems)
    if problems:
        raise PlanDocumentError(problems)
    return DecodedPlan(
        dp_size=cast("int", dp_size),
        digest=cast("str", digest),
        settings=cast("SettingsDocument", settings),
        stats=cast("StatsDocument", stats),
        arrays=arrays,
    )


def _check_minor(minor: object, problems: list[str]) -> None:
    if isinstance(minor, bool) or not isinstance(minor, int) or minor < 0:
        problems.append(f"minor must be an integer >= 0, got {minor!r}")
    elif minor > MINOR:
        _log_newer_minor(minor)


@cache
def _log_newer_minor(minor: int) -> None:
    _log.warning(
        "reading %s minor %d with a reader of minor %d; unknown keys are ignored",
        CONTRACT_ID,
        minor,
        MINOR,
    )


@cache
def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a source tree on the path without installation
        return "0+unknown"


def _object(
    document: Mapping[str, object], name: str, shape: type, problems: list[str]
) -> Mapping[str, Any]:
    value = document.get(name)
    if not isinstance(value, Mapping):
        problems.append(f"{name} must be an object, got {type(value).__name__}")
        return {}
    _require(value, shape, name, problems)
    return value


def _require(value: object, shape: type, name: str, problems: list[str]) -> None:
    if not isinstance(value, Mapping):
        problems.append(f"{name} must be an object, got {type(value).__name__}")
        return
    problems.extend(f"{name} lacks {key!r}" for key in shape.__annotations__ if key not in value)


def _steps(stats: Mapping[str, Any], problems: list[str]) -> Sequence[object]:
    steps = stats.get("steps", [])
    if isinstance(steps, (list, tuple)):
        return steps
    problems.append(f"stats.steps must be a list, got {type(steps).__name__}")
    return []


def _arrays(columns: object, problems: list[str]) -> dict[str, IntArray]:
    if not isinstance(columns, Mapping):
        problems.append(f"arrays must be an object, got {type(columns).__name__}")
        return {}
    found: dict[str, IntArray] = {}
    for name in ARRAY_NAMES:
        fault, array = _array(columns.get(name), 2 if name == "filler_micro_batches" else 1)
        if array is None:
            problems.append(f"arrays.{name} {fault}")
        else:
            found[name] = array
    return found


def _array(column: object, ndim: int) -> tuple[str, IntArray | None]:
    """Return what is wrong with one array document, or the array."""
    if not isinstance(column, Mapping):
        return "is missing or no object", None
    if column.get("dtype") != "int64":
        return f"must have dtype int64, got {column.get('dtype')!r}", None
    shape, data = column.get("shape"), column.get("data")
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) != ndim
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        return f"must have a shape of {ndim} integers, got {shape!r}", None
    if not isinstance(data, (list, tuple)) or not all(
        type(value) is int and -(2**63) <= value < 2**63 for value in data
    ):
        return "must hold its values as a list of int64", None
    if len(data) != int(np.prod(shape, dtype=np.int64)):
        return (
            (
                f"has {len(data)} values, its shape {list(shape)} asks for"
                f" {int(np.prod(shape, dtype=np.int64))}"
            ),
            None,
        )
    return "", read_only(np.array(data, dtype=np.int64).reshape(shape))


def _check_consistency(dp_size: int, arrays: dict[str, IntArray], problems: list[str]) -> None:
    """Check what must hold between the arrays for a plan to be readable at all; promises are `check_plan`'s."""
    offsets, steps = arrays["micro_batch_offsets"], arrays["num_microbatches"]
    rows = dp_size * int(steps.sum())
    if bool(np.any(steps < 0)) or offsets.size != rows + 1:
        problems.append(
            f"micro_batch_offsets has {offsets.size} entries, {dp_size} ranks times"
            f" num_microbatches plus one is {rows + 1}"
        )
    elif (
        offsets[0] != 0
        or bool(np.any(np.diff(offsets) < 0))
        or offsets[-1] != arrays["sample_positions"].size
    ):
        problems.append(
            f"micro_batch_offsets must rise from 0 to the {arrays['sample_positions'].size}"
            " sample_positions"
        )
    if arrays["global_batch_sizes"].size != steps.size:
        problems.append(
            f"global_batch_sizes has {arrays['global_batch_sizes'].size} steps, num_microbatches"
            f" {steps.size}"
        )
    if arrays["filler_micro_batches"].shape[1] != 2:
        problems.append(
            "filler_micro_batches must have shape [F, 2], got"
            f" {list(arrays['filler_micro_batches'].shape)}"
        )
