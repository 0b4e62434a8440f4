"""The training side on tensors: scores of sampled ids over their kept sets.

The package's only modules that import torch are this one, `lm_head` and `triton_kernels`.
"""

from rl_topp.torch.gathered import nucleus_log_probs
from rl_topp.torch.mask import build_keep_mask
from rl_topp.torch.scores import NucleusScores

__all__ = ["NucleusScores", "build_keep_mask", "nucleus_log_probs"]
