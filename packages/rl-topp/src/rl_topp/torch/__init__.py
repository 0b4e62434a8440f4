"""The training side on tensors: scores of sampled ids over their kept sets.

Only this folder, `lm_head` and `sglang` import torch.
"""

from rl_topp.torch.from_logits import nucleus_log_probs
from rl_topp.torch.mask import build_keep_mask
from rl_topp.torch.scores import NucleusScores

__all__ = ["NucleusScores", "build_keep_mask", "nucleus_log_probs"]
