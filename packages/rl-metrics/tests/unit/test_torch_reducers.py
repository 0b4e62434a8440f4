"""Tensor reducers on worked numbers: masks, denominators, graphs, and how many operations."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_metrics import (
    Aggregation,
    ContextParallel,
    MetricsError,
    rollout_denominators,
)
from rl_metrics.torch import (
    get_sum_of_sample_mean,
    loss_reducer,
    masked_whiten,
    megatron_num_tokens,
)

NAN, INF = float("nan"), float("inf")
_NO_KERNEL = {
    "detach",
    "alias",
    "view",
    "_unsafe_view",
    "lift_fresh",
    "scalar_tensor",
    "empty",
    "expand",
}


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of operations that launch a kernel on a device.

    All but those that only make a view, allocate, or hold a Python number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _masks(*rows: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.int32) for row in rows]


def test_sample_means_are_summed() -> None:
    reduce = get_sum_of_sample_mean([4, 3], [2, 1], _masks([1, 1], [1]))
    assert reduce(torch.tensor([1.0, 3.0, 5.0])).item() == 7.0


def test_given_denominators_replace_the_own_mask_sums() -> None:
    # Rollout 0: (3 + 5) / 4 = 2, rollout 1: 4.
    masks = _masks([1, 1, 1], [1], [1, 1])
    denominators = rollout_denominators(masks, [0, 0, 1])
    reduce = get_sum_of_sample_mean([5, 3, 4], [3, 1, 2], masks, denominators)
    assert reduce(torch.tensor([1.0, 1.0, 1.0, 5.0, 4.0, 4.0])).item() == 6.0


def test_per_token_loss_sums() -> None:
    reduce = get_sum_of_sample_mean([4, 3], [2, 1], _masks([1, 0], [1]), None, True)
    assert reduce(torch.tensor([1.0, 3.0, 5.0])).item() == 6.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_masked_value_reaches_neither_result_nor_gradient(bad: float) -> None:
    x = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    loss = get_sum_of_sample_mean([4, 2], [2, 1], _masks([1, 0], [1]))(x)
    torch.autograd.backward(loss)
    assert loss.item() == 4.0
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


def test_an_unmasked_nan_is_not_hidden() -> None:
    assert get_sum_of_sample_mean([3], [2], _masks([1, 1]))(torch.tensor([1.0, NAN])).isnan()


def test_an_all_masked_micro_batch_gives_zero_loss_and_zero_gradient() -> None:
    x = torch.tensor([1.0, NAN], requires_grad=True)
    loss = get_sum_of_sample_mean([3], [2], _masks([0, 0]))(x)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0]


def test_an_empty_slice_stays_in_the_graph() -> None:
    # 13 tokens, 5 of them response: rank 0 of 2 owns none of it.
    logits = torch.ones(8, 3, requires_grad=True)
    loss = get_sum_of_sample_mean([13], [5], _masks([1] * 5), cp=ContextParallel(2, 0))(
        logits[torch.empty(0, dtype=torch.int64), 0]
    )
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.abs().sum() == 0


def test_a_filler_gives_zero_with_a_graph() -> None:
    x = torch.empty(0, requires_grad=True)
    aggregations: list[Aggregation] = ["token_mean", "sample_mean", "constant"]
    for aggregation in aggregations:
        loss = loss_reducer(aggregation, [], [], [])(x)
        assert loss.item() == 0.0
        assert loss.requires_grad


def test_the_result_has_the_dtype_of_the_values() -> None:
    for dtype in (torch.float32, torch.float64):
        assert (
            get_sum_of_sample_mean([3], [2], _masks([1, 1]))(torch.ones(2, dtype=dtype)).dtype
            == dtype
        )


def test_a_zero_denominator_counts_as_one() -> None:
    assert (
        get_sum_of_sample_mean([3], [2], _masks([1, 1]), [0.0])(torch.tensor([1.0, 2.0])).item()
        == 3.0
    )


def test_sums_are_accumulated_in_float64() -> None:
    # 2^24 + 1 + 1 + ... loses every 1 in float32.
    x = torch.ones(1001)
    x[0] = 2.0**24
    assert (
        get_sum_of_sample_mean([1002], [1001], _masks([1] * 1001), None, True)(x).item()
        == 2.0**24 + 1000
    )


def test_num_tokens_counts_full_masks_without_fake_tokens() -> None:
    count = megatron_num_tokens("token_mean", _masks([1, 0, 1], [0, 0]))
    assert (count.item(), count.dtype) == (2, torch.int32)
    assert megatron_num_tokens("rollout_mean", _masks([1, 0, 1])).item() == 1
    assert megatron_num_tokens("token_mean", []).item() == 0


def test_a_wider_padding_moves_ownership() -> None:
    # Padded to 16 instead of 8: chunks of 4, so rank 0 owns positions [0, 4) and [12, 16) and logit
    # 3 of the logits 3..5.
    reduce = get_sum_of_sample_mean(
        [7], [3], _masks([1, 1, 1]), cp=ContextParallel(2, 0), pad_multiple=16
    )
    assert reduce.num_values == 1
    assert reduce(torch.tensor([6.0])).item() == 2.0


@pytest.mark.parametrize("cp", [None, ContextParallel(4, 1)])
@pytest.mark.parametrize("denominators", [None, "given"])
def test_the_number_of_operations_does_not_depend_on_the_number_of_samples(
    cp: ContextParallel | None, denominators: str | None
) -> None:
    counts = {}
    for n in (8, 512, 4096):
        totals, responses = [40] * n, [30] * n
        masks = torch.ones(30 * n, dtype=torch.int32)
        needs = None if denominators is None else torch.full((n,), 30.0)
        with LaunchCounter() as making:
            reduce = get_sum_of_sample_mean(totals, responses, masks, needs, cp=cp)
        x = torch.ones(reduce.num_values, requires_grad=True)
        with LaunchCounter() as calling:
            loss = reduce(x)
        with LaunchCounter() as backward:
            torch.autograd.backward(loss)
        counts[n] = (tuple(making.names), tuple(calling.names), tuple(backward.names))
    assert counts[8] == counts[512] == counts[4096]
    making, calling, backward = counts[8]
    assert len(calling) == 4, calling
    assert making == (), "made on the host"
    assert len(backward) <= 10, backward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4], [2], [[1]]), "sample 0: loss mask has 1 entries, the response 2 tokens"),
        (([4], [2], [[1, 1], [1]]), "2 loss masks for 1 samples"),
        (
            ([4], [2], torch.ones(3)),
            r"concatenated loss mask has shape \(3,\), the responses 2 tokens",
        ),
        (
            ([4], [2], torch.ones(1, 2)),
            r"concatenated loss mask has shape \(1, 2\), the responses 2 tokens",
        ),
        (
            ([4], [2], [torch.ones(1, 2)]),
            r"sample 0: loss mask has shape \(1, 2\); give one entry per response token",
        ),
        (([4], [2], [torch.ones(3)]), "sample 0: loss mask has 3 entries, the response 2 tokens"),
        (
            ([4, 4], [2, 2], [torch.ones(2), [1, 1]]),
            "sample 1: loss mask is list where sample 0 has a tensor",
        ),
        (([4], [2], 3), "loss_masks, one per sample: got int; give a list"),
        (([4], [2], None), "loss_masks, one per sample: got NoneType"),
        (([4], [2], [["a", "b"]]), "sample 0: loss mask: entries are of type <U1"),
        (([4], [2], [[1, 1]], ["a"]), "sample_denoms: entries are of type"),
        (([4], [2], [[1, 1]], 2.0), r"sample_denoms has shape \(\) for 1 samples"),
        (([4], [2], [[1, 1]], torch.tensor([NAN])), "sample 0: denominator nan"),
        (([4], [2], [[1, 1]], [1.0, 2.0]), r"sample_denoms has shape \(2,\) for 1 samples"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MetricsError, match=message):
        get_sum_of_sample_mean(*arguments)


def test_values_of_the_wrong_size_are_refused() -> None:
    reduce = get_sum_of_sample_mean([13], [5], _masks([1] * 5), cp=ContextParallel(2, 1))
    with pytest.raises(MetricsError, match=r"got values of shape \(3,\); this rank owns 5"):
        reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("aggregation", "denominators", "message"),
    [
        ("rollout_mean", None, "needs denominators computed over the whole step"),
        ("prompt_mean", None, "needs denominators computed over the whole step"),
        ("token_mean", [3.0], "divides once per step"),
        ("constant", torch.tensor([3.0]), "divides once per step"),
        ("constant", ["a"], "denominators: entries are of type"),
        ("median", None, "unknown loss aggregation"),
    ],
)
def test_denominators_must_fit_the_aggregation(
    aggregation: Aggregation, denominators: Any, message: str
) -> None:
    with pytest.raises(MetricsError, match=message):
        loss_reducer(aggregation, [3], [1], [[1]], denominators=denominators)


@pytest.mark.parametrize(
    "values", [torch.tensor([1, 2, 2]), torch.tensor([True, False, True])], ids=["int64", "bool"]
)
def test_values_that_a_mean_would_cut_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(MetricsError, match="floating-point"):
        loss_reducer("sample_mean", [5], [3], [[1, 1, 1]])(values)
    with pytest.raises(MetricsError, match="floating-point"):
        masked_whiten(values, torch.ones(3))


@pytest.mark.parametrize("denominator", [-1.0, float("nan"), float("inf")])
def test_a_denominator_that_is_no_count_is_named(denominator: float) -> None:
    with pytest.raises(MetricsError, match="sample 0: denominator"):
        loss_reducer("rollout_mean", [3], [2], [[1, 1]], denominators=[denominator])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_values_are_float32_and_do_not_overflow(dtype: torch.dtype) -> None:
    x = torch.ones(70_001, dtype=dtype, requires_grad=True)
    loss = get_sum_of_sample_mean(
        [70_002], [70_001], torch.ones(70_001, dtype=torch.bool), None, True
    )(x)
    torch.autograd.backward(loss)
    assert (loss.dtype, loss.item()) == (torch.float32, 70_001.0)
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.float().sum().item()) == (dtype, 70_001.0)


def test_a_reducer_made_or_used_in_inference_mode_trains_afterwards() -> None:
    with torch.inference_mode():
        reduce = loss_reducer("sample_mean", [6], [4], [torch.tensor([1, 1, 0, 1])])
        assert reduce(torch.tensor([3.0, 6.0, 9.0, 0.0])).item() == 3.0
    x = torch.ones(4, requires_grad=True)
    torch.autograd.backward(reduce(x))
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
