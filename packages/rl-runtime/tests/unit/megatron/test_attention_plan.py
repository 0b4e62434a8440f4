"""Every query sees exactly the tokens of its own sequence up to its own position."""

import itertools

import numpy as np
import pytest

from rl_runtime.megatron.attention_plan import AttentionPlan, plan_attention


def _global_rows(lengths: list[int], cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """(sequence, position) of every local row, by the definition of the zigzag layout."""
    rows: list[tuple[int, int]] = []
    for sequence, length in enumerate(lengths):
        chunk = length // (2 * cp_size) if cp_size > 1 else length
        chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        rows += [(sequence, index * chunk + offset) for index in chunks for offset in range(chunk)]
    return rows


LENGTHS = ([4], [8, 4, 12], [16, 4, 4, 32, 8], [4] * 9)


def _seen_by_segments(plan: AttentionPlan) -> dict[int, list[int]]:
    """For every local row, the keys that its segment lets it see."""
    ends = np.cumsum(plan.num_keys_S)
    seen: dict[int, list[int]] = {}
    for queries, keys, end in zip(plan.num_queries_S, plan.num_keys_S, ends, strict=True):
        rows = plan.key_rows[end - keys : end]
        for offset in range(queries):
            seen[len(seen)] = rows[: keys - queries + offset + 1].tolist()
    return seen


@pytest.mark.parametrize(("lengths", "cp_size"), list(itertools.product(LENGTHS, (1, 2))))
def test_queries_see_their_sequence_up_to_themselves(lengths: list[int], cp_size: int) -> None:
    gathered = [row for rank in range(cp_size) for row in _global_rows(lengths, cp_size, rank)]
    for cp_rank in range(cp_size):
        mine = _global_rows(lengths, cp_size, cp_rank)
        seen = _seen_by_segments(plan_attention(lengths, cp_size=cp_size, cp_rank=cp_rank))
        assert sorted(seen) == list(range(len(mine)))
        for row, (sequence, position) in enumerate(mine):
            assert [gathered[key] for key in seen[row]] == [
                (sequence, earlier) for earlier in range(position + 1)
            ]


@pytest.mark.parametrize(("lengths", "cp_size"), list(itertools.product(LENGTHS, (1, 2))))
def test_dense_calls_say_the_same_as_segments(lengths: list[int], cp_size: int) -> None:
    plan = plan_attention(lengths, cp_size=cp_size, cp_rank=cp_size - 1)
    flat = []
    for query_rows, key_rows, visible in plan.dense_calls:
        for index, (queries, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
            for place, row in enumerate(queries):
                sees = np.arange(keys.size) <= place if visible is None else visible[index, place]
                flat.append((int(row), keys[sees].tolist()))
    by_row = {row: flat[place] for row, place in enumerate(plan.restore_T)}
    for row, keys in _seen_by_segments(plan).items():
        assert by_row[row] == (row, keys)


def test_padding_of_dense_calls_is_bounded() -> None:
    lengths = list(range(1, 400))
    plan = plan_attention(lengths, cp_size=1, cp_rank=0)
    scores = sum(rows.shape[1] ** 2 * len(rows) for rows, _, _ in plan.dense_calls)
    assert scores <= 1.42 * sum(length**2 for length in lengths)
    assert len(plan.dense_calls) <= 4 * np.log2(400) + 1
