"""What the SGLang plugin can do with the installed SGLang: the report of `rl-topp sglang-check`.

Invariant: it has problems exactly when the plugin would refuse to load.
"""

from __future__ import annotations

import importlib.metadata

from rl_topp.sglang.keys import OPT_IN_KEY
from rl_topp.sglang.plugin import HOOKED, TESTED_VERSIONS, installed_version, signature_problems

__all__ = ["main"]

_GROUP = "sglang.srt.plugins"
_ENTRY_POINT = "rl_topp.sglang.plugin:register"

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


def main() -> int:
    """Print the report; returns the exit code, 0 when the plugin loads and 1 when it does not.

    Takes as long as importing SGLang, 10 to 40 seconds.
    """
    problems = signature_problems()
    registered = {point.value for point in importlib.metadata.entry_points(group=_GROUP)}
    if _ENTRY_POINT not in registered:
        problems.append(
            f"no entry point {_ENTRY_POINT} in the group {_GROUP}: install rl-topp as a"
            " distribution, not by PYTHONPATH"
        )
    tested = ", ".join(TESTED_VERSIONS)
    lines = [
        f"sglang {installed_version() or 'is not installed'} (tested: {tested})",
        *(f"problem: {problem}" for problem in problems),
        *([] if problems else [f"all {len(HOOKED)} hooked functions are as tested"]),
        f'ask per request: sampling_params.custom_params = {{"{OPT_IN_KEY}": true}}',
        *(f"works with: {feature}" for feature in _SUPPORTED),
        *(f"answered 400 with: {feature}" for feature in _REFUSED),
    ]
    print("\n".join(lines))  # noqa: T201  the module's purpose
    return 1 if problems else 0
