"""A second SGLang plugin, for gpu_plugin_cost.py alone: switches variants and times their steps.

Each request names its variant in `custom_params`. When the first request of another variant
arrives, the hooks of rl-topp are put in place or taken out, the sampling backend is chosen, and the
steps of the last variant are written to $RL_TOPP_TIMINGS. A step's time is the gap between the
results of two decode batches of the full size; beside it goes the GPU time of `ModelRunner.sample`
between CUDA events.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIANT_KEY = "variant"


class Recorder:
    """State of one scheduler process."""

    def __init__(self) -> None:
        self.variant = ""
        self.full_size = int(os.environ["RL_TOPP_FULL_BATCH"])
        self.path = Path(os.environ["RL_TOPP_TIMINGS"])
        self.times: list[float] = []
        self.events: list[Any] = []
        self.hooked: dict[str, Any] = {}

    def switch(self, variant: str) -> None:
        """Write what the last variant did and set up the next, such as "hooked/pytorch"."""
        import torch

        if self.variant:
            if self.events:
                torch.cuda.synchronize()
            gaps = [
                1e3 * (later - earlier)
                for earlier, later in zip(self.times[:-1], self.times[1:], strict=True)
            ]
            sampled = [start.elapsed_time(end) for start, end in self.events]
            with self.path.open("a") as out:
                out.write(
                    json.dumps({"variant": self.variant, "step_ms": gaps, "sample_ms": sampled})
                    + "\n"
                )
        self.variant, self.times, self.events = variant, [], []
        side, _, backend = variant.partition("/")
        self.set_hooks(in_place=side != "stock")
        import sglang.srt.layers.sampler as sampler

        sampler.get_flags = lambda: SimpleNamespace(sampling_backend=backend.partition("/")[0])

    def set_hooks(self, *, in_place: bool) -> None:
        """Put rl-topp's wrappers on SGLang's functions, or SGLang's own functions back."""
        import pkgutil

        from rl_topp.sglang.plugin import HOOKED

        for target in HOOKED:
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            wrapper: Any = self.hooked.setdefault(target, vars(owner)[name])
            function: Any = wrapper.__func__ if isinstance(wrapper, classmethod) else wrapper
            own = function.__wrapped__
            setattr(
                owner,
                name,
                (
                    wrapper
                    if in_place
                    else classmethod(own)
                    if isinstance(wrapper, classmethod)
                    else own
                ),
            )


_recorder: Recorder | None = None


def recorder() -> Recorder:
    """Return the recorder of this process."""
    global _recorder  # noqa: PLW0603  one per process, made when the scheduler first asks
    if _recorder is None:
        _recorder = Recorder()
    return _recorder


def on_request(original: Any, scheduler: Any, request: Any) -> Any:
    """Note the variant of a request; wraps `Scheduler.handle_generate_request`."""
    variant = (request.sampling_params.custom_params or {}).get(VARIANT_KEY, "")
    if variant and variant != recorder().variant:
        recorder().switch(variant)
    return original(scheduler, request)


def on_result(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    """Time a decode step; wraps `Scheduler.process_batch_result`."""
    value = original(scheduler, batch, result)
    if batch.forward_mode.is_decode() and len(batch.reqs) == recorder().full_size:
        recorder().times.append(time.perf_counter())
    return value


def on_sample(original: Any, runner: Any, logits_output: Any, forward_batch: Any) -> Any:
    """Time the GPU in `ModelRunner.sample`."""
    import torch

    if (
        not forward_batch.forward_mode.is_decode()
        or forward_batch.batch_size != recorder().full_size
        or not torch.cuda.is_available()
    ):
        return original(runner, logits_output, forward_batch)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    ids = original(runner, logits_output, forward_batch)
    end.record()
    recorder().events.append((start, end))
    return ids


def register() -> None:
    """Register the hooks; entry point of the group sglang.srt.plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        on_request,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result", on_result, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample", on_sample, HookType.AROUND
    )
