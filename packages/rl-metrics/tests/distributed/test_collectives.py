"""Metrics over real gloo ranks: merged records, the number of collectives, shared errors."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_metrics import (
    ContextParallel,
    KeyAgreementError,
    Metric,
    MetricsError,
    MicroBatchMetrics,
    merge_metrics,
    report,
)
from rl_metrics.metric import wire
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.torch import (
    all_reduce_metrics,
    gather_and_reduce_log_dict,
    gather_responses,
    loss_reducer,
    masked_whiten,
    reduce_train_step_metrics,
    slice_response,
)

pytestmark = pytest.mark.distributed


def _messages(work: Callable[[int], object], size: int) -> list[str]:
    """What each rank raises."""

    def caught(rank: int, _: int) -> str:
        with pytest.raises(MetricsError) as error:
            work(rank)
        return str(error.value)

    return run_gloo_ranks(caught, size, deadline_seconds=30)


def _metrics(rank: int) -> list[Metric]:
    """Records of one rank: every kind, some without data here, one without data anywhere."""
    rng = np.random.default_rng(rank)
    values = rng.normal(30, 0.01, 10 + rank)
    return [
        Metric.of_sum("sum", rank + 1, unit="token"),
        Metric.of_mean("minibatch_loss", 2.0 * rank, rank + 1),
        Metric.of_min("min", -rank) if rank != 1 else Metric.empty("min", "min"),
        Metric.of_max("max", rank),
        Metric.of_max("max_of_nan", math.nan if rank == 0 else 5.0),
        Metric.of_moments("moments", values) if rank != 2 else Metric.empty("moments", "moments"),
        Metric.of_last("lr", 0.1 * rank, stamp=rank % 2),
        Metric.of_histogram("lengths", values * 10),
        Metric.empty("nothing", "mean"),
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_what_one_process_would_merge(size: int) -> None:
    expected = report(
        merge_metrics(metric for rank in range(size) for metric in _metrics(rank)).values()
    )
    results = run_gloo_ranks(
        lambda rank, _: report(all_reduce_metrics(_metrics(rank)).values()), size
    )
    assert all(repr(result) == repr(results[0]) for result in results)
    result = results[0]
    for lines in (result, expected):
        extreme = lines.pop("max_of_nan")
        assert extreme is not None
        assert math.isnan(extreme)
    assert result.pop("nothing") is None
    assert expected.pop("nothing") is None
    assert result == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}


def test_the_number_of_collectives_does_not_depend_on_the_number_of_metrics(
    counting_collectives: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    def count(rank: int, _: int) -> dict[int, tuple[list[str], list[str], list[str]]]:
        counts = {}
        for n in (1, 10, 1000):
            with counting_collectives() as means:
                all_reduce_metrics([Metric.of_mean(f"m{i}", rank, 1) for i in range(n)])
            with counting_collectives() as extrema:
                all_reduce_metrics([Metric.of_max(f"m{i}", rank) for i in range(n)])
            with counting_collectives() as logged:
                gather_and_reduce_log_dict(
                    [Metric.of_mean(f"m{i}", rank, 1) for i in range(n)], group=None, dst=0
                )
            counts[n] = (means, extrema, logged)
        return counts

    for counts in run_gloo_ranks(count, 2):
        for n, (means, extrema, logged) in counts.items():
            assert means == ["all_reduce"] * 2
            assert extrema == ["all_reduce"] * (2 if n <= 254 else 3)
            assert logged == ["all_reduce", "reduce"]


def test_a_metric_of_one_rank_raises_on_all_and_names_it() -> None:
    def work(rank: int) -> object:
        return all_reduce_metrics(
            [Metric.of_sum("shared", 1), *([Metric.of_sum("only_here", 1)] if rank == 1 else [])]
        )

    told = (
        "ranks of the group report different metrics: rank 1 adds 'only_here (sum)' compared with"
        " rank 0. Report the same metrics everywhere; a rank without data passes Metric.empty"
    )
    assert _messages(work, 3) == [told] * 3


def test_kinds_that_differ_raise_on_all() -> None:
    def work(rank: int, _: int) -> bool:
        with pytest.raises(
            KeyAgreementError,
            match=r"rank 1 lacks 'x \(sum\)' and adds 'x \(mean\)' compared with rank 0",
        ):
            all_reduce_metrics([Metric.of_sum("x", 1) if rank == 0 else Metric.of_mean("x", 1, 1)])
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def test_a_rank_that_cannot_prepare_its_metrics_does_not_hang_the_others() -> None:
    def work(rank: int, _: int) -> tuple[str, str]:
        mine: Any = {"x": 3.0 if rank == 1 else Metric.of_sum("x", 1)}
        with pytest.raises(MetricsError) as caught:
            all_reduce_metrics(mine)
        return type(caught.value).__name__, str(caught.value)

    (other, other_message), (own, own_message) = run_gloo_ranks(work, 2)
    assert (other, own) == ("KeyAgreementError", "MetricsError")
    assert (
        "rank 1 could not prepare its metrics: x: got float, whose way to merge is not declared"
        in other_message
    )
    assert own_message.startswith("x: got float")


def test_a_rank_that_fails_in_its_own_code_does_not_hang_the_others() -> None:
    def work(rank: int, _: int) -> str:
        def metrics() -> Iterator[Metric]:
            yield Metric.of_sum("a", 1.0)
            if rank:
                raise RuntimeError("a tool broke")

        with pytest.raises((RuntimeError, KeyAgreementError)) as caught:
            all_reduce_metrics(metrics())
        return type(caught.value).__name__

    assert run_gloo_ranks(work, 2) == ["KeyAgreementError", "RuntimeError"]


def test_the_order_of_metrics_does_not_matter_and_keys_of_a_mapping_are_names() -> None:
    def work(rank: int, _: int) -> dict[str, float | None]:
        records = {"a": Metric.of_sum("x", 1), "b": Metric.of_sum("x", 10)}
        return report(
            all_reduce_metrics(records if rank else dict(reversed(records.items()))).values()
        )

    assert run_gloo_ranks(work, 2) == [{"a": 2, "b": 20}] * 2


def test_only_the_logging_rank_gets_the_log() -> None:
    assert run_gloo_ranks(
        lambda rank, _: gather_and_reduce_log_dict(
            {"x": Metric.of_sum("x", rank)}, group=None, dst=1
        ),
        3,
    ) == [
        None,
        {"x": 3.0},
        None,
    ]


def test_a_subgroup_reduces_by_itself() -> None:
    def work(rank: int, _: int) -> tuple[float | None, dict[str, float | None] | None]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        logged = gather_and_reduce_log_dict(
            [Metric.of_sum("x", rank)], group=mine, dst=2 * (rank // 2) + 1
        )
        return all_reduce_metrics([Metric.of_sum("x", rank)], mine)["x"].value, logged

    assert run_gloo_ranks(work, 4) == [(1, None), (1, {"x": 1}), (5, None), (5, {"x": 5})]


def test_a_filler_rank_reports_zeros_and_micro_batches_may_differ_in_number() -> None:
    def work(rank: int, _: int) -> dict[str, float | None]:
        batches = [
            MicroBatchMetrics(sums={"loss": torch.tensor(3.0)}, num_tokens=torch.tensor(2))
        ] * (2 if rank == 0 else 0)
        batches += [MicroBatchMetrics(sums={"loss": 0.0}, num_tokens=0)]
        return reduce_train_step_metrics(
            batches, aggregation="sample_mean", step_units=2, cp_size=1, group=None
        )

    assert run_gloo_ranks(work, 2) == [{"loss": 3.0}] * 2


def test_micro_batches_that_disagree_raise_on_all_ranks() -> None:
    def work(rank: int, _: int) -> bool:
        batches = [
            MicroBatchMetrics(sums={"loss": 1.0}, num_tokens=1),
            MicroBatchMetrics(sums={"loss" if rank else "kl": 1.0}, num_tokens=1),
        ]
        with pytest.raises(KeyAgreementError, match="micro-batch 1 reports other metrics"):
            reduce_train_step_metrics(batches, aggregation="token_mean", cp_size=1, group=None)
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def test_a_single_process_needs_no_group() -> None:
    assert all_reduce_metrics([Metric.of_sum("x", 1), Metric.of_sum("x", 2)])["x"].value == 3
    assert gather_and_reduce_log_dict([Metric.of_sum("x", 1)], group=None, dst=0) == {"x": 1}
    with pytest.raises(MetricsError, match="got float"):
        all_reduce_metrics(cast("Any", {"x": 1.0}))


def test_what_is_no_list_of_metrics_is_refused() -> None:
    for wrong in (3, [3], {"x": 3}):
        with pytest.raises(MetricsError, match="got int"):
            all_reduce_metrics(cast("Any", wrong))


def test_a_reducer_output_and_a_metric_that_report_under_one_name_raise_on_every_rank() -> None:
    def work(_: int) -> object:
        batch = MicroBatchMetrics(
            sums={"ratio_mean": 10.0},
            num_tokens=2,
            metrics=[Metric.of_moments("ratio", [7.0, 9.0])],
        )
        return reduce_train_step_metrics([batch], aggregation="token_mean", cp_size=1, group=None)

    told = (
        "a reducer output and another metric both report under the name 'ratio_mean'; rename one of"
        " them"
    )
    assert _messages(work, 2) == [told] * 2


def test_sums_of_16_bit_values_do_not_depend_on_the_layout() -> None:
    def work(rank: int, size: int) -> float | None:
        values, cp = torch.ones(1027, dtype=torch.bfloat16), ContextParallel(size, rank)
        reduced = loss_reducer("token_mean", [1028], [1027], [[1] * 1027], cp=cp)(
            slice_response(values, 1028, 1027, cp)
        )
        batch = MicroBatchMetrics(sums={"loss": reduced}, num_tokens=1027)
        return reduce_train_step_metrics(
            [batch], aggregation="token_mean", cp_size=size, group=None
        )["loss"]

    for size in (1, 2):
        assert run_gloo_ranks(work, size) == [1.0] * size


def test_names_that_could_be_cut_in_two_ways_are_different() -> None:
    def work(rank: int) -> object:
        one = [Metric.of_sum("a (sum)\nb", 1)]
        return all_reduce_metrics(
            one if rank == 0 else [Metric.of_sum("a", 1), Metric.of_sum("b", 2)]
        )

    first, second = _messages(work, 2)
    assert first == second
    assert "rank 1 lacks 'a (sum)\\nb (sum)' and adds 'a (sum)', 'b (sum)'" in first


def test_descriptions_that_read_the_same_are_not_taken_for_one_metric() -> None:
    def work(rank: int) -> object:
        return all_reduce_metrics(
            [Metric.of_sum("a (sum, x", 1) if rank == 0 else Metric.of_sum("a", 1, unit="x (sum")]
        )

    first, second = _messages(work, 2)
    assert first == second
    assert "their descriptions read alike" in first


def test_a_histogram_too_wide_to_travel_raises_on_every_rank() -> None:
    def work(rank: int) -> object:
        values = [1e-300] if rank == 0 else [1.0]
        return all_reduce_metrics([Metric.of_histogram("ratio", values, relative_error=1e-6)])

    first, second = _messages(work, 2)
    assert first == second
    assert first.startswith(
        "metric 'ratio': its values span 345387764 buckets of relative error 1e-06, at most 1048576"
        " can be reduced"
    )


def test_preparation_that_fails_late_on_one_rank_does_not_hang_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int, _: int) -> str:
        def exhausted(*_: object) -> NoReturn:
            raise MemoryError("no room")

        if rank == 1:
            monkeypatch.setattr(wire, "digest", exhausted)
        with pytest.raises((MemoryError, KeyAgreementError)) as error:
            all_reduce_metrics([Metric.of_max("x", 1)])
        return str(error.value)

    assert run_gloo_ranks(work, 2, deadline_seconds=30) == [
        "rank 1 could not prepare its metrics: no room",
        "no room",
    ]


def test_bounds_of_any_number_type_agree() -> None:
    def work(rank: int, _: int) -> float | None:
        bound: Any = np.float64(0.01) if rank else 0.01
        return all_reduce_metrics([Metric.of_histogram("x", [1.0], relative_error=bound)])[
            "x"
        ].value

    assert run_gloo_ranks(work, 2) == [pytest.approx(1.0, rel=0.0101)] * 2


@pytest.mark.parametrize("group", ["dp", [0, 1], 3])
def test_what_is_no_group_is_refused(group: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: all_reduce_metrics([Metric.of_sum("x", 1)], group),
        lambda: gather_and_reduce_log_dict([Metric.of_sum("x", 1)], group=group, dst=0),
        lambda: reduce_train_step_metrics([], aggregation="token_mean", cp_size=1, group=group),
        lambda: masked_whiten(torch.ones(2), torch.ones(2), group),
        lambda: gather_responses([torch.ones(1)], [2], [1], ContextParallel(), group=group),
    ]
    for call in calls:
        with pytest.raises(
            MetricsError, match=r"group is .*; give a process group of torch.distributed"
        ):
            call()
