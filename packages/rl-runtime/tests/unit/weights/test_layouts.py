"""`merge` undoes `shard`, bit for bit, for every number of ranks."""

import pytest
import torch

from rl_runtime.weights.layouts import (
    FusedGateUp,
    FusedQkv,
    Layout,
    Replicated,
    SplitColumns,
    SplitVocabulary,
)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _cases() -> list[tuple[Layout, tuple[torch.Tensor, ...]]]:
    qkv = FusedQkv(num_groups=4, heads_per_group=3, head_dim=2)
    return [
        (Replicated(), (_random(8),)),
        (SplitColumns(), (_random(6, 8),)),
        (SplitVocabulary(vocab_size=13), (_random(13, 4),)),
        (FusedGateUp(), (_random(8, 4), _random(8, 4) + 1)),
        (qkv, (_random(24, 5), _random(8, 5), _random(8, 5) + 1)),
        (qkv, (_random(24), _random(8), _random(8) + 1)),
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("layout", "tensors"), _cases())
def test_merge_undoes_shard(
    layout: Layout, tensors: tuple[torch.Tensor, ...], tp_size: int
) -> None:
    shards = [layout.shard(tensors, rank, tp_size) for rank in range(tp_size)]
    assert len({shard.shape for shard in shards}) == 1
    for merged, tensor in zip(layout.merge(shards), tensors, strict=True):
        assert torch.equal(merged, tensor)


def test_each_rank_of_a_glu_holds_its_gate_rows_then_its_up_rows() -> None:
    gate, up = torch.arange(4.0).reshape(4, 1), torch.arange(10.0, 14.0).reshape(4, 1)
    assert FusedGateUp().shard((gate, up), 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_query_key_value_are_interleaved_group_by_group() -> None:
    query, key, value = torch.arange(4.0), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    layout = FusedQkv(num_groups=2, heads_per_group=2, head_dim=1)
    assert layout.shard((query, key, value), 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.shard((query, key, value), 1, 2).tolist() == [2, 3, 11, 21]


def test_vocabulary_is_padded_with_zero_rows() -> None:
    assert SplitVocabulary(vocab_size=5).shard((torch.ones(5, 1),), 1, 2).flatten().tolist() == [
        1,
        1,
        0,
    ]
