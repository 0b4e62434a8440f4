"""Train on exactly the top-p set that the sampler used."""

from rl_topp.errors import NucleusError, UnsupportedContractError
from rl_topp.nucleus import NucleusSet, NucleusStatus
from rl_topp.rows import align_rows
from rl_topp.wire import from_sglang_meta, kept_log_probs_from_sglang_meta, to_wire

__all__ = [
    "NucleusError",
    "NucleusSet",
    "NucleusStatus",
    "UnsupportedContractError",
    "align_rows",
    "from_sglang_meta",
    "kept_log_probs_from_sglang_meta",
    "to_wire",
]
