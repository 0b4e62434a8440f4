"""Summaries: literal numbers, trained tokens only, and the order of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stubs.dump_batches import Columns, Pair, ragged, write_pair

from rl_dump import Dump, DumpError, FieldSummary, doctor, open_dump, summary, trend, write_dump
from rl_dump.tools.token_statistics import log_prob_gap, nucleus_sizes


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Dump]:
    columns: Columns = {
        "response_lengths": np.array([2, 2]),
        "loss_masks": ragged([[1, 0], [1, 1]], np.int32),
        "log_probs": ragged([[-1, 99], [-3, np.nan]], np.float32),
        "rollout_log_probs": ragged([[-1.5, 0], [-3, -2]], np.float32),
        "nucleus_offsets": ragged([[0, 3, 4], [0, 0, 2]], np.int64),
        "rewards": np.array([1.0, -1.0]),
        "sample_index": [None, 4],
        "teacher_log_probs": [None, np.array([1.0, 2.0], np.float32)],
    }
    with open_dump(
        write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    ) as dump:
        yield dump


def field(dump: Dump, name: str) -> FieldSummary:
    found = summary(dump).field(name)
    assert found is not None
    return found


def test_per_token_fields_are_summarised_over_trained_tokens(small: Dump) -> None:
    found = field(small, "log_probs")
    assert (found.count, found.minimum, found.maximum, found.mean, found.num_non_finite) == (
        3,
        -3.0,
        -1.0,
        -2.0,
        1,
    )
    assert field(small, "loss_masks").mean == 0.75


def test_missing_values_are_counted(small: Dump) -> None:
    assert field(small, "sample_index").num_missing == 1
    found = field(small, "teacher_log_probs")
    assert (found.num_missing, found.mean) == (1, 1.5)


def test_the_mean_of_large_numbers_is_finite_though_their_sum_is_not(tmp_path: Path) -> None:
    columns: Columns = {
        "x": np.full(8, 1.7e308),
        "y": np.array([np.inf] + [1.0] * 7),
        "n": np.full(8, 2**63 - 1),
    }
    with open_dump(
        write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    ) as dump:
        assert field(dump, "x").mean == pytest.approx(1.7e308, rel=1e-12)
        assert field(dump, "y").mean == 1.0


def test_log_probs_that_are_not_one_number_per_token_have_no_gap(tmp_path: Path) -> None:
    columns: Columns = {
        "response_lengths": np.array([2]),
        **dict.fromkeys(("log_probs", "rollout_log_probs"), ragged([np.zeros((2, 1))], np.float32)),
    }
    with open_dump(
        write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    ) as dump:
        assert log_prob_gap(dump) is None
        assert doctor(dump) == []


def test_the_gap_and_the_kept_sets_are_derived(small: Dump) -> None:
    gap, sizes = log_prob_gap(small), nucleus_sizes(small)
    assert gap is not None
    assert sizes is not None
    assert gap[0].tolist() == [0.5, 0.0], "an untrained token has no gap"
    assert [item.tolist() for item in sizes] == [[3, 1], [0, 2]]
    assert field(small, "log_prob_gap").mean == 0.25
    assert field(small, "kept_set_size").mean == pytest.approx(5 / 3)


def test_an_empty_dump_has_no_means(tmp_path: Path) -> None:
    path = write_dump(
        tmp_path / "x.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns={"rewards": np.zeros(0)},
    )
    with open_dump(path) as dump:
        assert field(dump, "rewards").mean is None


def test_trend_sorts_by_batch_numbers_first(tmp_path: Path) -> None:
    paths = [write_pair(tmp_path, 4, batch_id=batch)[1] for batch in (10, "eval_1", 2)]
    assert [batch.batch_id for batch in trend(paths)] == [2, 10, "eval_1"]


def test_trend_over_two_kinds_is_refused(pair: Pair) -> None:
    with pytest.raises(DumpError, match="different contracts"):
        trend(pair)
