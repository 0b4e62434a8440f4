"""What a reader of `schedule-plan.v1` documents accepts.

The records `ScheduleRequest`, `ScheduleStats` and `StepStats` say which keys there are and which
values they may have.

Invariants: another contract id is refused with both ids; every other fault of a document is
collected and reported at once; settings that were altered are refused, although the plan's digest
leaves them out; unknown keys and newer minors are read past, a newer minor is logged once.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from math import prod
from typing import Any, cast, get_type_hints

import numpy as np

from rl_schedule.arrays import IntArray, read_only
from rl_schedule.contract import ARRAY_NAMES, CONTRACT_ID, MINOR, SETTINGS_OF_MINOR_0
from rl_schedule.contract_header import check_header
from rl_schedule.errors import PlanDocumentError, ScheduleError
from rl_schedule.request import ScheduleRequest
from rl_schedule.statistics import ScheduleStats, StepStats

__all__ = ["decode_plan", "layout_problems", "settings_digest"]


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
    missing = [*_missing_keys(content)]
    problems = [*_header_problems(content), *missing]
    if not missing:
        problems += [*_setting_problems(content), *_figure_problems(content)]
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
    if problems or (problems := [*_step_problems(content, arrays)]):
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
    names: Any = content.get("rollout_names", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        yield f"rollout_names must be a list of strings, got {names!r:.80}"


def _missing_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """List the objects that are none, and the keys of the contract that objects lack."""
    stats = content.get("stats")
    steps = stats.get("steps", []) if isinstance(stats, Mapping) else []
    if not isinstance(steps, (list, tuple)):
        yield f"stats.steps must be a list, got {type(steps).__name__}"
        steps = []
    plan_keys, step_keys = (_needed(record) for record in (ScheduleStats, StepStats))
    objects: list[tuple[str, object, Iterable[str]]] = [
        ("settings", content.get("settings"), SETTINGS_OF_MINOR_0),
        ("stats", stats, plan_keys),
        *((f"stats.steps[{number}]", step, step_keys) for number, step in enumerate(steps)),
    ]
    for where, value, keys in objects:
        if not isinstance(value, Mapping):
            yield f"{where} must be an object, got {type(value).__name__}"
        else:
            yield from (f"{where} lacks {key!r}" for key in keys if key not in value)


def _needed(record: Any) -> list[str]:
    """Name the fields that a document must have: those without a default."""
    return [field.name for field in fields(record) if field.default is MISSING]


def _setting_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """List the settings that no request could have; all keys are there."""
    settings = content["settings"]
    ranks = content.get("dp_size")
    if type(ranks) is int and ranks >= 1 and settings["dp_size"] != ranks:
        yield (f"settings.dp_size is {settings['dp_size']!r}, the plan is for {ranks} ranks")
    if not isinstance(settings["splitter"], str):
        yield f"settings.splitter must be a string, got {settings['splitter']!r}"
    size = settings["global_batch_size"]
    sizes = size if isinstance(size, (list, tuple)) else [1 if size is None else size]
    if not _are_int64(sizes, least=1):
        yield (
            "settings.global_batch_size must be an integer >= 1, a list of them or null, got"
            f" {size!r}"
        )
    try:
        ScheduleRequest.from_settings(settings, total_lengths=[], rollout_ids=[])
    except PlanDocumentError as error:
        yield from error.problems
    except ScheduleError as error:
        yield f"settings: {error}"
    stated = content.get("settings_digest")
    try:
        found = settings_digest(settings)
    except (TypeError, ValueError) as error:
        yield f"settings are not JSON: {error}"
        return
    # Documents of minor 0 have none.
    if (stated is not None or content.get("minor") != 0) and stated != found:
        yield f"settings_digest is {stated!r} but the settings give {found}; they were altered"


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, of settings as JSON with sorted keys and without spaces."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _figure_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """List the figures of `stats` that are no figures; all keys are there."""
    stats = content["stats"]
    yield from _wrong_types("stats", stats, ScheduleStats)
    for number, step in enumerate(stats["steps"]):
        yield from _wrong_types(f"stats.steps[{number}]", step, StepStats)


def _wrong_types(where: str, values: Mapping[str, Any], record: Any) -> Iterator[str]:
    for name, hint in get_type_hints(record).items():
        if name not in values or name == "steps":
            continue
        value = values[name]
        if hint is str:
            what, good = "a string", isinstance(value, str)
        elif hint is int:
            what, good = "an integer >= 0", type(value) is int and 0 <= value < 2**63
        else:
            optional = hint is not float
            what = "a number >= 0" + (" or null" if optional else "")
            good = type(value) in {int, float} and 0 <= value <= sys.float_info.max
            good = good or (value is None and optional)
        if not good:
            yield f"{where}.{name} must be {what}, got {value!r:.80}"


def _step_problems(content: Mapping[str, Any], arrays: Mapping[str, IntArray]) -> Iterator[str]:
    """List where the settings, the figures and the arrays of a readable document disagree."""
    settings, steps = content["settings"], content["stats"]["steps"]
    counts = arrays["num_microbatches"].tolist()
    if [step["micro_batches"] for step in steps] != counts:
        yield f"stats.steps do not have the micro-batches of num_microbatches, {counts!r:.80}"
        return
    if settings["max_tokens_per_gpu"] is None:
        return
    cap = settings["max_tokens_per_gpu"] * settings["cp_size"]
    for number, step in enumerate(steps):
        room = step["micro_batches"] * content["dp_size"] * cap
        expected = step["num_tokens"] / room if room else 0.0
        if step["fill"] is None or not math.isclose(step["fill"], expected, rel_tol=1e-9):
            yield (
                f"stats.steps[{number}].fill is {step['fill']!r}, but {step['num_tokens']} tokens"
                f" under the cap of {cap} tokens in settings are {expected!r}; one was altered"
            )


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
