"""What the SGLang plugin can do with the installed SGLang.

Invariant: the report says what `register` would do: it has problems exactly when the plugin would
refuse to load.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from rl_topp.sglang_plugin import (
    HOOKED,
    OPT_IN_KEY,
    TESTED_VERSIONS,
    installed_version,
    signature_problems,
)

__all__ = ["PluginReport", "check", "main"]

_GROUP = "sglang.srt.plugins"
_ENTRY_POINT = "rl_topp.sglang_plugin:register"

_SUPPORTED = (
    "top-p, top-k, min-p and greedy rows, mixed in one batch with rows that do not ask",
    "penalties, logit bias and temperature (sets and log-probs are at the request's temperature)",
    "the overlap scheduler on and off, streaming, abort and resume, retraction",
    "tensor parallelism; the pytorch and flashinfer sampling backends",
)
_REFUSED = (
    "speculative decoding",
    "prefill-decode disaggregation",
    "pipeline parallelism",
    "rl_on_policy_target",
    "the ascend sampling backend and custom ones",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport:
    """What the plugin found.

    Example: `PluginReport(sglang_version="0.5.15.post1", problems=(), ...)`.
    """

    sglang_version: str | None
    """Installed version, or None."""
    tested_versions: tuple[str, ...]
    """Versions that the plugin loads with."""
    hooked: tuple[str, ...]
    """Functions that it wraps, as dotted paths."""
    problems: tuple[str, ...]
    """What keeps it from loading, one sentence each; empty when it loads."""
    supported: tuple[str, ...]
    """Features with which kept sets are recorded."""
    refused: tuple[str, ...]
    """Features with which a request for kept sets is answered 400."""

    @property
    def ok(self) -> bool:
        """Whether a server on this machine records kept sets."""
        return not self.problems


def check() -> PluginReport:
    """Compare the installed SGLang with what the plugin was tested with; takes as long as importing SGLang, 10 to 40 seconds."""
    problems = signature_problems()
    if not any(
        point.value == _ENTRY_POINT for point in importlib.metadata.entry_points(group=_GROUP)
    ):
        problems.append(
            f"no entry point {_ENTRY_POINT} in the group {_GROUP}: install rl-topp as a"
            " distribution, not by PYTHONPATH"
        )
    return PluginReport(
        sglang_version=installed_version(),
        tested_versions=TESTED_VERSIONS,
        hooked=tuple(HOOKED),
        problems=tuple(problems),
        supported=_SUPPORTED,
        refused=_REFUSED,
    )


def main() -> int:
    """Print the report; returns the exit code, 0 when the plugin loads and 1 when it does not."""
    report = check()
    lines = [
        f"sglang {report.sglang_version or 'is not installed'} (tested:"
        f" {', '.join(report.tested_versions)})"
    ]
    lines += [f"problem: {problem}" for problem in report.problems] or [
        f"all {len(report.hooked)} hooked functions are as tested"
    ]
    lines += [f'ask per request: sampling_params.custom_params = {{"{OPT_IN_KEY}": true}}']
    lines += [f"works with: {feature}" for feature in report.supported]
    lines += [f"answered 400 with: {feature}" for feature in report.refused]
    print("\n".join(lines))  # noqa: T201  the module's purpose
    return 0 if report.ok else 1
