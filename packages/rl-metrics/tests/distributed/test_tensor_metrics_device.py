"""With NCCL, numbers are added up over ranks while the device still works on them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_metrics import Metric, MicroBatchMetrics, report
from rl_metrics.torch import (
    TensorMetric,
    all_reduce_metrics,
    collectives,
    reduce_train_step_metrics,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_CYCLES = 3_000_000_000
"""More than a second of any GPU."""


@pytest.fixture
def nccl_world_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only rank of an NCCL group, which reduces as those of larger ones."""
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=device,
    )
    monkeypatch.setattr(collectives, "is_alone", lambda group: False)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    yield
    dist.destroy_process_group()


@pytest.fixture
def busy_at_sums(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each collective of sums whether the device was still busy when it was called."""
    busy: list[bool] = []
    function = dist.all_reduce

    def noted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **settings: Any) -> Any:
        if op == dist.ReduceOp.SUM:
            busy.append(not torch.cuda.current_stream().query())
        return function(tensor, op=op, **settings)

    monkeypatch.setattr(dist, "all_reduce", noted)
    return busy


@pytest.mark.usefixtures("nccl_world_of_one")
def test_a_step_does_not_wait_for_the_device_before_it_adds_up(busy_at_sums: list[bool]) -> None:
    one = torch.ones((), device="cuda")
    batches = [
        MicroBatchMetrics(
            sums={"loss": one * 2, "kl": (one * 3).to(torch.bfloat16)},
            num_tokens=4,
            diagnostics={"entropy": (one * 2, 0.5), "ratio": (one, one)},
            metrics=[Metric.of_max("most", 7.0)],
        )
        for _ in range(2)
    ]
    # Twice: a kernel that is loaded at its first use waits for the device.
    for _ in range(2):
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        result = reduce_train_step_metrics(
            batches, aggregation="rollout_mean", step_units=4, cp_size=1, group=None
        )
    assert result == {"loss": 1.0, "kl": 1.5, "entropy": 4.0, "ratio": 1.0, "most": 7.0}
    assert busy_at_sums[1:] == [True]


@pytest.mark.usefixtures("nccl_world_of_one")
def test_metrics_of_the_log_do_not_wait_for_the_device_either(busy_at_sums: list[bool]) -> None:
    one = torch.ones((), device="cuda")
    metrics = [
        TensorMetric(name="norm", kind="mean", numerator=one * 3, weight=one * 2),
        TensorMetric(name="tokens", kind="sum", numerator=one.to(torch.int64)),
    ]
    for _ in range(2):
        torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        assert report(all_reduce_metrics(metrics)) == {"norm": 1.5, "tokens": 1.0}
    assert busy_at_sums[1:] == [True]


def test_numbers_of_a_device_and_of_the_host_meet_without_a_group() -> None:
    one = torch.ones((), device="cuda")
    torch.cuda._sleep(_CYCLES // 10)  # type: ignore[no-untyped-call]
    batches = [
        MicroBatchMetrics(sums={"loss": one}, num_tokens=one, diagnostics={"e": (one, one * 2)}),
        MicroBatchMetrics(
            sums={"loss": torch.ones(())}, num_tokens=1, diagnostics={"e": (3.0, one)}
        ),
    ]
    result = reduce_train_step_metrics(batches, aggregation="token_mean", cp_size=1, group=None)
    assert result == {"loss": 1.0, "e": pytest.approx(4 / 3)}
