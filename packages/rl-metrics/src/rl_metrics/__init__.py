"""Exact losses and metrics: the same number whatever the micro-batch split or the layout.

A layout is the data-parallel and context-parallel width and how sequences are cut. This package
imports numpy only. Tensors and collectives are in `rl_metrics.torch` (extra `[torch]`).
"""

from rl_metrics.aggregation.aggregation import AGGREGATIONS, Aggregation
from rl_metrics.aggregation.denominators import (
    count_step_units,
    loss_denominators,
    prompt_denominators,
    rollout_denominators,
)
from rl_metrics.aggregation.loss_scale import (
    TrainerHook,
    calculates_per_token_loss,
    ddp_loss_scale,
    fsdp_loss_scale,
    hf_trainer_loss_scale,
    megatron_loss_scale,
)
from rl_metrics.errors import (
    GeometryError,
    KeyAgreementError,
    MetricsError,
)
from rl_metrics.geometry.context_parallel import ContextParallel, Layout, chunk_ranges
from rl_metrics.geometry.packing import (
    packed_response_rows,
    packed_responses,
    packed_token_index,
    padded_lengths,
)
from rl_metrics.geometry.responses import (
    PackedResponses,
    ResponseSlice,
    response_owner,
    response_slice,
)
from rl_metrics.metric.metric import Metric
from rl_metrics.metric.moments import Moments, merge_moments
from rl_metrics.metric.reporting import merge_metrics, report
from rl_metrics.metric.rollout_report import (
    rollout_log_diagnostic,
    rollout_log_metric_contribution,
)
from rl_metrics.metric.rollout_scalars import rollout_metric, rollout_shares
from rl_metrics.metric.sketch import QuantileSketch
from rl_metrics.metric.step_report import MicroBatchMetrics

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "ContextParallel",
    "GeometryError",
    "KeyAgreementError",
    "Layout",
    "Metric",
    "MetricsError",
    "MicroBatchMetrics",
    "Moments",
    "PackedResponses",
    "QuantileSketch",
    "ResponseSlice",
    "TrainerHook",
    "calculates_per_token_loss",
    "chunk_ranges",
    "count_step_units",
    "ddp_loss_scale",
    "fsdp_loss_scale",
    "hf_trainer_loss_scale",
    "loss_denominators",
    "megatron_loss_scale",
    "merge_metrics",
    "merge_moments",
    "packed_response_rows",
    "packed_responses",
    "packed_token_index",
    "padded_lengths",
    "prompt_denominators",
    "report",
    "response_owner",
    "response_slice",
    "rollout_denominators",
    "rollout_log_diagnostic",
    "rollout_log_metric_contribution",
    "rollout_metric",
    "rollout_shares",
]
