"""Training gives the same bits with the dump on and off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from stubs.dump_batches import batch, items_of, placed
from stubs.dump_layouts import cut, gatherer, trainer_shard
from stubs.dump_processes import run_ranks

from rl_dump import (
    BackgroundWriter,
    open_dump,
)
from rl_dump.torch import (
    DumpTopology,
    LogProbCapture,
    save_debug_train_data,
)

pytestmark = pytest.mark.distributed


def training(rank: int, folder: Path, dumping: bool) -> tuple[list[bytes], bytes]:
    """Train a small policy on two batches under DP 2 x CP 2; return every number it produced."""
    dp_rank, cp_rank = divmod(rank, 2)
    cp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shard_group = dist.new_group([0, 2])
    topology = DumpTopology(
        global_rank=rank,
        dp_rank=dp_rank,
        dp_size=2,
        cp_rank=cp_rank,
        cp_size=2,
        shard_group=shard_group if cp_rank == 0 else None,
        deadline_seconds=20,
    )
    gather, _ = gatherer(cp_rank, 2, cp_groups[dp_rank])
    weight = torch.randn(46, 46, generator=torch.Generator().manual_seed(1)).requires_grad_()
    numbers = []
    with BackgroundWriter() as writer:
        for batch_id in range(2):
            columns, shards = placed(batch(12, seed=batch_id))
            data = trainer_shard(columns, shards[dp_rank], cp_rank, 2)
            del data["log_probs"]
            with LogProbCapture(enabled=dumping) as capture:
                for indices in data["micro_batch_indices"]:
                    loss = torch.zeros(())
                    for index in indices:
                        tokens = data["tokens"][index]
                        start = len(tokens) - data["response_lengths"][index]
                        scores = (
                            torch.log_softmax(weight[tokens[:-1]], -1)
                            .gather(1, tokens[1:, None])
                            .squeeze(1)[start - 1 :]
                        )
                        mine = cut(scores, len(tokens), cp_rank, 2)
                        capture.record(data["partition"][index], mine)
                        loss = loss - (mine * data["advantages"][index]).sum()
                    torch.autograd.backward(loss)
                    assert weight.grad is not None
                    dist.all_reduce(weight.grad)
                    with torch.no_grad():
                        weight -= 1e-2 * weight.grad
                    weight.grad = None
                    numbers.append(loss.detach().numpy().tobytes())
                if dumping:
                    data["log_probs"] = capture.collect(data["partition"])
                    save_debug_train_data(
                        folder / "t_{batch_id}.parquet",
                        batch_id=batch_id,
                        rollout_data=data,
                        topology=topology,
                        gather_tensor=gather,
                        background=writer,
                    )
    return numbers, weight.detach().numpy().tobytes()


def test_training_is_the_same_bits_with_the_dump_on_and_off(tmp_path: Path) -> None:
    on, off = run_ranks(training, 4, tmp_path, True), run_ranks(training, 4, tmp_path, False)
    assert on == off
    assert len({number for numbers, _ in on for number in numbers}) > 4
    with open_dump(tmp_path / "t_1.parquet") as dump:
        assert np.isfinite(items_of(dump, "log_probs").values).all()
        assert dump.verify() == []
