"""Whitening over real gloo ranks: the statistics of everything, whoever holds what."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import pytest
import torch

from rl_metrics import MetricsError, Moments
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.torch import masked_whiten, whitening

pytestmark = pytest.mark.distributed


def masked_moments(values: torch.Tensor, masks: torch.Tensor) -> Moments:
    """Count, mean and m2 of the trained entries over all ranks, as whitening takes them."""
    moments, scale, _ = whitening._moments_over_ranks(values, masks, None, {})
    return Moments(count=moments.count, mean=moments.mean * scale, m2=moments.m2 * scale**2)


def test_worked_numbers() -> None:
    assert masked_whiten(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)).tolist() == pytest.approx(
        [-1, 0, 1], abs=1e-6
    )
    assert masked_whiten(
        torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), shift_mean=False
    ).tolist() == pytest.approx([1, 2, 3], abs=1e-6)


def test_masked_entries_neither_count_nor_show() -> None:
    whitened = masked_whiten(
        torch.tensor([1.0, float("nan"), 2.0, 3.0]), torch.tensor([1, 0, 1, 1])
    )
    assert whitened.tolist() == pytest.approx([-1, 0, 0, 1], abs=1e-6)


def test_one_entry_becomes_zero() -> None:
    assert masked_whiten(torch.tensor([7.0]), torch.ones(1)).tolist() == [0.0]


def test_a_list_gives_a_list_of_the_same_shapes() -> None:
    values = [torch.tensor([[1.0], [2.0]]), torch.empty(0), torch.tensor([3.0])]
    whitened = masked_whiten(values, [torch.ones_like(value) for value in values])
    assert [piece.shape for piece in whitened] == [piece.shape for piece in values]
    assert torch.cat([piece.reshape(-1) for piece in whitened]).tolist() == pytest.approx(
        [-1, 0, 1], abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_split_gives_the_moments_of_everything(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(30, 0.01, 5000)
    mask = rng.random(5000) < 0.6
    given = torch.from_numpy(values).to(dtype)
    exact = given.double().numpy()[mask]

    def work(rank: int, size: int) -> tuple[float, float, float | None, torch.Tensor]:
        # Rank 0 holds nothing; the others hold unequal parts.
        cuts = [0, 0, 1000, 1300, 5000][: size + 1]
        cuts[-1] = 5000
        mine = slice(cuts[rank], cuts[rank + 1])
        moments = masked_moments(given[mine], torch.from_numpy(mask)[mine])
        return (
            moments.count,
            moments.mean,
            moments.variance(ddof=1),
            masked_whiten(given[mine], torch.from_numpy(mask)[mine]),
        )

    for size in (2, 3, 4):
        results = run_gloo_ranks(work, size)
        assert len({result[:3] for result in results}) == 1, "all ranks compute the same bits"
        count, mean, variance, _ = results[0]
        assert count == exact.size
        assert mean == pytest.approx(exact.mean(), rel=1e-14)
        assert variance == pytest.approx(exact.var(ddof=1), rel=1e-10)
        whitened = torch.cat([result[3] for result in results]).double().numpy()
        expected = np.where(
            mask, (given.double().numpy() - exact.mean()) / np.sqrt(exact.var(ddof=1) + 1e-8), 0.0
        )
        np.testing.assert_allclose(whitened, expected, atol=1e-6)


def test_one_collective_a_call(
    counting_collectives: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    def work(rank: int, _: int) -> list[str]:
        with counting_collectives() as names:
            masked_whiten([torch.ones(2) * rank] * 50, [torch.ones(2)] * 50)
        return names

    assert run_gloo_ranks(work, 2) == [["all_gather"]] * 2


def test_nothing_to_whiten_raises_on_every_rank() -> None:
    def work(rank: int, _: int) -> bool:
        with pytest.raises(
            MetricsError,
            match=f"rank {rank}: nothing to whiten, all 2 ranks have only masked entries",
        ):
            masked_whiten(torch.ones(3), torch.zeros(3))
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def test_shapes_must_agree() -> None:
    with pytest.raises(
        MetricsError, match=r"sample 0: values have shape \(3,\) but the mask \(2,\)"
    ):
        masked_whiten(torch.ones(3), torch.ones(2))
    with pytest.raises(MetricsError, match="1 value tensors but 2 masks"):
        masked_whiten([torch.ones(3)], [torch.ones(3)] * 2)


def _messages(work: Callable[[int], object], size: int) -> list[str]:
    """What each rank raises."""

    def caught(rank: int, _: int) -> str:
        with pytest.raises(MetricsError) as error:
            work(rank)
        return str(error.value)

    return run_gloo_ranks(caught, size, deadline_seconds=30)


def test_a_wrong_mask_on_one_rank_raises_on_all() -> None:
    def work(rank: int) -> object:
        return masked_whiten(
            [torch.ones(2), torch.ones(2)],
            [torch.ones(2), torch.tensor([1.0, 2.0 if rank == 1 else 0.0])],
        )

    first, second, third = _messages(work, 3)
    assert first == third
    assert first.startswith("rank 1 of 3 could not take part")
    assert second.startswith("sample 1: the mask holds 2.0 at index 1")


def test_a_rank_whose_shapes_differ_does_not_leave_the_others_waiting() -> None:
    first, second = _messages(lambda rank: masked_whiten(torch.ones(3), torch.ones(3 - rank)), 2)
    assert first.startswith("rank 1 of 2 could not take part")
    assert second.startswith("sample 0: values have shape (3,) but the mask (2,)")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"epsilon": (1e-8, 1e-6)}, "epsilon by rank is [1e-08, 1e-06]"),
        ({"shift_mean": (True, False)}, "shift_mean by rank is [1.0, 0.0]"),
    ],
)
def test_ranks_that_whiten_differently_raise_the_same_error(
    settings: dict[str, tuple[Any, Any]], told: str
) -> None:
    def work(rank: int) -> object:
        mine: dict[str, Any] = {name: values[rank] for name, values in settings.items()}
        return masked_whiten(torch.tensor([1.0, 2.0]), torch.ones(2), **mine)

    first, second = _messages(work, 2)
    assert first == second
    assert told in first


def test_a_group_of_one_exchanges_like_a_larger_one(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, masks = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0])
    alone = masked_whiten(values, masks)
    monkeypatch.setattr(whitening, "is_alone", lambda group: False)
    assert torch.equal(masked_whiten(values, masks), alone)


def test_a_generator_that_fails_on_one_rank_does_not_leave_the_others_waiting() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        raise ArithmeticError("lost")

    def work(rank: int, _: int) -> str:
        values: Any = broken() if rank else [torch.ones(2), torch.ones(1)]
        with pytest.raises((ArithmeticError, MetricsError)) as error:
            masked_whiten(values, [torch.ones(2), torch.ones(1)])
        return str(error.value)

    first, second = run_gloo_ranks(work, 2, deadline_seconds=30)
    assert first.startswith("rank 1 of 2 could not take part")
    assert second == "lost"


def test_iterators_are_gone_through_once() -> None:
    def values() -> Any:
        return iter([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])

    assert torch.cat(
        masked_whiten(values(), cast("Any", iter([torch.ones(2), torch.ones(1)])))
    ).tolist() == [-1.0, 0.0, 1.0]
    with pytest.raises(MetricsError, match=r"sample 1: the mask holds 2\.0 at index 0"):
        masked_whiten(values(), cast("Any", iter([torch.ones(2), 2 * torch.ones(1)])))


@pytest.mark.parametrize("unit", [1e-320, 1e-200, 1.0, 1e200, 5e307])
def test_no_square_leaves_float64(unit: float) -> None:
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * unit
    assert masked_whiten(values, torch.ones(3), epsilon=0.0).tolist() == pytest.approx(
        [-1.0, 0.0, 1.0], rel=1e-3 if unit < 1e-300 else 1e-12
    )


def test_ranks_of_different_magnitudes_are_brought_to_one_scale() -> None:
    parts = [[1e-200, 3e-200], [2e200, -5e199], [0.0], []]

    def work(rank: int, _: int) -> list[float]:
        values = torch.tensor(parts[rank], dtype=torch.float64)
        return masked_whiten(values, torch.ones_like(values), epsilon=0.0).tolist()

    everything = np.array([value for part in parts for value in part]) / 1e200
    expected = (everything - everything.mean()) / everything.std(ddof=1)
    assert [value for part in run_gloo_ranks(work, 4) for value in part] == pytest.approx(
        expected.tolist(), rel=1e-12
    )


def test_scales_of_ranks_a_few_powers_of_two_apart_keep_every_deviation() -> None:
    # Scales 2, 16 and 1/4: the deviations of each rank weigh in the variance of all.
    parts = [[1.0, 3.0], [17.0, 24.0, 19.0], [0.25, -0.375]]

    def work(rank: int, _: int) -> tuple[Moments, list[float]]:
        values = torch.tensor(parts[rank], dtype=torch.float64)
        ones = torch.ones_like(values)
        return masked_moments(values, ones), masked_whiten(values, ones, epsilon=0.0).tolist()

    everything = np.array([value for part in parts for value in part])
    expected = (everything - everything.mean()) / everything.std(ddof=1)
    results = run_gloo_ranks(work, 3)
    assert {moments.count for moments, _ in results} == {7}
    for moments, _ in results:
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-14)
        assert moments.m2 == pytest.approx(everything.var() * 7, rel=1e-14)
    assert [value for _, part in results for value in part] == pytest.approx(
        expected.tolist(), rel=1e-13
    )


def test_the_moments_of_ranks_with_zeros_and_tiny_values_are_theirs() -> None:
    values = torch.tensor([0.0, 3e-3, -1e-3, 5.0])
    moments = masked_moments(values, torch.ones(4))
    assert moments.mean == pytest.approx(values.double().mean().item(), rel=1e-14)
    assert moments.m2 == pytest.approx(values.double().var(correction=0).item() * 4, rel=1e-14)


def test_the_result_is_a_constant_for_autograd() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    assert not masked_whiten(values, torch.ones(3)).requires_grad
    assert not masked_whiten([values], [torch.ones(3)])[0].requires_grad


def test_complex_masks_are_refused() -> None:
    with pytest.raises(MetricsError, match=r"sample 0: the mask has dtype torch\.complex64"):
        masked_whiten(torch.ones(2), torch.ones(2, dtype=torch.complex64))
