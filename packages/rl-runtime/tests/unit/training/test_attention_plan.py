"""Every query sees exactly the tokens of its own sequence up to its own position."""

import itertools

import numpy as np
import pytest

from rl_runtime.megatron.attention_plan import plan_attention


def _global_rows(lengths: list[int], cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """(sequence, position) of every local row, by the definition of the zigzag layout."""
    rows: list[tuple[int, int]] = []
    for sequence, length in enumerate(lengths):
        chunk = length // (2 * cp_size) if cp_size > 1 else length
        chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        rows += [(sequence, index * chunk + offset) for index in chunks for offset in range(chunk)]
    return rows


LENGTHS = ([4], [8, 4, 12], [16, 4, 4, 32, 8], [4] * 9)


@pytest.mark.parametrize(("lengths", "cp_size"), list(itertools.product(LENGTHS, (1, 2))))
def test_queries_see_their_sequence_up_to_themselves(lengths: list[int], cp_size: int) -> None:
    gathered = [row for rank in range(cp_size) for row in _global_rows(lengths, cp_size, rank)]
    for cp_rank in range(cp_size):
        mine = _global_rows(lengths, cp_size, cp_rank)
        plan = plan_attention(lengths, cp_size=cp_size, cp_rank=cp_rank)
        seen = {}
        for segment in plan.segments:
            for offset in range(segment.num_queries):
                visible = segment.keys[: segment.keys.size - segment.num_queries + offset + 1]
                seen[segment.first_query + offset] = [gathered[key] for key in visible]
        assert sorted(seen) == list(range(len(mine)))
        for row, (sequence, position) in enumerate(mine):
            assert seen[row] == [(sequence, earlier) for earlier in range(position + 1)]


@pytest.mark.parametrize(("lengths", "cp_size"), list(itertools.product(LENGTHS, (1, 2))))
def test_buckets_say_the_same_as_segments(lengths: list[int], cp_size: int) -> None:
    plan = plan_attention(lengths, cp_size=cp_size, cp_rank=cp_size - 1)
    flat = []
    for bucket in plan.buckets:
        for queries, keys, index in zip(
            bucket.query_rows, bucket.key_rows, range(len(bucket.query_rows)), strict=True
        ):
            for place, row in enumerate(queries):
                visible = (
                    np.arange(keys.size) <= place
                    if bucket.visible is None
                    else bucket.visible[index, place]
                )
                flat.append((int(row), keys[visible].tolist()))
    by_row = {row: flat[place] for row, place in enumerate(plan.restore)}
    for segment in plan.segments:
        for offset in range(segment.num_queries):
            row = segment.first_query + offset
            visible = segment.keys[: segment.keys.size - segment.num_queries + offset + 1]
            assert by_row[row] == (row, visible.tolist())


def test_padding_of_dense_calls_is_bounded() -> None:
    lengths = list(range(1, 400))
    plan = plan_attention(lengths, cp_size=1, cp_rank=0)
    scores = sum(
        bucket.query_rows.shape[1] ** 2 * len(bucket.query_rows) for bucket in plan.buckets
    )
    assert scores <= 1.42 * sum(length**2 for length in lengths)
    assert len(plan.buckets) <= 4 * np.log2(400) + 1
