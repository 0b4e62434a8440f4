"""Measure writing, reading, size and memory of a dump next to torch.save and torch.load.

    python packages/rl-dump/benchmarks/dump_benchmark.py [--samples 4096] [--rounds 5] [--json
    out.json]

All on the same data in one run: response lengths lognormal(6.9, 0.8) clipped to [16, 8192], prompts
of 50-400 tokens, ids uniform below 151,936, seven float32 fields from a normal distribution, an
all-ones mask. Nothing of it repeats, so compression finds only what every log-prob has.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import rl_dump
from rl_dump.torch import DumpTopology, save_debug_train_data, write_torch_archive

FLOATS = (
    "rollout_log_probs",
    "log_probs",
    "ref_log_probs",
    "advantages",
    "returns",
    "values",
    "entropy",
)


def batch(num_samples: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    responses = np.clip(np.rint(rng.lognormal(6.9, 0.8, num_samples)), 16, 8192).astype(np.int64)
    totals = responses + rng.integers(50, 401, num_samples)
    data: dict[str, Any] = {
        "tokens": [torch.from_numpy(rng.integers(0, 151_936, length)) for length in totals],
        "loss_masks": [torch.ones(length, dtype=torch.int32) for length in responses],
        "total_lengths": totals.tolist(),
        "response_lengths": responses.tolist(),
        "rewards": rng.normal(size=num_samples).tolist(),
        "rollout_ids": list(range(num_samples)),
        "truncated": [False] * num_samples,
        "partition": list(range(num_samples)),
    }
    for name in FLOATS:
        data[name] = [
            torch.from_numpy(rng.normal(size=length).astype(np.float32)) for length in responses
        ]
    return data


def plain_payload(data: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in data if name != "partition"]
    samples = [
        {
            "data_parallel_rank": 0,
            "rollout_position": row,
            **{name: data[name][row] for name in names},
        }
        for row in range(len(data["tokens"]))
    ]
    return {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": []}


def interleaved(actions: Mapping[str, Callable[[], float | None]], rounds: int) -> dict[str, float]:
    """Return each action's shortest time, seconds.

    They take turns, so that a busy machine is busy for all of them.
    """
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.perf_counter()
            seconds = action()
            best[name] = min(
                best[name], time.perf_counter() - start if seconds is None else seconds
            )
    return best


def quietly(function: Callable[..., object], *arguments: Any, **options: Any) -> Callable[[], None]:
    """Return an action that runs a function and gives no time of its own."""

    def action() -> None:
        function(*arguments, **options)

    return action


def one_field(path: Path) -> rl_dump.RaggedArray:
    with rl_dump.open_dump(path) as dump:
        values = dump.column("log_probs")
        assert isinstance(values, rl_dump.RaggedArray)
        return values


def blocking(folder: Path, data: Mapping[str, Any]) -> float:
    """Return the seconds until training may go on.

    The file is written before this returns, outside of the time.
    """
    with rl_dump.BackgroundWriter() as writer:
        start = time.perf_counter()
        save_debug_train_data(
            folder / "ours_{batch_id}.parquet",
            batch_id=0,
            rollout_data=data,
            topology=DumpTopology(global_rank=0),
            background=writer,
        )
        return time.perf_counter() - start


def _peak_of(function: Callable[..., object], *arguments: Any) -> int:
    """Return the growth in bytes of the peak resident memory while `function` runs.

    It runs in a process of its own.
    """
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)

    def body() -> None:
        before = resident()
        function(*arguments)
        end.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    assert pipe.poll(600), "the measured process does not answer"
    grown = pipe.recv()
    process.join()
    return int(grown)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stream(path: Path, columns: Mapping[str, Any]) -> None:
    """Write columns that exist already, as the streaming writer does: one row group in memory."""
    rl_dump.write_dump(path, contract="train-dump.v2", batch_id=0, columns=columns)


def table(
    best: Mapping[str, float], sizes: Mapping[str, int], grown: int, chosen: list[int]
) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: measure, figure, beside torch, target."""
    samples = sorted(best[f"sample {row}"] for row in chosen)
    save, load = best["save"], best["load"]
    return [
        ("torch.save", f"{save:.3f} s", "", ""),
        ("torch.load", f"{load:.3f} s", "", ""),
        (
            "blocking per dump",
            f"{best['blocking']:.3f} s",
            f"1/{save / best['blocking']:.1f} of torch.save",
            "<= 1/10",
        ),
        (
            "writing, in the background",
            f"{best['write']:.3f} s",
            f"1/{save / best['write']:.1f} of torch.save",
            "",
        ),
        (
            "open + one field, .parquet",
            f"{best['field'] * 1e3:.1f} ms",
            f"1/{load / best['field']:.0f} of torch.load",
            "<= 1/50",
        ),
        ("open", f"{best['open'] * 1e3:.2f} ms", "", ""),
        (
            "read one sample",
            f"{samples[10] * 1e3:.2f} ms median, {samples[-1] * 1e3:.2f} ms slowest of 20",
            "",
            "< 10 ms",
        ),
        (
            "open + one field, our .pt, no torch",
            f"{best['pt field'] * 1e3:.0f} ms",
            f"1/{load / best['pt field']:.1f} of torch.load",
            "<= 1/5",
        ),
        ("torch.load of our .pt", f"{best['pt load']:.3f} s", "", ""),
        (
            "open + one field, plain .pt, no torch",
            f"{best['plain pt field'] * 1e3:.0f} ms",
            f"1/{load / best['plain pt field']:.1f} of torch.load",
            "",
        ),
        (
            "file size",
            f"{sizes['ours'] / 1e6:.1f} MB",
            f"{sizes['ours'] / sizes['theirs']:.3f} of {sizes['theirs'] / 1e6:.1f} MB",
            "<= 0.75",
        ),
        (
            "writer's extra memory",
            f"{grown / 1e6:.1f} MB",
            f"one shard is {sizes['theirs'] / 1e6:.0f} MB",
            "one shard",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="24 samples, one round")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.samples, arguments.rounds = 24, 1
    torch.set_num_threads(1)
    data = batch(arguments.samples)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs, ours, own_pt = folder / "plain.pt", folder / "ours_0.parquet", folder / "ours.pt"
        payload = plain_payload(data)
        torch.save(payload, theirs)
        blocking(folder, data)
        dump = rl_dump.open_dump(ours)
        columns = {column: dump.column(column) for column in dump.fields}
        write_torch_archive(own_pt, contract="train-dump.v2", batch_id=0, columns=columns)
        # Before the rounds: memory that they gave back would be used again, and hide or blow up
        # what the writer takes.
        grown = _peak_of(stream, folder / "memory.parquet", columns)
        field = one_field(ours)
        assert field == one_field(own_pt) == one_field(theirs), (
            "the three files must hold the same log-probs"
        )
        chosen = np.random.default_rng(1).integers(0, arguments.samples, 20).tolist()
        best = interleaved(
            {
                "save": quietly(torch.save, payload, theirs),
                "blocking": lambda: blocking(folder, data),
                "write": quietly(
                    rl_dump.write_dump,
                    folder / "w.parquet",
                    contract="train-dump.v2",
                    batch_id=0,
                    columns=columns,
                ),
                "load": quietly(torch.load, theirs, weights_only=False),
                "field": quietly(one_field, ours),
                "open": quietly(rl_dump.open_dump, ours),
                "pt field": quietly(one_field, own_pt),
                "pt load": quietly(torch.load, own_pt, weights_only=False),
                "plain pt field": quietly(one_field, theirs),
                **{f"sample {row}": quietly(dump.sample, row) for row in chosen},
            },
            arguments.rounds,
        )
        dump.close()
        sizes = {"ours": ours.stat().st_size, "theirs": theirs.stat().st_size}
    rows = table(best, sizes, grown, chosen)
    print(
        f"load {os.getloadavg()[0]:.1f}; {dt.datetime.now(tz=dt.timezone.utc):%Y-%m-%d},"
        f" {platform.machine()} {os.cpu_count()} cores, Python {platform.python_version()}, torch"
        f" {torch.__version__}, pyarrow {pa.__version__}; {arguments.samples} samples,"
        f" {int(field.offsets[-1])} response tokens, best of {arguments.rounds} rounds"
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
