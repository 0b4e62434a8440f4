"""Measure writing, reading, size and memory of a dump next to torch.save and torch.load, on the same data in one run.

    python packages/rl-dump/benchmarks/dump_benchmark.py [--samples 4096] [--repeat 3] [--json out.json]

Data: response lengths lognormal(6.9, 0.8) clipped to [16, 8192], prompts of 50-400 tokens, ids uniform below 151,936, seven float32 fields
from a normal distribution, an all-ones mask. Nothing of it repeats, so compression finds only what every log-prob has.
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
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import rl_dump
from rl_dump.torch import DumpTopology, save_debug_train_data, write_torch_archive

FLOATS = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "values", "entropy")


def batch(num_samples):
    rng = np.random.default_rng(0)
    responses = np.clip(np.rint(rng.lognormal(6.9, 0.8, num_samples)), 16, 8192).astype(np.int64)
    totals = responses + rng.integers(50, 401, num_samples)
    data = {
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
        data[name] = [torch.from_numpy(rng.normal(size=length).astype(np.float32)) for length in responses]
    return data


def plain_payload(data):
    names = [name for name in data if name != "partition"]
    samples = [
        {"data_parallel_rank": 0, "rollout_position": row, **{name: data[name][row] for name in names}}
        for row in range(len(data["tokens"]))
    ]
    return {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": []}


def timed(function, repeat):
    best, result = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return best, result


def one_field(path):
    with rl_dump.open_dump(path) as dump:
        return dump.column("log_probs")


def blocking(folder, data, repeat):
    """Time until training may go on, and until the file is there."""
    blocked, written = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        with rl_dump.BackgroundWriter() as writer:
            save_debug_train_data(
                folder / "ours_{batch_id}.parquet", batch_id=0, rollout_data=data, topology=DumpTopology(global_rank=0), background=writer
            )
            blocked.append(time.perf_counter() - start)
        written.append(time.perf_counter() - start)
    return min(blocked), min(written)


def _peak_of(function, *arguments):
    """Return the growth of the peak resident memory while `function` runs in a process of its own, bytes."""
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)

    def body():
        before = resident()
        function(*arguments)
        end.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        os._exit(0)

    process = context.Process(target=body)
    process.start()
    grown = pipe.recv() if pipe.poll(600) else None
    process.join()
    return grown


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def stream(path, columns):
    """Write columns that exist already, as the streaming writer does: one row group in memory."""
    rl_dump.write_dump(path, contract="train-dump.v2", batch_id=0, columns=columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = batch(arguments.samples)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs, ours, own_pt = folder / "plain.pt", folder / "ours_0.parquet", folder / "ours.pt"
        payload = plain_payload(data)
        save_seconds, _ = timed(lambda: torch.save(payload, theirs), arguments.repeat)
        blocked, written = blocking(folder, data, arguments.repeat)
        load_seconds, _ = timed(lambda: torch.load(theirs, weights_only=False), arguments.repeat)
        field_seconds, field = timed(lambda: one_field(ours), arguments.repeat)
        open_seconds, dump = timed(lambda: rl_dump.open_dump(ours), arguments.repeat)
        seconds = [timed(lambda row=row: dump.sample(row), 1)[0] for row in np.random.default_rng(1).integers(0, arguments.samples, 100)]
        dump.close()
        sample_seconds, sample_worst = float(np.median(seconds)), max(seconds)
        with rl_dump.open_dump(ours) as dump:
            columns = {column: dump.column(column) for column in dump.fields}
        write_torch_archive(own_pt, contract="train-dump.v2", batch_id=0, columns=columns)
        own_load, _ = timed(lambda: torch.load(own_pt, weights_only=False), arguments.repeat)
        pt_seconds, pt_field = timed(lambda: one_field(own_pt), arguments.repeat)
        foreign_seconds, foreign_field = timed(lambda: one_field(theirs), arguments.repeat)
        assert field == pt_field == foreign_field, "the three files must hold the same log-probs"
        grown = _peak_of(stream, folder / "memory.parquet", columns)
        sizes = {path: path.stat().st_size for path in (theirs, ours, own_pt)}
    rows = [
        ("torch.save", f"{save_seconds:.3f} s", "", ""),
        ("torch.load", f"{load_seconds:.3f} s", "", ""),
        ("blocking per dump", f"{blocked:.3f} s", f"1/{save_seconds / blocked:.1f} of torch.save", "<= 1/10"),
        ("until the file is there", f"{written:.3f} s", f"1/{save_seconds / written:.1f} of torch.save", ""),
        ("open + one field, .parquet", f"{field_seconds * 1e3:.1f} ms", f"1/{load_seconds / field_seconds:.0f} of torch.load", "<= 1/50"),
        ("open", f"{open_seconds * 1e3:.2f} ms", "", ""),
        ("read one sample", f"{sample_seconds * 1e3:.2f} ms median, {sample_worst * 1e3:.2f} ms worst of 100", "", "< 10 ms"),
        ("open + one field, our .pt, no torch", f"{pt_seconds * 1e3:.1f} ms", f"1/{load_seconds / pt_seconds:.1f} of torch.load", "<= 1/5"),
        ("torch.load of our .pt", f"{own_load:.3f} s", "", ""),
        (
            "open + one field, plain .pt, no torch",
            f"{foreign_seconds * 1e3:.1f} ms",
            f"1/{load_seconds / foreign_seconds:.1f} of torch.load",
            "",
        ),
        ("file size", f"{sizes[ours] / 1e6:.1f} MB", f"{sizes[ours] / sizes[theirs]:.3f} of {sizes[theirs] / 1e6:.1f} MB", "<= 0.75"),
        ("writer's extra memory", f"{grown / 1e6:.1f} MB", "", "one shard"),
    ]
    print(
        f"{dt.datetime.now(tz=dt.timezone.utc):%Y-%m-%d}, {platform.machine()} {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, pyarrow {pa.__version__}; {arguments.samples} samples, {int(field.offsets[-1])} response tokens"
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
