"""Tensors and collectives: the reductions of this package for training code.

The only part that imports torch.

Process groups are arguments; `None` is torch's default group, or this process alone where none was
initialised. Nothing imports Megatron.
"""

try:
    import torch as _torch  # noqa: F401 - says what is missing before any module fails for it
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'rl_metrics.torch needs torch: pip install "rl-metrics[torch]"', name="torch"
    ) from error

from rl_metrics.torch.collectives import all_reduce_metrics
from rl_metrics.torch.gather import gather_responses
from rl_metrics.torch.reducers import (
    get_sum_of_sample_mean,
    loss_reducer,
    megatron_num_tokens,
    padded_loss_reducer,
)
from rl_metrics.torch.reports import gather_and_reduce_log_dict, reduce_train_step_metrics
from rl_metrics.torch.slicing import slice_response, slice_tokens
from rl_metrics.torch.step_divisors import StepDivisors, step_divisors
from rl_metrics.torch.tensor_metrics import TensorMetric
from rl_metrics.torch.whitening import masked_whiten

__all__ = [
    "StepDivisors",
    "TensorMetric",
    "all_reduce_metrics",
    "gather_and_reduce_log_dict",
    "gather_responses",
    "get_sum_of_sample_mean",
    "loss_reducer",
    "masked_whiten",
    "megatron_num_tokens",
    "padded_loss_reducer",
    "reduce_train_step_metrics",
    "slice_response",
    "slice_tokens",
    "step_divisors",
]
