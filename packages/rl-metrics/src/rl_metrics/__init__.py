"""Exact losses and metrics for any layout: the same number whatever the micro-batch split,
data-parallel width or context-parallel layout.

This package imports numpy only. Tensors and collectives are in `rl_metrics.torch` (extra
`[torch]`).
"""

from rl_metrics.aggregation import AGGREGATIONS, Aggregation
from rl_metrics.context_parallel import (
    ContextParallel,
    Layout,
    ResponseSlice,
    chunk_ranges,
    response_owner,
    response_slice,
)
from rl_metrics.denominators import (
    count_step_units,
    loss_denominators,
    prompt_denominators,
    rollout_denominators,
)
from rl_metrics.document import parse_document, to_document
from rl_metrics.errors import (
    GeometryError,
    KeyAgreementError,
    MetricsError,
    UnsupportedContractError,
)
from rl_metrics.loss_scale import calculates_per_token_loss, megatron_loss_scale
from rl_metrics.metric import Metric
from rl_metrics.moments import Moments, merge_moments
from rl_metrics.packing import (
    PackedResponses,
    packed_response_rows,
    packed_responses,
    packed_token_index,
    padded_lengths,
)
from rl_metrics.reporting import merge_metrics, report
from rl_metrics.rollout_report import rollout_log_metric_contribution
from rl_metrics.sketch import QuantileSketch
from rl_metrics.step_report import MicroBatchMetrics

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
    "UnsupportedContractError",
    "calculates_per_token_loss",
    "chunk_ranges",
    "count_step_units",
    "loss_denominators",
    "megatron_loss_scale",
    "merge_metrics",
    "merge_moments",
    "packed_response_rows",
    "packed_responses",
    "packed_token_index",
    "padded_lengths",
    "parse_document",
    "prompt_denominators",
    "report",
    "response_owner",
    "response_slice",
    "rollout_denominators",
    "rollout_log_metric_contribution",
    "to_document",
]
