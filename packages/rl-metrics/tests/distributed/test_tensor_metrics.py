"""Numbers on a device: added up without being read, and wrong ones told to every rank."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_metrics import (
    AGGREGATIONS,
    ContextParallel,
    Metric,
    MetricsError,
    MicroBatchMetrics,
    report,
)
from rl_metrics.aggregation.loss_reduction import aggregate_diagnostic
from rl_metrics.selftest.layout_checks import _local_losses
from rl_metrics.selftest.processes import run_gloo_ranks
from rl_metrics.selftest.scenario import make_scenario
from rl_metrics.torch import (
    TensorMetric,
    all_reduce_metrics,
    gather_and_reduce_log_dict,
    loss_reducer,
    reduce_train_step_metrics,
)
from rl_metrics.torch.tensor_metrics import added

pytestmark = pytest.mark.distributed

STEP: dict[str, Any] = {
    "aggregation": "rollout_mean",
    "step_units": 4,
    "cp_size": 1,
    "group": None,
}


class _Watched(torch.Tensor):
    """A tensor that tells when its numbers are read on the host."""

    READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
    events: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in cls.READS:
            cls.events.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _watched(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    watched: torch.Tensor = torch.tensor(value, dtype=dtype).as_subclass(_Watched)
    return watched


def _noting_collectives(patch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "reduce"):
        function = getattr(dist, name)

        def noted(*a: Any, _name: str = name, _function: Any = function, **k: Any) -> Any:
            _Watched.events.append(_name)
            return _function(*a, **k)

        patch.setattr(dist, name, noted)


def _events(work: Callable[[int], object]) -> list[list[str]]:
    """Run work on two ranks; what each did, reads of watched tensors and collectives, in order."""

    def watching(rank: int, _: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            _noting_collectives(patch)
            work(rank)
        return _Watched.events

    return run_gloo_ranks(watching, 2)


def test_a_watched_tensor_tells_every_way_of_reading_it() -> None:
    _Watched.events.clear()
    value = _watched(2.0)
    for read in (float, int, bool, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy):
        before = len(_Watched.events)
        read(value)
        assert len(_Watched.events) > before, read
    _Watched.events.clear()


def test_a_step_reads_no_number_before_the_collective_that_adds_it_up() -> None:
    def work(rank: int) -> object:
        batches = [
            MicroBatchMetrics(
                sums={"loss": _watched(rank + k), "kl": _watched(0.5, torch.bfloat16)},
                num_tokens=_watched(3.0) if k else 3,
                diagnostics={
                    "entropy": (_watched(2.0), 1.0),
                    "ratio": (_watched(4.0), _watched(2, torch.int64)),
                },
                metrics=[Metric.of_max("most", rank)],
            )
            for k in range(2)
        ]
        result = reduce_train_step_metrics(batches, **STEP)
        # Losses 0, 1 on rank 0 and 1, 2 on rank 1; both diagnostics are 2.0 everywhere.
        expected = {"loss": 1.0, "kl": 0.5, "entropy": 2.0, "ratio": 2.0, "most": 1.0}
        assert result == expected
        return None

    for events in _events(work):
        collectives = [place for place, event in enumerate(events) if event == "all_reduce"]
        assert len(collectives) == 2
        reads = [place for place, event in enumerate(events) if event != "all_reduce"]
        assert all(place > collectives[-1] for place in reads), events


def test_metrics_of_the_log_read_no_number_before_it_has_travelled() -> None:
    def work(rank: int) -> object:
        metrics = [
            TensorMetric(name="norm", kind="mean", numerator=_watched(3.0 + rank), weight=1.0),
            TensorMetric(name="tokens", kind="sum", numerator=_watched(7, torch.int32)),
        ]
        lines = gather_and_reduce_log_dict(metrics, group=None, dst=0)
        assert lines == ({"norm": 3.5, "tokens": 14.0} if rank == 0 else None)
        return None

    for events in _events(work):
        assert events[:2] == ["all_reduce", "reduce"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_in_tensors_give_what_numbers_on_the_host_give(size: int) -> None:
    def work(rank: int, _: int) -> list[dict[str, float | None]]:
        as_numbers: list[MicroBatchMetrics] = []
        as_tensors: list[MicroBatchMetrics] = []
        for tensor, batches in ((float, as_numbers), (torch.tensor, as_tensors)):
            for k in range(1 + rank):
                batches.append(
                    MicroBatchMetrics(
                        sums={"loss": tensor(0.1 * (k + rank))},
                        num_tokens=tensor(float(2 + k)),
                        diagnostics={"e": (tensor(0.3), tensor(0.7))},
                        metrics=[Metric.of_sum("n", 1)],
                    )
                )
            batches.append(
                MicroBatchMetrics(
                    sums={"loss": 0.0},
                    num_tokens=0,
                    diagnostics={"e": (0.0, 0.0)},
                    metrics=[Metric.of_sum("n", 1)],
                )
            )
        return [reduce_train_step_metrics(x, **STEP) for x in (as_numbers, as_tensors)]

    for numbers, tensors in run_gloo_ranks(work, size):
        # Tensors above are float32.
        assert tensors == {name: pytest.approx(value, rel=1e-6) for name, value in numbers.items()}


def test_ranks_may_have_numbers_in_tensors_or_on_the_host() -> None:
    def work(rank: int, _: int) -> dict[str, float | None]:
        value: Any = torch.tensor(3.0) if rank else 1.0
        batch = MicroBatchMetrics(
            sums={"loss": value}, num_tokens=2, diagnostics={"e": (value, 1.0)}
        )
        mixed: list[Metric | TensorMetric] = [
            Metric.of_mean("x", 2.0, 2) if rank else Metric.empty("x", "mean"),
            TensorMetric(name="x", kind="mean", numerator=value, weight=1.0),
        ]
        return reduce_train_step_metrics([batch], **STEP) | report(all_reduce_metrics(mixed))

    # x: (1 + 3 + 2) / (1 + 1 + 2)
    assert run_gloo_ranks(work, 2) == [{"loss": 1.0, "e": 2.0, "x": 1.5}] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sums": {"loss": torch.tensor(5.0)}, "num_tokens": 0}, "'loss' is 5.0 with num_tokens 0"),
        ({"sums": {"loss": torch.tensor(math.nan)}, "num_tokens": 0}, "'loss' is nan with num_tok"),
        ({"num_tokens": torch.tensor(2.5)}, "num_tokens is 2.5; it counts the trained"),
        ({"num_tokens": torch.tensor(-1)}, "num_tokens is -1; give a finite number"),
        ({"num_tokens": torch.tensor(math.inf)}, "num_tokens is inf; give a finite number"),
        ({"sums": {"loss": 5.0}, "num_tokens": torch.tensor(0)}, "'loss' is 5.0 with num_tokens 0"),
        ({"diagnostics": {"e": (torch.tensor(1.0), 0.0)}}, "'e': the numerator is 1.0 under"),
        ({"diagnostics": {"e": (1.0, torch.tensor(0.0))}}, "'e': the numerator is 1.0 under"),
        ({"diagnostics": {"e": (torch.tensor(1.0), torch.tensor(-1))}}, "'e': the weight is -1"),
        ({"diagnostics": {"e": (torch.tensor(1.0), -1)}}, "'e': the weight is -1"),
    ],
)
def test_numbers_on_a_device_that_contradict_are_told_to_every_rank(
    wrong: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"sums": {"loss": torch.tensor(1.0)}, "num_tokens": 2}
    good = fields | {"diagnostics": {"e": (torch.tensor(1.0), 1.0)}}

    def work(rank: int, _: int) -> tuple[str, str]:
        batches = [MicroBatchMetrics(**good), MicroBatchMetrics(**(good | wrong if rank else good))]
        with pytest.raises(MetricsError) as error:
            reduce_train_step_metrics(batches, **STEP)
        return type(error.value).__name__, str(error.value)

    (kind, told), (own_kind, own) = run_gloo_ranks(work, 2, deadline_seconds=30)
    assert (kind, own_kind) == ("KeyAgreementError", "MetricsError")
    assert own.startswith("micro-batch 1: ")
    assert message in own
    assert told == f"rank 1 could not prepare its metrics: {own}"


def test_numbers_that_contradict_in_one_process_raise_there() -> None:
    batch = MicroBatchMetrics(sums={"loss": torch.tensor(5.0)}, num_tokens=0)
    with pytest.raises(MetricsError, match=r"micro-batch 0: 'loss' is 5\.0 with num_tokens 0"):
        reduce_train_step_metrics([batch], **STEP)
    with pytest.raises(MetricsError, match="weight is -1"):
        all_reduce_metrics(
            [TensorMetric(name="x", kind="mean", numerator=1.0, weight=torch.tensor(-1.0))]
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "max"}, "metric 'x': kind is 'max'; numbers on a device are reduced as"),
        ({"numerator": "a"}, "metric 'x': numerator is str 'a'"),
        ({"numerator": torch.ones(2)}, r"metric 'x': numerator is Tensor of shape \(2,\)"),
        ({"weight": torch.tensor(1j)}, "metric 'x': weight is Tensor .* a complex number"),
        ({"numerator": 1.0, "weight": 0.0}, "numerator is 1.0 under weight 0"),
        ({"weight": -1.0, "numerator": 1.0}, "weight is -1.0; give a finite number"),
    ],
)
def test_what_is_no_sum_or_mean_of_numbers_is_refused(fields: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "x", "kind": "mean", "numerator": torch.tensor(1.0)}
    with pytest.raises(MetricsError, match=message):
        TensorMetric(**given | fields)


def test_keys_of_a_mapping_are_names_and_several_of_one_name_add_up() -> None:
    one = TensorMetric(name="a", kind="mean", numerator=torch.tensor(1.0))
    two = TensorMetric(name="a", kind="mean", numerator=torch.tensor(4), weight=torch.tensor(3.0))
    assert report(all_reduce_metrics([one, two])) == {"a": 1.25}
    renamed: dict[str, Metric | TensorMetric] = {"b": one, "c": Metric.of_sum("d", 2)}
    assert report(all_reduce_metrics(renamed)) == {"b": 1, "c": 2}
    with pytest.raises(MetricsError, match="kind is 'mean' here and 'sum' there"):
        all_reduce_metrics([one, Metric.of_sum("a", 1.0)])


def test_numbers_are_added_in_their_order_on_top_of_the_vector() -> None:
    values = np.array([1.0, 2.0, 3.0])
    parts: list[Any] = [
        (2, torch.tensor(0.5)),
        (0, 4.0),
        (2, torch.tensor(1, dtype=torch.int64)),
        (2, 0.25),
    ]
    vector = added(values, parts, torch.device("cpu"))
    assert vector.tolist() == [5.0, 2.0, 4.75]
    assert values.tolist() == [1.0, 2.0, 3.0]
    assert added(values, [], torch.device("cpu")).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_diagnostic_of_a_step_does_not_depend_on_the_layout(dp_size: int, cp_size: int) -> None:
    scenario = make_scenario(3)
    ids: dict[str, Any] = {"rollout_ids": scenario.rollout_ids, "group_ids": scenario.group_ids}
    expected = {
        name: aggregate_diagnostic(name, scenario.values, scenario.loss_masks, **ids)
        for name in AGGREGATIONS
    }
    # The scenario has a fully masked rollout, so the two divisors differ.
    assert expected["rollout_mean"] != scenario.expected_value("rollout_mean")

    def work(rank: int, _: int) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        dp_rank, cp_rank = divmod(rank, cp_size)
        cp = ContextParallel(cp_size, cp_rank)
        mine = list(range(dp_rank, scenario.num_samples, dp_size))
        weights = torch.tensor(scenario.parameters, dtype=torch.float64)
        for name, count in product(AGGREGATIONS, (1, 3)):
            batches = []
            for samples in (mine[k::count] for k in range(count)):
                batch = scenario.part(samples)
                masks = [torch.from_numpy(mask) for mask in batch.loss_masks]
                reduce = loss_reducer(
                    name,
                    batch.total_lengths,
                    batch.response_lengths,
                    masks,
                    denominators=scenario.denominators(name)[samples],
                    cp=cp,
                )
                values = _local_losses(batch, cp, weights, masks)
                batches.append(
                    MicroBatchMetrics(
                        sums={"loss": reduce(values)},
                        num_tokens=reduce.num_tokens,
                        diagnostics={"entropy": reduce.diagnostic(values)},
                    )
                )
            lines = reduce_train_step_metrics(
                batches,
                aggregation=name,
                step_units=scenario.step_units(name),
                cp_size=cp_size,
                group=None,
            )
            found[f"{name} {count}"] = lines["entropy"]
            assert lines["loss"] == pytest.approx(scenario.expected_value(name), rel=1e-13)
        return found

    wanted: dict[str, Any] = {f"{n} {k}": expected[n] for n, k in product(AGGREGATIONS, (1, 3))}
    for found in run_gloo_ranks(work, dp_size * cp_size):
        assert found == {key: pytest.approx(value, rel=1e-13) for key, value in wanted.items()}
