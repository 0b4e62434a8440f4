"""What each setting of a request may be, alone and beside the others.

Every check is a function of one value that returns it normalised or raises; `Checked` runs them and
keeps what they say, so that a request tells all its problems at once.

Invariant: whatever a caller passes, nothing but a `ScheduleError` leaves these checks.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, cast

import numpy as np

from rl_schedule.arrays import IntArray, identifier_column, positive_column, positive_int
from rl_schedule.cost import CostModel
from rl_schedule.errors import ScheduleError
from rl_schedule.packing import Units
from rl_schedule.steps import StepSplitter, load_splitter

__all__ = [
    "COUNTS",
    "MOST_RANKS",
    "MOST_TOKENS",
    "OPTIONAL_COUNTS",
    "Checked",
    "batch_size",
    "column_problems",
    "cost_model",
    "keep_together",
    "limit_problems",
    "one_of",
    "optional_count",
    "rollout_names",
    "slack",
    "step_splitter",
]

MOST_RANKS = 2**20
"""Ranks times pipeline group at most; far above any cluster, so a mistyped number ends at once."""
MOST_TOKENS = 2**31 - 1
"""Longest sample accepted: beyond it the square of a length no longer fits int64."""

OPTIONAL_COUNTS: Final = ("max_tokens_per_gpu", "micro_batch_size", "max_samples_per_micro_batch")
"""Settings that are an integer >= 1 or None."""

COUNTS: Final = (
    "dp_size",
    "cp_size",
    "vpp_size",
    "microbatch_group_size_per_vp_stage",
    "pad_to_multiple",
)
"""Settings that are an integer >= 1."""


class Checked:
    """The fields of a record, checked one by one: the good values, and what is wrong."""

    def __init__(self, record: Any) -> None:
        """Start with every field of `record` as given."""
        self.values: dict[str, Any] = {
            name: getattr(record, name) for name in record.__dataclass_fields__
        }
        self.problems: list[str] = []
        self.refused: set[str] = set()

    def take(self, name: str, check: Any, *arguments: object) -> Any:
        """Put `check(value, [name,] *arguments)` in place of a value; None if it is refused."""
        try:
            self.values[name] = check(self.values[name], name, *arguments)
        except ScheduleError as error:
            self.problems.append(str(error))
            self.values[name] = None
            self.refused.add(name)
        return self.values[name]

    def problem(self, message: str) -> None:
        """Note a problem that no check of one value finds."""
        self.problems.append(message)

    def raise_all(self) -> None:
        """Raise all problems as one error, if there are any."""
        if self.problems:
            raise ScheduleError("; ".join(self.problems))


def one_of(value: object, name: str, legal: Sequence[object]) -> object:
    """Return `value` if it is one of `legal`, strings or booleans."""
    if isinstance(value, np.bool_):
        value = bool(value)
    if not isinstance(value, (str, bool)) or value not in legal:
        raise ScheduleError(
            f"{name} must be one of {', '.join(map(str, legal))}, got {_short(value)}"
        )
    return value


def slack(value: object, name: str) -> object:
    """Return a slack as a float in [0, 1], or `"auto"`."""
    if isinstance(value, str) and value == "auto":
        return value
    number: Any = value
    # Compared as it is: an integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= number <= 1:
        raise ScheduleError(
            f'{name} must be a fraction from 0 to 1 (0.0025 = 0.25 %) or "auto", got'
            f" {_short(value)}"
        )
    return float(value)


def step_splitter(value: object, name: str) -> str | StepSplitter:
    """Return a splitter if it is a known name, can be imported, or can be called."""
    if isinstance(value, str):
        if value not in {"fixed", "sizes", "all"}:
            load_splitter(value)
    elif not callable(value):
        raise ScheduleError(
            f"{name} must be a name, an import path or a callable, got {_short(value)}"
        )
    return cast("str | StepSplitter", value)


def cost_model(value: object, name: str) -> CostModel | None:
    """Return a cost model if it can be called, or None."""
    if value is not None and not callable(value):
        raise ScheduleError(
            f"{name} must be callable on an int64 array of lengths, got {_short(value)}"
        )
    return cast("CostModel | None", value)


def keep_together(value: object, name: str) -> IntArray:
    """Return the units of samples as integers, one for each."""
    return identifier_column(value, name)[0]


def optional_count(value: object, name: str) -> int | None:
    """Return an integer >= 1, or None."""
    return None if value is None else positive_int(value, name)


def batch_size(value: object, name: str, splitter: object) -> int | tuple[int, ...] | None:
    """Check `global_batch_size` against the splitter that will read it."""
    is_list = not isinstance(value, str) and hasattr(value, "__len__")
    if isinstance(splitter, str) and splitter == "sizes":
        sizes = positive_column(value, name).tolist() if is_list else []
        if not sizes:
            raise ScheduleError(
                f'splitter="sizes" needs {name} as a list of rollouts per step, with at least one'
                f" step, got {_short(value)}"
            )
        return tuple(sizes)
    if isinstance(splitter, str) and splitter == "all" and value is not None:
        raise ScheduleError(
            f'splitter="all" takes every rollout in one step, so {name} must be None, got'
            f" {_short(value)}"
        )
    if value is None and splitter != "fixed":
        return None
    if is_list:
        raise ScheduleError(
            f'{name} is a list only under splitter="sizes", got {_short(value)} with'
            f" splitter={_short(splitter)}"
        )
    return positive_int(value, name)


def rollout_names(
    value: object, name: str, ids: IntArray | None, found: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names behind rollout ids: those found in the column, or those given."""
    given = list(value) if isinstance(value, (list, tuple)) else None
    if given is None or not all(isinstance(entry, str) for entry in given):
        raise ScheduleError(f"{name} must be a list of strings, got {_short(value)}")
    if found and given and tuple(given) != found:
        raise ScheduleError(
            f"{name} is filled in where rollout_ids are strings; leave it out, or pass integers"
        )
    if given and ids is not None and ids.size and not 0 <= ids.min() <= ids.max() < len(given):
        raise ScheduleError(
            f"{name} names {len(given)} rollouts, but rollout_ids go from {int(ids.min())} to"
            f" {int(ids.max())}"
        )
    return found or tuple(given)


def column_problems(found: Checked) -> list[str]:
    """List what is wrong with the columns beside one another; those refused before are None."""
    problems: list[str] = []
    values, lengths = found.values, found.values["total_lengths"]
    if lengths is None:
        return problems
    longest = int(np.max(lengths, initial=0))
    if longest > MOST_TOKENS:
        problems.append(
            f"sample {int(np.argmax(lengths))} has {longest} tokens, more than {MOST_TOKENS}; is"
            " the unit right?"
        )
    elif values["pad_to_multiple"] is not None:
        multiple = values["pad_to_multiple"]
        padded = -(-longest // multiple) * multiple
        if padded > MOST_TOKENS:
            problems.append(
                f"pad_to_multiple = {multiple} pads a sample to {padded} tokens, more than"
                f" {MOST_TOKENS}"
            )
    whole = True
    for name, what in (
        ("rollout_ids", "rollout id"),
        ("sample_costs", "cost"),
        ("keep_together", "id"),
    ):
        column = values[name]
        if column is not None and len(column) != len(lengths):
            whole = False
            problems.append(
                f"total_lengths has {len(lengths)} samples but {name} has {len(column)}; pass one"
                f" {what} per sample"
            )
    if whole and values["keep_together"] is not None and values["rollout_ids"] is not None:
        problems += _unit_problems(values)
    return problems


def _unit_problems(values: Mapping[str, Any]) -> list[str]:
    """List the samples to keep together that no micro-batch could hold."""
    ids, kept = values["rollout_ids"], values["keep_together"]
    units = Units.of_samples(np.asarray(values["total_lengths"]), kept)
    problems = []
    # The rollout of a unit's first sample stands for the unit.
    torn = np.flatnonzero(ids != ids[units.first][units.of])
    if torn.size:
        problems.append(
            f"keep_together joins samples of different rollouts, first {int(torn[0])} and"
            f" {int(units.first[units.of[torn[0]]])}; give them one rollout id, so that they are"
            " in one step"
        )
    for name in ("micro_batch_size", "max_samples_per_micro_batch"):
        most = values[name]
        if most is not None and units.counts.size and int(units.counts.max()) > most:
            largest = int(np.argmax(units.counts))
            problems.append(
                f"keep_together joins {int(units.counts[largest])} samples, first"
                f" {int(units.first[largest])}, more than {name} = {most}"
            )
    return problems


def limit_problems(found: Checked) -> list[str]:
    """List the settings that contradict one another or could not be honoured."""
    problems, values = [], found.values
    given = [
        name
        for name in ("max_tokens_per_gpu", "micro_batch_size")
        if values[name] is not None or name in found.refused
    ]
    if len(given) != 1:
        problems.append(
            "pass exactly one of max_tokens_per_gpu (dynamic) and micro_batch_size (static), got"
            f" {'both' if given else 'neither'}"
        )
    static = given == ["micro_batch_size"]
    for name, neutral in (
        ("on_oversized", "alone"),
        ("max_samples_per_micro_batch", None),
        ("pad_to_longest", False),
    ):
        if static and values[name] not in (neutral, None):
            problems.append(
                f"{name} = {values[name]!r} has no effect under static packing, which has no token"
                f" cap; leave it out or pass max_tokens_per_gpu instead of micro_batch_size"
            )
    for idle, where in (
        (static, "under static packing"),
        (values["balance"] == "none", 'with balance="none"'),
        (values["equal_samples"], "with equal_samples"),
        (values["pad_to_longest"], "with pad_to_longest"),
    ):
        if idle and values["rank_slack"] not in (0.0, None):
            problems.append(
                f"rank_slack = {values['rank_slack']!r} has no effect {where}; leave it out"
            )
    ranks, group = values["dp_size"], values["microbatch_group_size_per_vp_stage"]
    if ranks is not None and group is not None and values["vpp_size"] is not None:
        alignment = ranks * (group if values["vpp_size"] > 1 else 1)
        if alignment > MOST_RANKS:
            problems.append(
                f"dp_size times the pipeline group is {alignment}, more than {MOST_RANKS}; is the"
                " number right?"
            )
    return problems


def _short(value: object) -> str:
    """Write a value for a message; whatever its repr does."""
    try:
        text = repr(value)
    except Exception:
        text = type(value).__name__
    return text if len(text) <= 200 else text[:200] + "..."
