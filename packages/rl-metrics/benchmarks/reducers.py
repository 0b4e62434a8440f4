"""One reducer call against a loop over samples: launches and time, on the CPU or a GPU.

    python benchmarks/reducers.py                      # the GPU if there is one, else the CPU
    python benchmarks/reducers.py --device cpu --samples 64 512 4096 --json

Rows: "make" builds the reducer from masks already on the device (once per micro-batch), "call"
reduces one metric, "call+backward" adds the gradient; "loop" and "loop+backward" do what is usual
elsewhere: slice, mask, sum and divide sample by sample. Both give the same number, which is
checked. Launches are device kernels counted by torch's profiler on a GPU, and operations that would
launch one on the CPU. Responses are 64-1,024 tokens long; times are medians.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rl_metrics.torch import get_sum_of_sample_mean

_NO_KERNEL = {
    "detach",
    "alias",
    "view",
    "split_with_sizes",
    "unbind",
    "slice",
    "select",
    "expand",
    "lift_fresh",
    "scalar_tensor",
    "empty",
}


class _Operations(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in _NO_KERNEL
        return func(*args, **(kwargs or {}))


def launches(function: Callable[[], object], device: torch.device) -> int:
    """Kernels of one call."""
    function()
    if device.type == "cpu":
        operations = _Operations()
        with operations:
            function()
        return operations.count
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    return sum(
        bool(
            event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        )
        for event in trace.events()
    )


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall time of one call."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def loop(x: torch.Tensor, masks: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """The usual way: one sample at a time."""
    total = x.new_zeros(())
    for piece, mask in zip(torch.split(x, lengths), masks, strict=True):
        total = total + (piece * mask).sum() / torch.clamp(mask.sum(), min=1)
    return total


def measure(num_samples: int, device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one batch size, each as soon as it is measured."""
    rng = np.random.default_rng(num_samples)
    responses = rng.integers(64, 1025, num_samples).tolist()
    totals = [response + 100 for response in responses]
    flat_mask = torch.from_numpy((rng.random(sum(responses)) < 0.9).astype(np.int32)).to(device)
    masks = list(torch.split(flat_mask, responses))
    x = (
        torch.from_numpy(rng.normal(size=sum(responses)).astype(np.float32))
        .to(device)
        .requires_grad_()
    )

    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        return get_sum_of_sample_mean(totals, responses, flat_mask)

    reduce = make()

    def backward_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x.grad = None
        forward(x).backward()  # type: ignore[no-untyped-call]

    with torch.no_grad():
        ours, usual = reduce(x).item(), loop(x, masks, responses).item()
    assert abs(ours - usual) <= 1e-4 * max(abs(usual), 1), f"{ours} is not {usual}"
    cases: dict[str, Callable[[], object]] = {
        "make": make,
        "loop": lambda: loop(x.detach(), masks, responses),
        "call": lambda: reduce(x.detach()),
        "loop+backward": lambda: backward_of(lambda values: loop(values, masks, responses)),
        "call+backward": lambda: backward_of(reduce),
    }
    few = max(repeats // 5, 3)
    times: dict[str, float] = {}
    for name, function in cases.items():
        times[name] = milliseconds(function, device, few if "loop" in name else repeats)
        row = {
            "samples": num_samples,
            "tokens": sum(responses),
            "case": name,
            "launches": launches(function, device),
            "ms": times[name],
        }
        if name.startswith("call"):
            row["faster_than_loop"] = times[name.replace("call", "loop")] / times[name]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="4 samples on the CPU, once")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.device, arguments.samples, arguments.repeats = "cpu", [4], 1
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    rows = (row for n in arguments.samples for row in measure(n, device, arguments.repeats))
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.processor() or platform.machine()}, 1 thread"
    )
    if arguments.json:
        json.dump(
            {"device": name, "torch": torch.__version__, "rows": list(rows)}, sys.stdout, indent=1
        )
        return
    print(
        f"{name}; torch {torch.__version__}; Python {platform.python_version()}; medians of"
        f" {arguments.repeats}"
    )
    # Rows are measured as they are printed.
    print(
        f"{'samples':>8} {'tokens':>9} {'case':<14} {'launches':>8} {'ms':>10} {'faster':>8}",
        flush=True,
    )
    for row in rows:
        faster = f"{row['faster_than_loop']:.1f}x" if "faster_than_loop" in row else ""
        print(
            f"{row['samples']:>8} {row['tokens']:>9} {row['case']:<14} {row['launches']:>8}"
            f" {row['ms']:>10.3f} {faster:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
