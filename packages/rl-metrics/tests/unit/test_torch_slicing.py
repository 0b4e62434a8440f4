"""Slicing on worked numbers, and what it refuses."""

import pytest
import torch

from rl_metrics import ContextParallel, MetricsError
from rl_metrics.torch import slice_response, slice_tokens


def test_a_single_tensor_is_a_stream_of_one_sequence() -> None:
    assert slice_tokens(torch.arange(6), ContextParallel(2, 0)).tolist() == [0, 1, 0, 0]
    assert slice_tokens(torch.arange(6), ContextParallel(2, 1)).tolist() == [2, 3, 4, 5]


def test_padding_holds_the_given_value() -> None:
    assert slice_tokens(
        [torch.arange(3)], ContextParallel(), pad_value=-7, pad_multiple=4
    ).tolist() == [0, 1, 2, -7]


def test_the_response_of_13_tokens_is_on_rank_1() -> None:
    response = torch.arange(5.0)
    assert slice_response(response, 13, 5, ContextParallel(2, 1)).tolist() == [0, 1, 2, 3, 4]
    assert slice_response(response, 13, 5, ContextParallel(2, 0)).shape == (0,)


def test_a_slice_keeps_trailing_dims_and_the_graph() -> None:
    response = torch.ones(5, 2, requires_grad=True)
    torch.autograd.backward(slice_response(response, 13, 5, ContextParallel(2, 1)).sum())
    assert response.grad is not None
    assert response.grad.tolist() == [[1.0, 1.0]] * 5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(MetricsError, match=r"shape \(4,\), but the response has 5 tokens"):
        slice_response(torch.ones(4), 13, 5, ContextParallel())
    with pytest.raises(MetricsError, match="no sequences to slice"):
        slice_tokens([], ContextParallel())
