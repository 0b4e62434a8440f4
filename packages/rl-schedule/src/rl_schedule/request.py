"""What is asked for: which settings exist, their defaults and their legal values.

`ScheduleRequest` is the one list of them: `build_dp_schedule` takes its fields as keywords, and the
settings of a document are its fields in JSON.

Invariant: a request that exists is well-formed, so the algorithms below check nothing again; what
can still fail is data that a policy `"error"` refuses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rl_schedule.arrays import IntArray, Integers, integer_column, positive_column, positive_int
from rl_schedule.cost import (
    CostModel,
    QuadraticCost,
    TokenCost,
    describe_cost,
    evaluate_cost,
    name_of,
    read_cost,
)
from rl_schedule.errors import ScheduleError
from rl_schedule.steps import StepSplitter, load_splitter

__all__ = [
    "MOST_RANKS",
    "MOST_TOKENS",
    "SETTING_NAMES",
    "Balance",
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


MOST_RANKS = 2**20
"""Ranks times pipeline group at most; far above any cluster, so a mistyped number ends at once."""
MOST_TOKENS = 2**31 - 1
"""Longest sample accepted: beyond it the square of a length no longer fits int64."""


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
    rollout_ids: Integers
    """Execution each sample came from; [n]. Samples of one id stay in one step. Kept as int64."""
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

    def __post_init__(self) -> None:
        """Freeze the columns as int64 and check every setting."""
        freeze = object.__setattr__
        freeze(self, "total_lengths", positive_column(self.total_lengths, "total_lengths"))
        freeze(self, "rollout_ids", integer_column(self.rollout_ids, "rollout_ids"))
        longest = int(np.max(self.total_lengths, initial=0))
        if longest > MOST_TOKENS:
            raise ScheduleError(
                f"sample {int(np.argmax(self.total_lengths))} has {longest} tokens, more than"
                f" {MOST_TOKENS}; is the unit right?"
            )
        if len(self.rollout_ids) != len(self.total_lengths):
            raise ScheduleError(
                f"total_lengths has {len(self.total_lengths)} samples but rollout_ids has"
                f" {len(self.rollout_ids)}; pass one rollout id per sample"
            )
        limits = ("max_tokens_per_gpu", "micro_batch_size")
        given = [name for name in limits if getattr(self, name) is not None]
        if len(given) != 1:
            raise ScheduleError(
                "pass exactly one of max_tokens_per_gpu (dynamic) and micro_batch_size (static),"
                f" got {'both' if given else 'neither'}"
            )
        for name in (
            "dp_size",
            "cp_size",
            "vpp_size",
            "microbatch_group_size_per_vp_stage",
            "pad_to_multiple",
            *given,
        ):
            freeze(self, name, positive_int(getattr(self, name), name))
        if self.alignment > MOST_RANKS:
            raise ScheduleError(
                f"dp_size times the pipeline group is {self.alignment}, more than {MOST_RANKS}; is"
                " the number right?"
            )
        padded = -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        if padded > MOST_TOKENS:
            raise ScheduleError(
                f"pad_to_multiple = {self.pad_to_multiple} pads a sample to {padded} tokens, more"
                f" than {MOST_TOKENS}"
            )
        freeze(
            self, "global_batch_size", _checked_batch_size(self.global_batch_size, self.splitter)
        )
        for name, legal in (
            ("balance", Balance),
            ("on_oversized", OnOversized),
            ("on_misaligned", OnMisaligned),
            ("on_trailing", OnTrailing),
        ):
            if getattr(self, name) not in get_args(legal):
                raise ScheduleError(
                    f"{name} must be one of {', '.join(get_args(legal))}, got"
                    f" {getattr(self, name)!r}"
                )
        freeze(self, "rank_slack", _checked_slack(self.rank_slack))
        if self.cost is not None and not callable(self.cost):
            raise ScheduleError(
                f"cost must be callable on an int64 array of lengths, got {self.cost!r}"
            )

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
        """Rollout positions whose padded length exceeds the cap, ascending; none if static."""
        # Nothing is longer than the longest sample accepted.
        return np.flatnonzero(self.padded_lengths > (self.token_cap or MOST_TOKENS))

    @property
    def cost_model(self) -> CostModel:
        """The model that `stats` measure: `cost`, or the default."""
        return QuadraticCost() if self.cost is None else self.cost

    @property
    def balance_model(self) -> CostModel:
        """The model that is levelled: tokens under `balance="tokens"`, else `cost_model`."""
        return TokenCost() if self.balance == "tokens" else self.cost_model

    def costs_of(self, members: IntArray) -> npt.NDArray[Any]:
        """Return what each of `members` costs, [n] finite numbers >= 0.

        Args:
            members: int64 [n], rollout positions.

        Raises:
            ScheduleError: the cost model returns something that is no cost.
        """
        return evaluate_cost(self.cost_model, self.padded_lengths[members])

    def settings(self) -> dict[str, Any]:
        """Return every setting, without the two columns, as JSON values."""
        values = {name: getattr(self, name) for name in SETTING_NAMES}
        values["cost"] = describe_cost(self.cost_model)
        if isinstance(self.global_batch_size, tuple):
            values["global_batch_size"] = list(self.global_batch_size)
        if not isinstance(self.splitter, str):
            values["splitter"] = name_of(self.splitter)
        return values

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], *, total_lengths: Integers, rollout_ids: Integers
    ) -> "ScheduleRequest":
        """Rebuild the request behind a plan, for `check_plan`.

        The splitter is not rebuilt (the plan states its steps, and a document must not name code to
        import), and neither is a cost model from elsewhere: the default stands in for it.
        """
        # Keys of a newer minor are left out.
        known = {name: settings[name] for name in SETTING_NAMES}
        known |= {"cost": read_cost(settings["cost"]), "splitter": "all", "global_batch_size": None}
        return cls(total_lengths=total_lengths, rollout_ids=rollout_ids, **known)


SETTING_NAMES: Final = tuple(
    field.name
    for field in fields(ScheduleRequest)
    if field.name not in {"total_lengths", "rollout_ids"}
)
"""Every field of a request but its data, in the order of a document's settings."""


def _checked_batch_size(
    value: int | Sequence[int] | None, splitter: str | StepSplitter
) -> int | tuple[int, ...] | None:
    """Check `global_batch_size` against the splitter that will read it."""
    if isinstance(splitter, str) and splitter not in {"fixed", "sizes", "all"}:
        load_splitter(splitter)
    if not isinstance(splitter, str) and not callable(splitter):
        raise ScheduleError(
            f"splitter must be a name, an import path or a callable, got {splitter!r}"
        )
    if splitter == "sizes":
        if value is None or isinstance(value, int) or not len(value):
            raise ScheduleError(
                'splitter="sizes" needs global_batch_size as a list of rollouts per step, with at'
                f" least one step, got {value!r}"
            )
        return tuple(positive_column(value, "global_batch_size").tolist())
    if value is None and splitter != "fixed":
        return None
    if value is not None and not isinstance(value, (int, str)) and hasattr(value, "__len__"):
        raise ScheduleError(
            f'global_batch_size is a list only under splitter="sizes", got {value!r} with'
            f" splitter={splitter!r}"
        )
    return positive_int(value, "global_batch_size")


def _checked_slack(value: object) -> RankSlack:
    """Return `rank_slack` as a float in [0, 1] or `"auto"`."""
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ScheduleError(
            f'rank_slack must be a fraction from 0 to 1 (0.0025 = 0.25 %) or "auto", got {value!r}'
        )
    return float(value)
