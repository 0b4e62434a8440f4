"""Scores over kept sets straight from hidden states: the output layer without logits.

See `head` for the computation, `cost` for the choice between its two ways, `weight_gradient` for
`main_grad`.
"""

from rl_topp.lm_head.head import HiddenGradient, Method, nucleus_lm_head_log_probs

__all__ = ["HiddenGradient", "Method", "nucleus_lm_head_log_probs"]
