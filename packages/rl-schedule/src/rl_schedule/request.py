"""What is asked for: which settings exist, their defaults and their legal values.

`ScheduleRequest` is the one list of them: `build_dp_schedule` takes its fields as keywords, and the
settings of a document are its fields in JSON.

Invariant: a request that exists is well-formed, so the algorithms below check nothing again; what
can still fail is data that a policy `"error"` refuses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import (
    Identifiers,
    IntArray,
    Integers,
    cost_column,
    identifier_column,
    positive_column,
    positive_int,
)
from rl_schedule.cost import (
    CostModel,
    QuadraticCost,
    describe_cost,
    evaluate_cost,
    name_of,
    read_cost,
)
from rl_schedule.errors import ScheduleError
from rl_schedule.legal_values import (
    COUNTS,
    OPTIONAL_COUNTS,
    Checked,
    batch_size,
    column_problems,
    cost_model,
    keep_together,
    limit_problems,
    one_of,
    optional_count,
    rollout_names,
    slack,
    step_splitter,
)
from rl_schedule.packing import Units
from rl_schedule.steps import StepSplitter

__all__ = [
    "DATA_NAMES",
    "SETTING_NAMES",
    "Balance",
    "ExtraMicroBatches",
    "OnMisaligned",
    "OnOversized",
    "OnTrailing",
    "RankSlack",
    "ScheduleRequest",
]

Balance: TypeAlias = Literal["none", "tokens", "flops"]
"""Plain arrival-order reference mode, or what is levelled over ranks and slots."""

OnOversized: TypeAlias = Literal["alone", "error", "drop"]
"""A sample longer than the cap: own micro-batch, refusal, or its whole rollout dropped first."""

OnMisaligned: TypeAlias = Literal["split_then_filler", "error"]
"""Too few samples to give every rank the same number of micro-batches: fillers, or refusal."""

OnTrailing: TypeAlias = Literal["drop", "partial_step", "error"]
"""Rollouts that fill no step: dropped and listed, trained as a smaller step, or refused."""

RankSlack: TypeAlias = float | Literal["auto"]
"""How far ranks with an unsplittable long sample may end above the mean (0.0025 = 0.25 %)."""

ExtraMicroBatches: TypeAlias = Literal["auto", 0]
"""One more micro-batch per rank where that levels the ranks, or never."""


DATA_NAMES: Final = frozenset(
    {"total_lengths", "rollout_ids", "rollout_names", "sample_costs", "keep_together"}
)
"""Fields of a request that hold one batch's data; all others are settings."""


_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "balance": get_args(Balance),
    "on_oversized": get_args(OnOversized),
    "on_misaligned": get_args(OnMisaligned),
    "on_trailing": get_args(OnTrailing),
    "equal_samples": (False, True),
    "pad_to_longest": (False, True),
}
"""Legal values of each setting that has a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleRequest:
    """One rollout batch and how it is to be trained; the keywords of `build_dp_schedule`.

    Example: `ScheduleRequest(total_lengths=[7, 3, 5], rollout_ids=[0, 0, 1], global_batch_size=2,
    dp_size=1, max_tokens_per_gpu=8)` asks for one step of two rollouts on one rank, at most 8
    tokens per micro-batch.

    Raises:
        ScheduleError: any value outside what the field states; nothing is coerced silently.
    """

    total_lengths: Integers
    """Prompt + response tokens of each sample, >= 1; [n], index = rollout position, 0-based.

    Kept as int64.
    """
    rollout_ids: Identifiers
    """Execution each sample came from; [n]. Samples of one id stay in one step.

    Kept as int64; strings are numbered by first appearance, see `rollout_names`.
    """
    global_batch_size: int | Sequence[int] | None
    """Rollouts (not samples) per step; a list of them under `splitter="sizes"`.

    None where the splitter needs none; not read under `"all"`.
    """
    dp_size: int
    """Data-parallel ranks, without context parallelism."""
    cp_size: int = 1
    """Context-parallel ranks that share one micro-batch's tokens; multiplies the token cap."""
    vpp_size: int = 1
    """Virtual pipeline chunks per rank; 1 = none."""
    microbatch_group_size_per_vp_stage: int = 1
    """With `vpp_size > 1` every rank's micro-batch count is a multiple of this; else not used."""
    max_tokens_per_gpu: int | None = None
    """Dynamic packing: a micro-batch holds at most this times `cp_size` tokens.

    Exactly one of this and the next.
    """
    micro_batch_size: int | None = None
    """Static packing: samples per micro-batch."""
    balance: Balance = "flops"
    """What is levelled over ranks and slots; `none` = arrival-order first-fit, strided ranks."""
    rank_slack: RankSlack = 0.0
    """How far a rank may end above the mean to save slot time.

    0 suits one synchronisation per step; `"auto"` (what saves slot time, at most 5 %) suits one per
    micro-batch.
    """
    extra_micro_batches: ExtraMicroBatches = "auto"
    """Micro-batches that each rank may run beyond the fewest, per step.

    0: none. `"auto"`: at most one, only where the costliest rank would end more than 0.15 % above
    the mean without it, and only if it gets it that close or halves the distance: few micro-batches
    full of long samples cannot always be levelled. None either with `rank_slack="auto"`, which
    levels slots, with virtual pipeline groups, which ask for multiples, or with limits beyond a
    token cap.
    """
    cost: CostModel | None = None
    """What `flops` levels and `stats` measure; None = `QuadraticCost()`.

    `tokens` levels tokens, whatever this is.
    """
    splitter: str | StepSplitter = "fixed"
    """`fixed`, `sizes`, `all`, a `StepSplitter`, or its import path `package.module:name`."""
    on_oversized: OnOversized = "alone"
    """What to do with a sample longer than the token cap."""
    on_misaligned: OnMisaligned = "split_then_filler"
    """What to do when a step has fewer micro-batches than its ranks need even after splitting."""
    on_trailing: OnTrailing = "drop"
    """What to do with rollouts that do not fill a step."""
    pad_to_multiple: int = 1
    """Each sequence is padded to a multiple of this before the cap.

    2 * cp_size for zig-zag context parallelism.
    """
    sample_costs: Sequence[float] | npt.NDArray[Any] | None = None
    """What each sample costs, [n], >= 0, for samples whose cost is not a matter of length alone.

    Instead of the default cost; beside a given `cost`, in its unit: the two are added. Kept as
    int64 or float64.
    """
    keep_together: Identifiers | None = None
    """Samples of one id share a micro-batch, [n]; such as the two of a preference pair.

    They must be of one rollout. Kept as int64; None = no sample needs another.
    """
    max_samples_per_micro_batch: int | None = None
    """Dynamic packing: a micro-batch holds at most this many samples; None = any number."""
    equal_samples: bool = False
    """Whether every rank gets the same number of samples in each step.

    The samples of a step must be a multiple of `dp_size`; with `keep_together`, the groups of each
    size must be: every rank gets equally many of each. Ranks are packed one by one and all run as
    many micro-batches as the fullest, so a step can have more of them than first-fit-decreasing
    over all its samples needs.
    """
    pad_to_longest: bool = False
    """Whether the trainer pads a micro-batch to its longest sample.

    The cap is then compared with the longest times the count, and a micro-batch costs that too.
    """
    rollout_names: Sequence[str] = ()
    """What stands behind rollout ids 0, 1, ...; filled in where `rollout_ids` are strings."""

    def __post_init__(self) -> None:
        """Freeze the columns and check every setting; all problems are told at once."""
        found = Checked(self)
        found.take("total_lengths", positive_column)
        ids, names = found.take("rollout_ids", identifier_column) or (None, ())
        found.values["rollout_ids"] = ids
        found.take("rollout_names", rollout_names, ids, names)
        checks: dict[Callable[..., object], tuple[str, ...]] = {
            positive_int: COUNTS,
            optional_count: OPTIONAL_COUNTS,
            slack: ("rank_slack",),
            _extra_micro_batches: ("extra_micro_batches",),
            cost_model: ("cost",),
            step_splitter: ("splitter",),
        }
        for check, settings in checks.items():
            for name in settings:
                found.take(name, check)
        for name, legal in _CHOICES.items():
            found.take(name, one_of, legal)
        for name, column in (("sample_costs", cost_column), ("keep_together", keep_together)):
            if getattr(self, name) is not None:
                found.take(name, column)
        if found.values["splitter"] is not None:
            found.take("global_batch_size", batch_size, self.splitter)
        found.problems += [*column_problems(found), *limit_problems(found)]
        found.raise_all()
        for name, value in found.values.items():
            object.__setattr__(self, name, value)

    @property
    def token_cap(self) -> int | None:
        """Tokens one micro-batch may hold, `max_tokens_per_gpu * cp_size`; None if static."""
        return None if self.max_tokens_per_gpu is None else self.max_tokens_per_gpu * self.cp_size

    @property
    def alignment(self) -> int:
        """What micro-batches of a step are a multiple of: `dp_size` times the VPP group, if any."""
        return self.dp_size * (self.microbatch_group_size_per_vp_stage if self.vpp_size > 1 else 1)

    @property
    def padded_lengths(self) -> IntArray:
        """Tokens each sample occupies, int64 [n]: its length rounded up to `pad_to_multiple`."""
        lengths, multiple = np.asarray(self.total_lengths), self.pad_to_multiple
        return lengths if multiple == 1 else -(-lengths // multiple) * multiple

    @property
    def oversized_samples(self) -> IntArray:
        """Rollout positions that cannot be in a micro-batch under the cap, ascending.

        Those whose padded length exceeds it, or that of the samples they are kept together with; no
        sample if static.
        """
        cap = self.token_cap
        if cap is None:
            return np.empty(0, dtype=np.int64)
        if self.keep_together is None:
            return np.flatnonzero(self.padded_lengths > cap)
        return np.flatnonzero((self.units().footprints(self.pad_to_longest) > cap)[self.units().of])

    def units(self) -> Units:
        """Return the samples grouped by what must share a micro-batch; each alone by default."""
        return Units.of_samples(self.padded_lengths, self.keep_together)

    @property
    def has_limits(self) -> bool:
        """Whether micro-batches must keep more than a token cap or a number of samples."""
        return (
            self.keep_together is not None
            or self.max_samples_per_micro_batch is not None
            or self.equal_samples
            or self.pad_to_longest
        )

    @property
    def cost_model(self) -> CostModel:
        """The model that `stats` measure: `cost`, or the default."""
        return QuadraticCost() if self.cost is None else self.cost

    def costs_of(self, members: IntArray) -> npt.NDArray[Any]:
        """Return what each of `members` costs, [n] finite numbers >= 0.

        Args:
            members: int64 [n], rollout positions.

        Raises:
            ScheduleError: the cost model returns something that is no cost, or costs add up beyond
                float64.
        """
        lengths = self.padded_lengths[members]
        if self.sample_costs is None:
            return evaluate_cost(self.cost_model, lengths)
        own: npt.NDArray[Any] = np.asarray(self.sample_costs)[members]
        if self.cost is None:
            return own
        # In float64: a sum of two int64 could overflow.
        with np.errstate(over="ignore"):
            both = own.astype(np.float64) + evaluate_cost(self.cost, lengths).astype(np.float64)
        beyond = np.flatnonzero(~np.isfinite(both))
        if beyond.size:
            raise ScheduleError(
                f"sample {int(members[beyond[0]])}: its sample_costs and the cost model add up"
                " to more than float64 holds; give both in a larger unit"
            )
        return both

    def levelled_costs_of(self, members: IntArray) -> npt.NDArray[Any]:
        """Return what is levelled over ranks: tokens under `balance="tokens"`, else `costs_of`."""
        return self.padded_lengths[members] if self.balance == "tokens" else self.costs_of(members)

    def settings(self) -> dict[str, Any]:
        """Return every setting, without the two columns, as JSON values."""
        values = {name: getattr(self, name) for name in SETTING_NAMES}
        values["cost"] = describe_cost(self.cost_model)
        if self.sample_costs is not None:
            added = "" if self.cost is None else f" + {name_of(self.cost)}"
            values["cost"] = {"kind": "custom", "parameters": {"name": f"sample_costs{added}"}}
        if isinstance(self.global_batch_size, tuple):
            values["global_batch_size"] = list(self.global_batch_size)
        if not isinstance(self.splitter, str):
            values["splitter"] = name_of(self.splitter)
        return values

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], *, total_lengths: Integers, **data: Any
    ) -> "ScheduleRequest":
        """Rebuild the request behind a plan, for `check_plan`.

        The splitter is not rebuilt (the plan states its steps, and a document must not name code to
        import), and neither is a cost model from elsewhere: the default stands in for it. Settings
        that are younger than the document have their default.

        Args:
            settings: as `settings` gives them; keys of a newer minor are left out.
            total_lengths: as in the request.
            **data: `rollout_ids`, and the other columns of the request where it has them.
        """
        # Documents that do not say so are of planners that never grew a step.
        known: dict[str, Any] = {"extra_micro_batches": 0}
        known |= {name: settings[name] for name in SETTING_NAMES if name in settings}
        known |= {"cost": read_cost(settings["cost"]), "splitter": "all", "global_batch_size": None}
        # Older versions let these pass where they have no effect.
        if known["max_tokens_per_gpu"] is None:
            known["on_oversized"] = "alone"
        if known["max_tokens_per_gpu"] is None or known["balance"] == "none":
            known["rank_slack"] = 0.0
        return cls(total_lengths=total_lengths, **known, **data)


SETTING_NAMES: Final = tuple(
    field.name for field in fields(ScheduleRequest) if field.name not in DATA_NAMES
)
"""Every field of a request but its data, in the order of a document's settings."""


def _extra_micro_batches(value: object, name: str) -> object:
    """Return `"auto"` or 0."""
    if isinstance(value, str) and value == "auto":
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value == 0:
        return 0
    raise ScheduleError(
        f'{name} must be "auto" (at most one per rank and step) or 0 (none), got {value!r:.80}'
    )
