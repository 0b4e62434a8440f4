"""What a reader of `schedule-plan.v1` documents accepts.

Invariants: another contract id is refused with both ids; every other fault of a document is
collected and reported at once; unknown keys and newer minors are read past, a newer minor is logged
once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from math import prod
from typing import Any, cast

import numpy as np

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.contract import ARRAY_NAMES, CONTRACT_ID, MINOR
from rl_schedule.contract_header import check_header
from rl_schedule.errors import PlanDocumentError
from rl_schedule.request import SETTING_NAMES
from rl_schedule.statistics import ScheduleStats, StepStats

__all__ = ["decode_plan", "layout_problems"]


def decode_plan(document: Mapping[str, object]) -> dict[str, IntArray]:
    """Check a document and return its arrays by name, int64, read-only.

    Whether they have the digest that the document claims is not looked at.

    Raises:
        UnsupportedContractError: the id is not `schedule-plan.v1`.
        PlanDocumentError: any other fault, all of them at once.
    """
    if not isinstance(document, Mapping):
        raise PlanDocumentError([f"a document is a JSON object, got {type(document).__name__}"])
    check_header(document, {CONTRACT_ID: MINOR}, where="plan")
    content = cast("dict[str, Any]", document)
    problems = [*_header_problems(content), *_missing_keys(content)]
    columns: Any = content.get("arrays")
    if isinstance(columns, Mapping):
        faults = {name: _array_fault(name, columns.get(name)) for name in ARRAY_NAMES}
        problems += [f"arrays.{name} {fault}" for name, fault in faults.items() if fault]
    else:
        problems.append(f"arrays must be an object, got {type(columns).__name__}")
    if problems:
        raise PlanDocumentError(problems)
    arrays = {
        name: read_only(np.array(column["data"], dtype=np.int64).reshape(column["shape"]))
        for name, column in columns.items()
        if name in ARRAY_NAMES
    }
    problems = [message for _, message in layout_problems(content["dp_size"], arrays)]
    if problems:
        raise PlanDocumentError(problems)
    return arrays


def _header_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """List what is wrong with the plain values at the top."""
    for name, least in (("minor", 0), ("dp_size", 1)):
        value = content.get(name)
        if type(value) is not int or value < least:
            yield f"{name} must be an integer >= {least}, got {value!r}"
    if not isinstance(content.get("digest"), str):
        yield f"digest must be a string, got {content.get('digest')!r}"


def _missing_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """List the objects that are none, and the keys of the contract that objects lack."""
    stats = content.get("stats")
    steps = stats.get("steps", []) if isinstance(stats, Mapping) else []
    if not isinstance(steps, (list, tuple)):
        yield f"stats.steps must be a list, got {type(steps).__name__}"
        steps = []
    plan_keys, step_keys = (
        [field.name for field in fields(record)] for record in (ScheduleStats, StepStats)
    )
    objects: list[tuple[str, object, Iterable[str]]] = [
        ("settings", content.get("settings"), SETTING_NAMES),
        ("stats", stats, plan_keys),
        *((f"stats.steps[{number}]", step, step_keys) for number, step in enumerate(steps)),
    ]
    for where, value, keys in objects:
        if not isinstance(value, Mapping):
            yield f"{where} must be an object, got {type(value).__name__}"
        else:
            yield from (f"{where} lacks {key!r}" for key in keys if key not in value)


def _array_fault(name: str, column: object) -> str | None:
    """Return what is wrong with one array document, or None."""
    if not isinstance(column, Mapping):
        return "is missing or no object"
    values: dict[str, Any] = {"dtype": None, "shape": None, "data": None, **column}
    dtype, shape, data = values["dtype"], values["shape"], values["data"]
    if dtype != "int64":
        return f"must have dtype int64, got {dtype!r}"
    ndim = 2 if name == "filler_micro_batches" else 1
    if not _are_int64(shape, least=0) or len(shape) != ndim:
        return f"must have a shape of {ndim} integers, got {shape!r}"
    if not _are_int64(data, least=-(2**63)):
        return "must hold its values as a list of int64"
    if len(data) != prod(shape):
        return f"has {len(data)} values, its shape {list(shape)} asks for {prod(shape)}"
    return None


def _are_int64(values: Any, *, least: int) -> bool:
    """Tell whether `values` is a list of int64 from `least` on; a bool is no integer here."""
    return isinstance(values, (list, tuple)) and all(
        type(value) is int and least <= value < 2**63 for value in values
    )


def layout_problems(dp_size: int, arrays: Mapping[str, IntArray]) -> Iterator[tuple[str, str]]:
    """List what keeps the arrays of a plan from being read at all.

    Args:
        dp_size: ranks of the plan.
        arrays: the arrays of the contract by name.

    Yields:
        The promise that is broken (`check_plan` has all of them) and the message.
    """
    offsets, steps = arrays["micro_batch_offsets"], arrays["num_microbatches"]
    num_samples, num_rows = arrays["sample_positions"].size, dp_size * int(steps.sum())
    if bool(np.any(steps < 0)) or offsets.size != num_rows + 1:
        yield (
            "P1",
            (
                f"micro_batch_offsets has {offsets.size} entries, {dp_size} ranks times"
                f" num_microbatches plus one is {num_rows + 1}"
            ),
        )
    elif offsets[0] != 0 or bool(np.any(np.diff(offsets) < 0)) or offsets[-1] != num_samples:
        yield "P3", f"micro_batch_offsets must rise from 0 to the {num_samples} sample_positions"
    if arrays["global_batch_sizes"].size != steps.size:
        yield (
            "P1",
            (
                f"global_batch_sizes has {arrays['global_batch_sizes'].size} steps,"
                f" num_microbatches {steps.size}"
            ),
        )
    if arrays["filler_micro_batches"].shape[1] != 2:
        yield (
            "P7",
            (
                "filler_micro_batches must have shape [F, 2], got"
                f" {list(arrays['filler_micro_batches'].shape)}"
            ),
        )
