"""Metrics over real gloo ranks: the merged records, the number of collectives, and errors that reach everybody."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_metrics import KeyAgreementError, Metric, MetricsError, MicroBatchMetrics, merge_metrics, report
from rl_metrics.torch import all_reduce_metrics, gather_and_reduce_log_dict, reduce_train_step_metrics
from rl_metrics.torch.processes import run_gloo_ranks

pytestmark = pytest.mark.distributed


def _metrics(rank: int):
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
    expected = report(merge_metrics(metric for rank in range(size) for metric in _metrics(rank)).values())
    results = run_gloo_ranks(lambda rank, _: report(all_reduce_metrics(_metrics(rank)).values()), size)
    assert all(repr(result) == repr(results[0]) for result in results)
    result = results[0]
    assert math.isnan(result.pop("max_of_nan"))
    assert math.isnan(expected.pop("max_of_nan"))
    assert result.pop("nothing") is None
    assert expected.pop("nothing") is None
    assert result == {name: pytest.approx(value, rel=1e-9) for name, value in expected.items()}


def test_the_number_of_collectives_does_not_depend_on_the_number_of_metrics(counting_collectives) -> None:
    def count(rank: int, _):
        counts = {}
        for n in (1, 10, 1000):
            with counting_collectives() as means:
                all_reduce_metrics([Metric.of_mean(f"m{i}", rank, 1) for i in range(n)])
            with counting_collectives() as extrema:
                all_reduce_metrics([Metric.of_max(f"m{i}", rank) for i in range(n)])
            with counting_collectives() as logged:
                gather_and_reduce_log_dict([Metric.of_mean(f"m{i}", rank, 1) for i in range(n)], group=None, dst=0)
            counts[n] = (means, extrema, logged)
        return counts

    for counts in run_gloo_ranks(count, 2):
        for n, (means, extrema, logged) in counts.items():
            assert means == ["all_reduce"] * 2
            assert extrema == ["all_reduce"] * (2 if n <= 254 else 3)
            assert logged == ["all_reduce", "reduce"]


def test_a_metric_of_one_rank_raises_on_all_and_names_it() -> None:
    def work(rank: int, _):
        mine = [Metric.of_sum("shared", 1), *([Metric.of_sum("only_here", 1)] if rank == 1 else [])]
        try:
            all_reduce_metrics(mine)
        except KeyAgreementError as error:
            return str(error)
        return ""

    for message in run_gloo_ranks(work, 3):
        assert "rank 1 lacks [] and adds ['only_here (sum)'] compared with rank 0" in message


def test_kinds_that_differ_raise_on_all() -> None:
    def work(rank: int, _) -> bool:
        with pytest.raises(KeyAgreementError, match=r"rank 1 lacks \['x \(sum\)'\] and adds \['x \(mean\)'\]"):
            all_reduce_metrics([Metric.of_sum("x", 1) if rank == 0 else Metric.of_mean("x", 1, 1)])
        return True

    assert run_gloo_ranks(work, 2) == [True, True]


def test_a_rank_that_cannot_prepare_its_metrics_does_not_hang_the_others() -> None:
    def work(rank: int, _):
        mine = {"x": 3.0 if rank == 1 else Metric.of_sum("x", 1)}
        with pytest.raises(MetricsError) as caught:
            all_reduce_metrics(mine)
        return type(caught.value).__name__, str(caught.value)

    (other, other_message), (own, own_message) = run_gloo_ranks(work, 2)
    assert (other, own) == ("KeyAgreementError", "MetricsError")
    assert "rank 1 could not prepare its metrics: x: got float, whose way to merge is not declared" in other_message
    assert own_message.startswith("x: got float")


def test_a_rank_that_fails_in_its_own_code_does_not_hang_the_others() -> None:
    def work(rank: int, _):
        def metrics():
            yield Metric.of_sum("a", 1.0)
            if rank:
                raise RuntimeError("a tool broke")

        with pytest.raises((RuntimeError, KeyAgreementError)) as caught:
            all_reduce_metrics(metrics())
        return type(caught.value).__name__

    assert run_gloo_ranks(work, 2) == ["KeyAgreementError", "RuntimeError"]


def test_the_order_of_metrics_does_not_matter_and_keys_of_a_mapping_are_names() -> None:
    def work(rank: int, _):
        records = {"a": Metric.of_sum("x", 1), "b": Metric.of_sum("x", 10)}
        return report(all_reduce_metrics(records if rank else dict(reversed(records.items()))).values())

    assert run_gloo_ranks(work, 2) == [{"a": 2, "b": 20}] * 2


def test_only_the_logging_rank_gets_the_log() -> None:
    assert run_gloo_ranks(lambda rank, _: gather_and_reduce_log_dict({"x": Metric.of_sum("x", rank)}, group=None, dst=1), 3) == [
        None,
        {"x": 3.0},
        None,
    ]


def test_a_subgroup_reduces_by_itself() -> None:
    def work(rank: int, _):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[rank // 2]
        logged = gather_and_reduce_log_dict([Metric.of_sum("x", rank)], group=mine, dst=2 * (rank // 2) + 1)
        return all_reduce_metrics([Metric.of_sum("x", rank)], mine)["x"].value, logged

    assert run_gloo_ranks(work, 4) == [(1, None), (1, {"x": 1}), (5, None), (5, {"x": 5})]


def test_a_filler_rank_reports_zeros_and_micro_batches_may_differ_in_number() -> None:
    def work(rank: int, _):
        batches = [MicroBatchMetrics(sums={"loss": torch.tensor(3.0)}, num_tokens=torch.tensor(2))] * (2 if rank == 0 else 0)
        batches += [MicroBatchMetrics(sums={"loss": 0.0}, num_tokens=0)]
        return reduce_train_step_metrics(batches, aggregation="sample_mean", step_units=2, cp_size=1, group=None)

    assert run_gloo_ranks(work, 2) == [{"loss": 3.0}] * 2


def test_micro_batches_that_disagree_raise_on_all_ranks() -> None:
    def work(rank: int, _) -> bool:
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
        all_reduce_metrics({"x": 1.0})
