"""On an accelerator: the rule for masks, and which calls wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rl_metrics import ContextParallel, MetricsError
from rl_metrics.torch import (
    get_sum_of_sample_mean,
    loss_reducer,
    masked_whiten,
    megatron_num_tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]


@contextmanager
def _no_wait() -> Iterator[None]:
    """Make every wait for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bad", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_on_the_device_follows_the_rule(bad: float) -> None:
    masks = [torch.ones(3, device="cuda"), torch.tensor([1.0, bad], device="cuda")]
    for given in (masks, torch.cat(masks)):
        with pytest.raises(MetricsError, match=r"sample 1: loss mask holds .* at response token 1"):
            loss_reducer("sample_mean", [4, 3], [3, 2], given)
    with pytest.raises(MetricsError, match=r"sample 1: the mask holds"):
        masked_whiten([torch.ones(3, device="cuda"), torch.ones(2, device="cuda")], masks)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_call_never_waits_for_the_device(where: str) -> None:
    x = torch.tensor([1.0, 3.0, 5.0], device="cuda", requires_grad=True)
    reduce = get_sum_of_sample_mean([4, 3], [2, 1], torch.tensor([1, 1, 1], device=where))
    reduce(x)  # masks from the host move to the device of the first values
    with _no_wait():
        loss = reduce(x)
    assert loss.item() == 7.0


def test_booleans_on_the_device_are_counted_without_a_wait() -> None:
    masks = torch.tensor([True, False, True], device="cuda")
    with _no_wait():
        count = megatron_num_tokens("token_mean", masks)
    assert (count.item(), count.device.type) == (2, "cuda")


@pytest.mark.parametrize("cp", [None, ContextParallel(2, 1)])
def test_making_a_reducer_launches_no_kernel_and_a_call_at_most_ten(
    cp: ContextParallel | None,
) -> None:
    masks = torch.ones(30 * 512, dtype=torch.int32, device="cuda")

    def kernels(function: object) -> int:
        assert callable(function)
        function()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            function()
            torch.cuda.synchronize()
        events = [event for event in trace.events() or [] if event.device_type == DeviceType.CUDA]
        return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)

    reduce = get_sum_of_sample_mean([40] * 512, [30] * 512, masks, cp=cp)
    x = torch.ones(reduce.num_values, device="cuda")
    assert kernels(lambda: get_sum_of_sample_mean([40] * 512, [30] * 512, masks, cp=cp)) == 0
    assert 1 <= kernels(lambda: reduce(x)) <= 10
