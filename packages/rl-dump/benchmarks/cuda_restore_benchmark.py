"""Measure what a train dump costs on a GPU: extra device memory, and the time training waits.

    python packages/rl-dump/benchmarks/cuda_restore_benchmark.py [--samples 4096]

Same data as `dump_benchmark.py`, on the device. The context group is played by one rank that owns
every token: its gather allocates the restored chunk, as a real one does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from dump_benchmark import FLOATS, batch

from rl_dump import BackgroundWriter, RaggedArray, open_dump
from rl_dump.torch import (
    DumpTopology,
    restore_context_parallel_fields_to_cpu,
    save_debug_train_data,
)


def gather(
    pieces: Sequence[torch.Tensor],
    _total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    samples: Any,
) -> list[torch.Tensor]:
    del samples
    return list(torch.cat(list(pieces)).split(list(response_lengths)))  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    arguments = parser.parse_args()
    host = batch(arguments.samples)
    data = {
        name: [item.cuda() for item in column] if name in FLOATS else column
        for name, column in host.items()
    }
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {arguments.samples} samples,"
        f" {sum(data['response_lengths'])} response tokens"
    )
    for chunk_bytes in (1 << 20, 16 << 20, 64 << 20):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        restored = restore_context_parallel_fields_to_cpu(
            data, gather, keep_restored=True, chunk_bytes=chunk_bytes
        )
        seconds = time.perf_counter() - start
        extra = torch.cuda.max_memory_allocated() - before
        for name in FLOATS:
            column = restored.values[name]
            assert isinstance(column, RaggedArray)
            assert (column.values == torch.cat(host[name]).numpy()).all()
        print(
            f"chunk {chunk_bytes / 2**20:5.0f} MiB: extra device memory {extra / 2**20:7.2f} MiB,"
            f" {seconds:.3f} s for {len(FLOATS)} fields"
        )
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            start = time.perf_counter()
            with BackgroundWriter() as writer:
                path = save_debug_train_data(
                    Path(folder) / "{batch_id}.parquet",
                    batch_id=0,
                    rollout_data=data,
                    topology=DumpTopology(global_rank=0),
                    background=writer,
                )
                blocked = time.perf_counter() - start
            print(
                f"training waits {blocked:.3f} s, the file is there after"
                f" {time.perf_counter() - start:.3f} s"
            )
        assert path is not None
        with open_dump(path) as dump:
            assert dump.verify() == []


if __name__ == "__main__":
    main()
