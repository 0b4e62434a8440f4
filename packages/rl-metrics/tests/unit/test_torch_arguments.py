"""Wrong arguments of the tensor code: errors of this package that name them."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from rl_metrics import ContextParallel, MetricsError, MicroBatchMetrics, loss_denominators
from rl_metrics.aggregation import loss_reduction as reference
from rl_metrics.torch import (
    TensorMetric,
    gather_responses,
    get_sum_of_sample_mean,
    loss_reducer,
    masked_whiten,
    megatron_num_tokens,
    padded_loss_reducer,
    reduce_train_step_metrics,
    slice_response,
    slice_tokens,
)

NAN, INF = float("nan"), float("inf")


def _batch(sums: Any, num_tokens: Any = 1) -> MicroBatchMetrics:
    return MicroBatchMetrics(sums=sums, num_tokens=num_tokens)


def _step(*batches: Any, cp_size: Any = 1) -> dict[str, float | None]:
    return reduce_train_step_metrics(
        list(batches), aggregation="sample_mean", step_units=2, cp_size=cp_size, group=None
    )


ONE = ContextParallel()
NO_TENSOR: Any = [1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: loss_reducer("token_mean", [2], [1], [[1]])(NO_TENSOR),
            r"got values of type list; give a floating-point tensor \[1\]",
        ),
        (
            lambda: loss_reducer("token_mean", [2], [1], [[1]], cp=cast("Any", 2)),
            r"cp is 2 \(int\); give this rank's place",
        ),
        (
            lambda: loss_reducer("token_mean", [2], [1], [[1]], stream_offsets=[0]),
            "belong to layout 'contiguous'",
        ),
        (lambda: slice_response(NO_TENSOR, 2, 1, ONE), "the response is list; give a tensor"),
        (lambda: slice_tokens([NO_TENSOR], ONE), r"sequence 0: got list; give a tensor \[L\]"),
        (
            lambda: slice_tokens(torch.tensor(1.0), ONE),
            r"sequence 0: got a tensor \(\) of torch.float32 on cpu",
        ),
        (
            lambda: slice_tokens([torch.ones(2), torch.ones(2, 2)], ONE),
            "sequence 1 is a tensor .* give one dtype, device and width",
        ),
        (
            lambda: slice_tokens([torch.ones(2), torch.ones(2).int()], ONE),
            "sequence 1 is a tensor .* give one dtype, device and width",
        ),
        (
            lambda: gather_responses([NO_TENSOR], [2], [1], ONE, group=None),
            "sample 0: the piece is list",
        ),
        (
            lambda: gather_responses([torch.ones(1)], [2], [1], cast("Any", 1), group=None),
            "cp is 1",
        ),
        (
            lambda: gather_responses(
                [torch.ones(1), torch.ones(1).int()], [2, 2], [1, 1], ONE, group=None
            ),
            (
                r"sample 1: the piece is torch.int32 on cpu with \(\) numbers a token, that of"
                r" sample 0 torch.float32"
            ),
        ),
        (
            lambda: masked_whiten(NO_TENSOR, NO_TENSOR),
            "sample 0: values are float and the mask float; give tensors",
        ),
        (
            lambda: masked_whiten(cast("Any", 3), torch.ones(1)),
            "values, a tensor or one per sample: got int; give a list",
        ),
        (
            lambda: masked_whiten(torch.ones(1), cast("Any", None)),
            "masks, a tensor or one per sample: got NoneType; give a list",
        ),
        (
            lambda: megatron_num_tokens("rollout_mean", cast("Any", None)),
            "loss_masks, one per sample: got NoneType",
        ),
        (
            lambda: megatron_num_tokens("token_mean", cast("Any", 3)),
            "loss_masks, one per sample: got int",
        ),
        (lambda: gather_responses([], [2], [1], ONE, group=None), "0 pieces for 1 samples"),
        (
            lambda: gather_responses([torch.ones(2)], [2], [1], ONE, group=None),
            r"the piece has shape \(2,\), but rank 0 of 1 owns 1",
        ),
        (
            lambda: masked_whiten([torch.ones(1), torch.ones(1).double()], [torch.ones(1)] * 2),
            "sample 1: values are torch.float64 on cpu",
        ),
        (
            lambda: masked_whiten(torch.ones(2), torch.ones(2), epsilon=-1.0),
            "epsilon is -1; give a finite number of at least 0",
        ),
        (lambda: masked_whiten(torch.ones(2), torch.ones(2), epsilon=NAN), "epsilon is nan"),
        (
            lambda: masked_whiten(torch.ones(2), torch.ones(2), shift_mean=cast("Any", 2)),
            "shift_mean is int; give True or False",
        ),
        (
            lambda: get_sum_of_sample_mean([2], [1], [[1]], None, cast("Any", ONE)),
            "calculate_per_token_loss is ContextParallel",
        ),
        (
            lambda: reference.get_sum_of_sample_mean([2], [1], [[1]], None, cast("Any", 1)),
            "calculate_per_token_loss is int",
        ),
        (
            lambda: masked_whiten(torch.ones(2), torch.ones(2), epsilon=0.0),
            "all 2 trained entries are equal and epsilon is 0",
        ),
        (
            lambda: slice_tokens(cast("Any", 3), ONE),
            "tokens, one tensor per sequence: got int; give a list",
        ),
        (
            lambda: slice_tokens(torch.arange(3), ONE, pad_value=0.5),
            r"pad_value is 0.5, which torch.int64 cannot hold",
        ),
        (lambda: slice_tokens(torch.arange(3), ONE, pad_value=NAN), "pad_value is nan"),
        (
            lambda: slice_tokens(torch.arange(3).bool(), ONE, pad_value=2),
            r"pad_value is 2, which torch.bool cannot hold; give an integer in 0..1",
        ),
        (
            lambda: slice_tokens(torch.arange(3), ONE, pad_value=cast("Any", "0")),
            "pad_value is str '0'",
        ),
        (
            lambda: slice_response(torch.ones(1), 2, cast("Any", 1.0), ONE),
            r"response_length is 1.0 \(float\)",
        ),
        (
            lambda: gather_responses(cast("Any", 3), [2], [1], ONE, group=None),
            "pieces, one per sample: got int",
        ),
        (
            lambda: reduce_train_step_metrics(
                cast("Any", 3), aggregation="token_mean", cp_size=1, group=None
            ),
            "micro_batch_metrics: got int",
        ),
        (
            lambda: loss_reducer(cast("Any", np.ones(2)), [2], [1], [[1]]),
            "unknown loss aggregation array",
        ),
        (lambda: _step(3), "micro-batch 0: got int; give MicroBatchMetrics"),
        (lambda: _step(_batch([1.0])), "MicroBatchMetrics: sums is list; give a mapping"),
        (
            lambda: _step(_batch({"a": 1.0}), _batch({"a": torch.ones(2)})),
            r"micro-batch 1: 'a' is Tensor of shape \(2,\); give one number",
        ),
        (lambda: _step(_batch({"a": torch.tensor(1j)})), "micro-batch 0: 'a' is Tensor"),
        (lambda: _step(_batch({"a": "1"})), "micro-batch 0: 'a' is str '1'"),
        (
            lambda: _step(_batch({"a": 1.0}, torch.ones(1))),
            r"micro-batch 0: num_tokens is Tensor of shape \(1,\)",
        ),
        (lambda: _step(_batch({"a": 1.0}, torch.tensor(-1))), "micro-batch 0: num_tokens is -1"),
        (lambda: _step(_batch({"a": 1.0}), cp_size=2), "cp_size is 2, but the group has 1 ranks"),
    ],
)
def test_every_wrong_argument_is_an_error_of_this_package_that_names_it(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(MetricsError, match=message):
        call()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 1e6),
        (torch.bfloat16, -1e39),
        (torch.float32, 1e300),
        (torch.complex64, 1e300),
        (torch.int8, 128),
    ],
)
def test_padding_beyond_the_dtype_is_refused(dtype: torch.dtype, value: float) -> None:
    with pytest.raises(MetricsError, match=f"pad_value is .*, which {dtype} cannot hold"):
        slice_tokens(torch.zeros(3, dtype=dtype), ONE, pad_value=value)


def test_padding_at_the_edge_of_the_dtype_is_exact() -> None:
    edges = [
        (torch.int64, 2**63 - 1),
        (torch.int64, -(2**63)),
        (torch.uint8, 255),
        (torch.float16, 65504.0),
        (torch.float32, math.inf),
    ]
    for dtype, value in edges:
        assert (
            slice_tokens(torch.zeros(3, dtype=dtype), ContextParallel(2, 0), pad_value=value)[
                -1
            ].item()
            == value
        )
    assert slice_tokens(torch.zeros(3), ContextParallel(2, 0), pad_value=NAN)[-1].isnan()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sums": {"loss": 1.0}}, r"sums\['loss'\] is float; give a tensor"),
        ({"sums": {"loss": None}}, r"sums\['loss'\] is NoneType"),
        ({"sums": None}, "sums is NoneType; give a mapping"),
        ({"sums": torch.tensor(1.0)}, "sums is Tensor; give a mapping"),
        ({"sums": {}, "diagnostics": {"entropy": [1.0]}}, r"diagnostics\['entropy'\] is list"),
        ({"sums": {}, "diagnostics": torch.ones(2)}, "diagnostics is Tensor; give a mapping"),
    ],
)
def test_what_a_micro_batch_reports_is_tensors_by_name(given: Any, words: str) -> None:
    reduce = loss_reducer("sample_mean", [2], [1], [[1]])
    with pytest.raises(MetricsError, match=words):
        reduce.metrics(**given)


def test_a_padded_micro_batch_of_no_samples_is_an_empty_list() -> None:
    assert loss_denominators("sample_mean", []).shape == (0,)
    reduce = padded_loss_reducer("sample_mean", [])
    assert (reduce.num_values, reduce.num_tokens, reduce.weight) == (0, 0, 0.0)
    assert float(reduce(torch.zeros(0, 0))) == 0.0
    with pytest.raises(MetricsError, match=r"give \[samples, tokens\]"):
        padded_loss_reducer("sample_mean", torch.zeros(0))


@pytest.mark.parametrize("identity", [{"name": 3}, {"name": ""}, {"name": "loss", "unit": None}])
def test_a_metric_on_a_device_has_a_name_and_a_unit_of_text(identity: Any) -> None:
    with pytest.raises(MetricsError, match="metric"):
        TensorMetric(kind="sum", numerator=torch.tensor(1.0), **identity)
