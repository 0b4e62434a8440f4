"""The keys of requests and replies by which kept sets travel: named once, for writer and reader."""

from __future__ import annotations

from typing import Final

__all__ = [
    "KEPT_IDS_KEY",
    "KEPT_LOG_PROBS_KEY",
    "KEPT_OFFSETS_KEY",
    "KEPT_STATUS_KEY",
    "OPT_IN_KEY",
]

OPT_IN_KEY: Final = "return_top_p_token_ids"
"""Key of `sampling_params.custom_params` by which a request asks for its kept sets."""
KEPT_IDS_KEY: Final = "rl_topp_kept_ids"
"""Key of `meta_info`: the kept ids.

From the plugin one list per generated token, or None for the whole vocabulary; flat ids when
`KEPT_OFFSETS_KEY` is there.
"""
KEPT_OFFSETS_KEY: Final = "rl_topp_kept_offsets"
"""Key of the flat form's offsets, [T+1]."""
KEPT_STATUS_KEY: Final = "rl_topp_kept_status"
"""Key of the status, one `NucleusStatus` value per token.

Absent in the per-token form, it is 0 where there are ids and 1 where there is None.
"""
KEPT_LOG_PROBS_KEY: Final = "rl_topp_kept_log_probs"
"""Key of the sampled ids' log-probs, one number per token, nats.

Over the kept set, or over the vocabulary where no filter applied.
"""
