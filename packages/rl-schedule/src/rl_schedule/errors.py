"""Every error this package raises on purpose.

Each class subclasses the builtin a caller would catch anyway, and each message says what was given,
what was expected and what to do, with the sample, step or rank it concerns.
"""

from collections.abc import Sequence

from rl_schedule.contract_header import UnsupportedContractError

__all__ = [
    "InfeasibleScheduleError",
    "PlanDocumentError",
    "ScheduleError",
    "UnsupportedContractError",
]


class ScheduleError(ValueError):
    """A request that cannot be planned: bad lengths or settings, or data that a policy refuses."""


class InfeasibleScheduleError(ScheduleError):
    """Well-formed data that a policy chosen as `"error"` refuses; another policy would plan it."""


class PlanDocumentError(ScheduleError):
    """A `schedule-plan.v1` document that is not one.

    Attributes:
        problems: every problem found, one line each; never only the first.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        """Keep all `problems` and join them into the message."""
        self.problems = tuple(problems)
        super().__init__("not a valid schedule-plan.v1 document: " + "; ".join(self.problems))
