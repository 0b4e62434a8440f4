"""The examples of one step of the warm start, and how their losses become one number.

The loss is the mean over trained tokens, of all ranks; see `objective.sft_objective`.

Invariants: the result does not depend on how examples are spread over ranks and micro-batches;
every rank runs the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rl_dump import RaggedArray
from rl_metrics import Aggregation
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.training.micro_batch import MicroBatch, MicroBatchPacker

__all__ = ["pack_examples", "sft_aggregation"]


def sft_aggregation(*, per_token: bool) -> Aggregation:
    """Name the aggregation that is a token mean under the way the model normalises its loss.

    Megatron-Core fixes at construction whether it divides by tokens itself. Where it does not, the
    number of trained tokens is the constant divisor.
    """
    return "token_mean" if per_token else "constant"


def pack_examples(
    columns: Mapping[str, Column], token_cap: int, packer: MicroBatchPacker, topology: Topology
) -> tuple[list[MicroBatch], int]:
    """Pack this rank's examples, in order, under the token cap.

    Args:
        columns: `tokens` [L] and `loss_masks` [R] per example; the R last tokens are the response.
        token_cap: tokens of one micro-batch; a longer example is alone.
        packer: how to pack.
        topology: this rank's place.

    Returns:
        Micro-batches, as many on every rank, and the trained tokens of all ranks.

    Raises:
        TrainerError: no token of any rank is trained.
    """
    tokens, masks = columns["tokens"], columns["loss_masks"]
    assert isinstance(tokens, RaggedArray) and isinstance(masks, RaggedArray)
    indices = _in_order(tokens.lengths, token_cap)
    count = torch.tensor(len(indices), device=topology.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=topology.dp_group)
    trained = torch.tensor(int(masks.values.sum()), device=topology.device)
    dist.all_reduce(trained, group=topology.dp_group)
    if not int(trained):
        raise TrainerError("no token of this step is trained: every loss mask is 0")
    # Fillers: a rank with fewer micro-batches would leave the others waiting in their collectives.
    indices += [np.zeros(0, np.int64)] * (int(count) - len(indices))
    return [packer.pack(columns, samples) for samples in indices], int(trained)


def _in_order(lengths: npt.NDArray[np.int64], token_cap: int) -> list[npt.NDArray[np.int64]]:
    """Cut positions into consecutive runs of at most `token_cap` tokens.

    Lengths [3, 3, 5] and cap 6: [0, 1], [2].
    """
    runs: list[list[int]] = []
    room = 0
    for position, length in enumerate(lengths.tolist()):
        if length > room or not runs:
            runs.append([])
            room = token_cap
        runs[-1].append(position)
        room -= length
    return [np.array(run, np.int64) for run in runs]
