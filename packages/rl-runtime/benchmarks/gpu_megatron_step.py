"""One Megatron-Core training step, end to end: cross-entropy against scores of kept ids only.

Everything else is the same.

    python packages/rl-runtime/benchmarks/gpu_megatron_step.py
        one GPU, Qwen3-0.6B shape, 16,384 packed tokens in 8 sequences
    python packages/rl-runtime/benchmarks/gpu_megatron_step.py --tiny
        a few tokens on the CPU: that both heads run and agree

Every variant is timed as Python runs it, and with forward and backward captured as one CUDA graph,
where the host has no part in the figure; `compare` says what a variant is. Needs torch,
megatron-core and numpy; with OUT set, the figures go to $OUT/megatron_step.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.extend(
    str(Path(__file__).parents[2] / part)
    for part in ("rl-topp/src", "rl-topp/benchmarks", "rl-runtime/src")
)

import numpy as np
import torch
import torch.distributed as dist
from gpu_megatron_step_model import QWEN3_06B, TINY, RmsNorm, build, packed_batch, rms_norm
from lm_head_cases import targets_in, zipf_rows
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rl_runtime.megatron import attention
from rl_runtime.megatron.cpu_shim import install_cpu_shim
from rl_runtime.megatron.rotary import apply_rotary
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.training.scores import ResponseScores, score_responses
from rl_topp import NucleusSet


class Trial:
    """The model, and the loss of one batch by either head."""

    def __init__(
        self, shape: ModelShape, lengths: list[int], device: torch.device, *, fused: bool
    ) -> None:
        self.device = device
        self.model, self.optimizer, self.config = build(shape, device, fused=fused)
        rng = np.random.default_rng(0)
        self.rows = zipf_rows(rng, sum(lengths), 5.0, shape.vocab_size)
        self.whole = NucleusSet.unfiltered(sum(lengths), vocab_size=shape.vocab_size)
        self.batch = packed_batch(
            shape, lengths, targets_in(self.rows, rng, device=device.type), device
        )

    def cross_entropy(self, *, fused: bool) -> torch.Tensor:
        self.config.cross_entropy_loss_fusion = fused
        batch = self.batch
        labels = batch.targets_K[None]
        losses: torch.Tensor = self.model(
            batch.tokens_1T, batch.positions_1T, None, labels=labels, packed_seq_params=batch.stream
        )
        return losses.float().mean()

    def sparse(self, rows: NucleusSet) -> torch.Tensor:
        batch = self.batch
        # The head reads no more of a micro-batch than this.
        micro_batch: Any = SimpleNamespace(
            rows_K=torch.arange(len(rows), device=self.device),
            targets_K=batch.targets_K,
            nucleus=rows,
        )
        scores: ResponseScores = self.model(
            batch.tokens_1T,
            batch.positions_1T,
            None,
            packed_seq_params=batch.stream,
            output_processor=partial(
                score_responses,
                micro_batch=micro_batch,
                temperature=1.0,
                wanted=frozenset(),
                tp_group=mpu.get_tensor_model_parallel_group(),
            ),
        )
        return -scores.log_probs.mean()

    def gradients(self, loss: Callable[[], torch.Tensor]) -> tuple[float, float]:
        """Return the loss and the gradient norm, without an update."""
        self.clear()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        finalize_model_grads([self.model])
        squares = [
            parameter.main_grad.double().square().sum() for parameter in self.model.parameters()
        ]
        return float(value.detach()), float(torch.stack(squares).sum().sqrt())

    def clear(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def eager(self, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        return lambda: loss().backward()  # type: ignore[no-untyped-call]

    def captured(self, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        """Return forward and backward as one CUDA graph, in which the host has no part."""
        run = self.eager(loss)
        for _ in range(3):
            self.clear()
            run()
        self.clear()
        graph = torch.cuda.CUDAGraph()
        # Relaxed: page-locked memory is allocated and asked about on the way.
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"
        ):
            run()
        return graph.replay

    def step(self, run: Callable[[], None]) -> None:
        self.clear()
        run()
        finalize_model_grads([self.model])
        self.optimizer.step()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(
        self, run: Callable[[], None], steps: int, untimed: int
    ) -> tuple[list[float], float]:
        """Return milliseconds of each step, and the peak of allocated memory in GiB."""
        times = []
        for index in range(untimed + steps):
            if index == untimed and self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.synchronize()
            begin = time.perf_counter()
            self.step(run)
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        return times[untimed:], (
            torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        )


def check_agreement(trial: Trial) -> str:
    """Compare both heads where they must agree: sets of the whole vocabulary."""
    expected = trial.gradients(lambda: trial.cross_entropy(fused=False))
    found = trial.gradients(lambda: trial.sparse(trial.whole))
    limit = (
        5e-3 if trial.device.type == "cuda" else 1e-5
    )  # the logits of cross-entropy are rounded to bfloat16 on the GPU
    problems = [
        f"{left} and {right}"
        for left, right in zip(expected, found, strict=True)
        if abs(left - right) > limit * abs(left)
    ]
    if problems:
        sys.exit(f"the heads disagree on loss or gradient norm: {'; '.join(problems)}")
    return (
        f"whole vocabulary: loss {expected[0]:.6f} and {found[0]:.6f}, gradient norm"
        f" {expected[1]:.6f} and {found[1]:.6f}"
    )


def compare(
    trial: Trial, steps: int, untimed: int, *, how: str
) -> tuple[list[str], dict[str, Any]]:
    """Time the variants in turn, three times; `how` is "eager" or "captured".

    Every token is a response token with a nucleus (mean 5). Forward, backward, gradient clipping
    and Adam; bfloat16 weights, float32 gradients, Megatron-Core's data parallelism with the
    distributed optimizer, its local layer spec with `rl_runtime`'s packed attention; kept ids are
    scored as `rl_runtime`'s trainer scores them. Norms and rotary embeddings run through
    torch.compile and SwiGLU and residual sums through Megatron-Core's own fusions, in all variants
    alike; `--eager` leaves all of these out.
    """
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "logits, cross-entropy": lambda: trial.cross_entropy(fused=False),
        "logits, fused cross-entropy": lambda: trial.cross_entropy(fused=True),
        "kept ids only": lambda: trial.sparse(trial.rows),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    peaks = dict.fromkeys(variants, 0.0)
    for _ in range(3):
        for name, loss in variants.items():
            run = trial.eager(loss) if how == "eager" else trial.captured(loss)
            found, peak = trial.measure(run, steps, untimed)
            times[name] += found
            peaks[name] = max(peaks[name], peak)
            del run  # a graph holds all memory that its run needs
            gc.collect()
    medians = {name: statistics.median(found) for name, found in times.items()}
    # What a graph allocates, it allocates while it is captured: peaks are known of eager steps
    # only.
    eager = how == "eager"
    lines = [
        f"{how:8s} {name:28s} {medians[name]:8.1f} ms (min {min(times[name]):.1f}, max"
        f" {max(times[name]):.1f})" + (f", peak {peaks[name]:6.2f} GiB" if eager else "")
        for name in variants
    ]
    *others, sparse = variants
    lines += [
        f"{how:8s} kept ids only against {other}: {medians[other] / medians[sparse]:.2f}x"
        + (f", {peaks[other] - peaks[sparse]:.1f} GiB less" if eager else "")
        for other in others
    ]
    return lines, {"milliseconds": times, "peaks_gib": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument(
        "--eager", action="store_true", help="neither torch.compile nor Megatron-Core's fusions"
    )
    options = parser.parse_args()
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = torch.device("cpu" if options.tiny else "cuda:0")
    torch.manual_seed(0)
    install_cpu_shim()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if options.tiny else "nccl",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        mpu.initialize_model_parallel(create_gloo_process_groups=False)
        if not options.tiny:
            model_parallel_cuda_manual_seed(0)
            # The default stream cannot be captured, and gradients are accumulated on the stream on
            # which the model was wrapped.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        fused = not (options.eager or options.tiny)
        if fused:
            RmsNorm.compute = staticmethod(torch.compile(rms_norm, dynamic=False))
            vars(attention)["apply_rotary"] = torch.compile(apply_rotary, dynamic=False)
        shape, lengths = (TINY, [7, 20, 1, 36]) if options.tiny else (QWEN3_06B, [2_048] * 8)
        trial = Trial(shape, lengths, device, fused=fused)
        name = "CPU" if options.tiny else torch.cuda.get_device_properties(0).name
        how = "compiled and fused" if fused else "eager"
        mean = trial.rows.ids.size / sum(lengths)
        lines = [
            (
                f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {how};"
                f" {sum(lengths)} tokens, mean kept {mean:.2f}"
            ),
            check_agreement(trial),
        ]
        print("\n".join(lines), flush=True)
        gc.disable()  # else a collection of the host falls into some steps and not into others
        figures: dict[str, Any] = {}
        for how in ("eager",) if options.tiny else ("eager", "captured"):
            measured, figures[how] = compare(trial, *((2, 1) if options.tiny else (8, 3)), how=how)
            print("\n".join(measured), flush=True)
            lines += measured
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "megatron_step.json").write_text(
                json.dumps({"lines": lines, **figures}, indent=1)
            )
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
