"""Step time of the real trainer at DP 2 on CPUs, under plans of several systems.

Run: `python benchmarks/step_time_real.py` (minutes), `--tiny` for a run of seconds. Two gloo
processes train a small model on one batch of heavy-tailed lengths, one step at a time, under the
plan of rl-schedule and those of `packages/rl-schedule/benchmarks/peer_orders.py`, all on the FLOPs
of the model. Plans take turns within every round, and every round begins with another one, so that
what else the machine does meets them all alike; the first round is not counted. A step is forward
and backward passes of all micro-batches, the gradient reduction and the optimizer.

Prints Markdown: the median wall time of a step, and the median of the CPU time of its busier rank,
which other load of the machine does not lengthen; for both the median over the rounds of the ratio
to rl-schedule's step in the same round, beside the ratio that the FLOPs of the costliest rank give.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[2] / "rl-schedule/benchmarks"))

import numpy as np
import numpy.typing as npt

with warnings.catch_warnings():
    # Megatron-Core warns at import.
    warnings.simplefilter("ignore")
    import torch

    from rl_runtime.training.trainer import Trainer

from peer_orders import ORDERS, Layout  # type: ignore[import-not-found]  # of rl-schedule

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column, RankBatch, take_columns
from rl_runtime.config.recipe import Recipe
from rl_runtime.setup.tiny_model import tiny_model_config, write_tiny_model
from rl_schedule import RankView, TransformerCost

RANKS = 2
VOCAB_SIZE = 88
DEADLINE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Model, batch and repetitions."""

    layers: int
    hidden: int
    samples: int
    cap: int
    rounds: int
    seeds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Seconds of one step."""

    wall: float
    cpu: float


FULL = Setting(layers=2, hidden=128, samples=64, cap=2048, rounds=7, seeds=3)
TINY = Setting(layers=1, hidden=32, samples=12, cap=128, rounds=2, seeds=1)


def recipe_of(setting: Setting, run_dir: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"dir": str(run_dir)},
            "model": {
                "num_layers": setting.layers,
                "hidden_size": setting.hidden,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": setting.hidden // 4,
                "intermediate_size": 3 * setting.hidden,
                "max_position_embeddings": setting.cap,
            },
            "parallel": {"data": RANKS},
            "train": {
                "global_batch_size": setting.samples,
                "max_tokens_per_gpu": setting.cap,
            },
            "rollout": {"prompts_per_batch": setting.samples, "rollouts_per_prompt": 1},
            "algorithm": {"old_log_probs": "reuse"},
            "dump": {"train": "", "rollout": ""},
        }
    )


def batch_of(setting: Setting, seed: int) -> dict[str, Column]:
    """Draw responses of all but four tokens of heavy-tailed samples, with what training reads."""
    rng = np.random.default_rng(seed)
    shortest = setting.cap / 64
    lengths = np.rint(shortest * (1 + rng.pareto(1.1, setting.samples)))
    lengths = np.clip(lengths, 8, setting.cap).astype(np.int64)
    rows = np.arange(setting.samples)
    tokens = [rng.integers(0, VOCAB_SIZE, size) for size in lengths]
    responses = [size - 4 for size in lengths.tolist()]
    return {
        "tokens": RaggedArray.from_list(tokens, np.int64),
        "loss_masks": RaggedArray.from_list([np.ones(n, np.int32) for n in responses], np.int32),
        "rollout_log_probs": RaggedArray.from_list(
            [-rng.random(n).astype(np.float32) for n in responses], np.float32
        ),
        "rollout_position": rows,
        "sample_index": rows,
        "rollout_ids": rows,
        "group_ids": rows,
        "total_lengths": lengths,
        "response_lengths": np.array(responses),
        "rewards": rng.standard_normal(setting.samples),
        "raw_reward": rng.random(setting.samples),
        "loss_denominators": np.array(responses, np.float32),
    }


def rank_batch(layout: Layout, rank: int, columns: dict[str, Column], name: str) -> RankBatch:
    sizes = [len(one) for one in layout[rank]]
    ends = np.cumsum([0, *sizes])
    partition = np.array([i for one in layout[rank] for i in one], dtype=np.int64)
    indices = [np.arange(start, end) for start, end in pairwise(ends.tolist())]
    samples = len(columns["rollout_ids"])
    view = RankView(
        rank=rank,
        partition=partition,
        micro_batch_indices=indices,
        num_microbatches=(len(sizes),),
        global_batch_sizes=(samples,),
        digest=hashlib.sha256(name.encode()).hexdigest(),
    )
    return RankBatch(
        batch_id=0,
        plan=view,
        columns=take_columns(columns, partition),
        step_units=np.array([float(samples)]),
    )


def rank_main(
    recipe: Recipe,
    model_folder: Path,
    layouts: dict[str, Layout],
    columns: dict[str, Column],
    rounds: int,
    rank: int,
    rendezvous: str,
) -> list[dict[str, Took]]:
    trainer = Trainer(
        recipe, rank=rank, world_size=RANKS, rendezvous=rendezvous, model_folder=model_folder
    )
    trainer.start_reinforcement()
    batches = {name: rank_batch(layouts[name], rank, columns, name) for name in layouts}
    names, seconds = list(layouts), []
    for number in range(rounds + 1):
        first = number % len(names)
        found = {}
        for name in names[first:] + names[:first]:
            torch.distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            trainer.train_batch(batches[name], 1e-5)
            cpu = time.process_time() - cpu
            torch.distributed.barrier()
            found[name] = Took(wall=time.perf_counter() - wall, cpu=cpu)
        seconds.append(found)
    trainer.close()
    return seconds[1:]


def child(sender: Connection, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((True, rank_main(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def run_ranks(*arguments: Any) -> list[dict[str, Took]]:
    """Run `rank_main` in forked processes; per round and plan what the slower rank took."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=child, args=(sender, (*arguments, rank, rendezvous)))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(DEADLINE_SECONDS):
                raise TimeoutError(f"rank {rank} did not answer in {DEADLINE_SECONDS:g} s")
            done, result = receiver.recv()
            if not done:
                raise RuntimeError(f"rank {rank}:\n{result}")
            results.append(result)
        return [
            {
                name: Took(
                    wall=max(found[name].wall for found in ranks_found),
                    cpu=max(found[name].cpu for found in ranks_found),
                )
                for name in ranks_found[0]
            }
            for ranks_found in zip(*results, strict=True)
        ]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()


def costliest(layout: Layout, costs: npt.NDArray[np.int64]) -> float:
    loads = [sum(int(costs[one].sum()) for one in rank) for rank in layout]
    return max(loads) * len(loads) / sum(loads)


def write(cells: list[str]) -> None:
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


def measure(setting: Setting, seed: int, folder: Path) -> None:
    recipe = recipe_of(setting, folder / f"run{seed}")
    columns = batch_of(setting, seed)
    lengths = np.asarray(columns["total_lengths"])
    cost = TransformerCost.from_hf_config(tiny_model_config(recipe.model))
    costs = np.asarray(cost(lengths)).astype(np.int64)
    layouts = {name: order(lengths, costs, setting.cap, RANKS) for name, order in ORDERS.items()}
    seconds = run_ranks(recipe, folder / "model", layouts, columns, setting.rounds)
    base = next(iter(layouts))
    for name, layout in layouts.items():
        tokens = [int(lengths[one].sum()) for rank in layout for one in rank]
        wall = [(found[name].wall, found[base].wall) for found in seconds]
        cpu = [(found[name].cpu, found[base].cpu) for found in seconds]
        predicted = costliest(layout, costs) / costliest(layouts[base], costs)
        write(
            [
                str(seed),
                name,
                str(len(layout[0])),
                f"{max(tokens) / setting.cap:.2f}",
                f"{costliest(layout, costs):.4f}",
                *(
                    f"{value:.3f}"
                    for pairs in (wall, cpu)
                    for value in (
                        statistics.median(one for one, _ in pairs),
                        statistics.median(one / other for one, other in pairs),
                    )
                ),
                f"{predicted:.3f}",
            ]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two rounds")
    setting = TINY if parser.parse_args().tiny else FULL
    header = ["seed", "order", "micro-batches", "fullest / cap", "rank max / mean"]
    header += ["wall s", "ratio", "CPU s", "ratio", "ratio of FLOPs"]
    write(header)
    write(["---"] * len(header))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", recipe_of(setting, folder).model, rng=0)
        for seed in range(setting.seeds):
            measure(setting, seed, folder)
    versions = ", ".join(
        f"{package} {metadata.version(package)}"
        for package in ("rl-schedule", "rl-runtime", "torch", "megatron-core", "numpy")
    )
    sys.stdout.write(
        f"\n{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" {versions}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
