"""What a micro-batch holds, on sequences small enough to write down."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_dump import RaggedArray
from rl_runtime.batch.rank_batch import Column
from rl_runtime.errors import TrainerError
from rl_runtime.megatron.parallel_state import Topology
from rl_runtime.megatron.shape import ModelShape
from rl_runtime.training.micro_batch import MicroBatchPacker

SHAPE = ModelShape.from_hf_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
)


def _packer(
    *, size: int = 1, rank: int = 0, tp_size: int = 1, use_nucleus: bool = True
) -> MicroBatchPacker:
    groups: dict[str, Any] = dict.fromkeys(
        ("tp_group", "cp_group", "dp_group", "dp_cp_group", "pp_group", "shard_group")
    )
    topology = Topology(
        rank=rank,
        world_size=size * tp_size,
        tp_rank=0,
        tp_size=tp_size,
        cp_rank=rank,
        cp_size=size,
        dp_rank=0,
        dp_size=1,
        pp_rank=0,
        pp_size=1,
        device=torch.device("cpu"),
        **groups,
    )
    return MicroBatchPacker(SHAPE, topology, dtype=torch.float32, use_nucleus=use_nucleus)


COLUMNS: dict[str, Column] = {
    "tokens": RaggedArray.from_list([[1, 2, 3, 4, 5], [6, 7, 8]], np.int64),
    "loss_masks": RaggedArray.from_list([[1, 0], [1]], np.int32),
    "rollout_log_probs": RaggedArray.from_list([[-0.5, -0.25], [-1.0]], np.float32),
    "loss_denominators": np.array([2, 2], np.float32),
    "nucleus_ids": RaggedArray.from_list([[4, 9, 5], [8]], np.int32),
    "nucleus_offsets": RaggedArray.from_list([[0, 2, 3], [0, 1]], np.int64),
    "nucleus_status": RaggedArray.from_list([[0, 0], [0]], np.uint8),
}


def test_one_rank_holds_sequences_end_to_end_padded_to_even_lengths() -> None:
    micro_batch = _packer().pack(COLUMNS, np.array([1, 0]))
    assert micro_batch.tokens_1T.tolist() == [[6, 7, 8, 0, 1, 2, 3, 4, 5, 0]]
    assert micro_batch.positions_1T.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 4, 0]]
    assert micro_batch.stream.cu_seqlens_q.tolist() == [0, 4, 10]
    # token 8 is predicted by the row of 7; tokens 4 and 5 by the rows of 3 and 4
    assert micro_batch.rows_K.tolist() == [1, 6, 7]
    assert micro_batch.targets_K.tolist() == [8, 4, 5]
    assert micro_batch.trained_K.tolist() == [True, True, False]
    assert micro_batch.fields["rollout_log_probs"].tolist() == [-1.0, -0.5, -0.25]
    assert [ids.tolist() for ids in micro_batch.nucleus] == [[8], [4, 9], [5]]
    assert micro_batch.counts.tolist() == [1, 2]
    assert micro_batch.num_trained_tokens == 2


def test_two_ranks_share_each_sequence_in_zigzag_and_split_its_response() -> None:
    first, second = (_packer(size=2, rank=rank).pack(COLUMNS, np.array([0])) for rank in range(2))
    # 5 tokens are padded to 8: chunks of 2; rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2
    assert first.tokens_1T.tolist() == [[1, 2, 0, 0]]
    assert second.tokens_1T.tolist() == [[3, 4, 5, 0]]
    assert first.targets_K.numel() == 0
    assert second.targets_K.tolist() == [4, 5]
    assert second.rows_K.tolist() == [0, 1]
    assert first.num_trained_tokens == second.num_trained_tokens == 1


def test_the_tail_is_padded_to_what_tensor_parallelism_needs() -> None:
    micro_batch = _packer(tp_size=4).pack(COLUMNS, np.array([0]))
    assert micro_batch.tokens_1T.shape == (1, 8)
    assert micro_batch.stream.cu_seqlens_q.tolist() == [0, 6, 8]


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (2, 2)])
def test_a_filler_is_padding_without_samples(size: int, tp_size: int) -> None:
    micro_batch = _packer(size=size, tp_size=tp_size).pack(COLUMNS, np.zeros(0, np.int64))
    assert micro_batch.tokens_1T.tolist() == [[0] * (2 * tp_size)]
    assert micro_batch.targets_K.numel() == micro_batch.num_trained_tokens == 0


def test_without_replay_log_probs_are_over_the_vocabulary() -> None:
    micro_batch = _packer(use_nucleus=False).pack(COLUMNS, np.array([0]))
    assert micro_batch.nucleus.status.tolist() == [1, 1]


@pytest.mark.parametrize("status", [2, 3])
def test_a_trained_token_without_a_log_prob_is_named(status: int) -> None:
    ids, offsets = ([], [0, 0]) if status == 2 else ([8], [0, 1])
    lost: dict[str, Column] = {
        **COLUMNS,
        "nucleus_ids": RaggedArray.from_list([[4, 9, 5], ids], np.int32),
        "nucleus_offsets": RaggedArray.from_list([[0, 2, 3], offsets], np.int64),
        "nucleus_status": RaggedArray.from_list([[0, 0], [status]], np.uint8),
    }
    with pytest.raises(
        TrainerError,
        match=rf"sample 1 of this rank: response token 0 is trained.*status {status}.*loss mask 0",
    ):
        _packer().pack(lost, np.array([0, 1]))
    assert _packer(use_nucleus=False).pack(lost, np.array([0, 1])).num_trained_tokens == 2
    masked = {**lost, "loss_masks": RaggedArray.from_list([[1, 0], [0]], np.int32)}
    assert _packer().pack(masked, np.array([0, 1])).num_trained_tokens == 1
