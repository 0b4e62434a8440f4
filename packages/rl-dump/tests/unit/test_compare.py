"""Comparing: tolerances, missing values, other samples, other fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from stubs.dump_batches import Columns, Pair, ragged, taken

from rl_dump import Difference, DumpError, compare, open_dump, write_dump


def told(found: Difference | None) -> Difference:
    """Return a difference that must be there."""
    assert found is not None
    return found


class Against(Protocol):
    """Compare the batch with a changed one."""

    def __call__(
        self, changed: Columns, *, atol: float = 0.0, rtol: float = 0.0
    ) -> Difference | None: ...


@pytest.fixture
def against(tmp_path: Path, columns: Columns) -> Iterator[Against]:
    first = open_dump(
        write_dump(tmp_path / "a.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    )

    def run(changed: Columns, *, atol: float = 0.0, rtol: float = 0.0) -> Difference | None:
        with open_dump(
            write_dump(
                tmp_path / "b.parquet", contract="train-dump.v2", batch_id=0, columns=changed
            )
        ) as second:
            return compare(first, second, atol=atol, rtol=rtol)

    with first:
        yield run


def test_differences_within_the_tolerances_are_none(against: Against, columns: Columns) -> None:
    shifted = {
        **columns,
        "log_probs": ragged([item + np.float32(1e-4) for item in columns["log_probs"]], np.float32),
    }
    assert against(shifted, atol=1e-3) is None
    assert told(against(shifted, atol=1e-6)).field == "log_probs"
    assert against(shifted, rtol=1.0, atol=2e-4) is None
    whole = {
        **columns,
        "weight_versions": ragged([item + 1 for item in columns["weight_versions"]], np.int64),
    }
    assert told(against(whole, atol=100.0)).field == "weight_versions", "tolerances are for floats"


def test_nan_equals_nan_and_nothing_else(
    against: Against, columns: Columns, tmp_path: Path
) -> None:
    with_nan = {
        **columns,
        "entropy": ragged([np.full(len(item), np.nan) for item in columns["entropy"]], np.float32),
    }
    found = told(against(with_nan, atol=1e9))
    assert found.field == "entropy"
    assert found.largest["entropy"] == np.inf
    path = write_dump(
        tmp_path / "n.parquet", contract="train-dump.v2", batch_id=0, columns=with_nan
    )
    with open_dump(path) as first, open_dump(path) as second:
        assert compare(first, second) is None


def test_whole_numbers_beyond_double_precision_are_told_apart(tmp_path: Path) -> None:
    paths = [
        write_dump(
            tmp_path / f"{add}.parquet",
            contract="train-dump.v2",
            batch_id=0,
            columns={"x": np.array([2**60 + add])},
        )
        for add in (0, 1)
    ]
    with open_dump(paths[0]) as first, open_dump(paths[1]) as second:
        assert told(compare(first, second)).first == 2**60


def test_the_first_sample_wins_over_the_first_field(against: Against, columns: Columns) -> None:
    late = [item.copy() for item in columns["advantages"]]
    late[5][:] += 1
    scalar = columns["rewards"].copy()
    scalar[2] += 1
    found = told(against({**columns, "advantages": ragged(late, np.float32), "rewards": scalar}))
    assert (found.rollout_position, found.token, found.field) == (2, None, "rewards")
    assert set(found.largest) == {"advantages", "rewards"}


def test_other_lengths_missing_values_and_words_differ(against: Against, columns: Columns) -> None:
    words = [*columns["finish_reason"]]
    words[3] = "length"
    assert (
        told(against({**columns, "finish_reason": words})).message
        == "sample at rollout position 3: finish_reason is stop in the first dump, length in the"
        " second"
    )
    assert (
        told(
            against({**columns, "sample_index": [None, *columns["sample_index"][1:].tolist()]})
        ).second
        is None
    )
    assert (
        told(
            against({name: column for name, column in columns.items() if name != "entropy"})
        ).message
        == "field entropy is only in the first dump (1 fields are in one of them only); what both"
        " hold of the 24 samples in both is equal"
    )


def test_other_samples_are_the_difference(against: Against, columns: Columns) -> None:
    found = told(against(taken(columns, range(23))))
    assert (found.field, found.rollout_position) == ("rollout_position", 23)
    assert "only in the first" in found.message


def test_where_a_sample_ran_is_not_compared(tmp_path: Path, columns: Columns) -> None:
    places = {
        "step": np.zeros(24, np.int64),
        "micro_batch": np.arange(24),
        "data_parallel_rank": np.zeros(24, np.int64),
    }
    paths = [
        write_dump(
            tmp_path / f"{add}.parquet",
            contract="train-dump.v2",
            batch_id=0,
            columns={**columns, **{name: place + add for name, place in places.items()}},
        )
        for add in (0, 1)
    ]
    with open_dump(paths[0]) as first, open_dump(paths[1]) as second:
        assert compare(first, second) is None


def test_dumps_of_two_kinds_and_negative_tolerances_are_refused(pair: Pair) -> None:
    with open_dump(pair[0]) as rollout, open_dump(pair[1]) as train:
        with pytest.raises(DumpError, match="compare two of one kind"):
            compare(rollout, train)
        for wrong in (-1.0, float("inf"), float("nan")):
            with pytest.raises(DumpError, match="tolerances must be finite"):
                compare(train, train, atol=wrong)
            with pytest.raises(DumpError, match="tolerances must be finite"):
                compare(train, train, rtol=wrong)


def of_values(folder: Path, first: Any, second: Any, **tolerances: float) -> Difference | None:
    paths = [
        write_dump(
            folder / f"{name}.parquet", contract="train-dump.v2", batch_id=0, columns={"x": values}
        )
        for name, values in (("a", first), ("b", second))
    ]
    with open_dump(paths[0]) as one, open_dump(paths[1]) as other:
        there, back = compare(one, other, **tolerances), compare(other, one, **tolerances)
        assert (there is None) == (back is None)
        return there


@pytest.mark.parametrize(
    ("first", "second", "largest"),
    [
        (np.array([2**53 + 1]), np.array([2.0**53]), 1.0),
        (np.array([2**63 - 1]), np.array([2.0**63]), 1.0),
        (np.array([2**64 - 1], np.uint64), np.array([2.0**64]), 1.0),
        (np.array([2**63 - 1]), np.array([2**63], np.uint64), 1.0),
        (np.array([-1]), np.array([2**64 - 1], np.uint64), 2.0**64),
        (np.array([2**62]), np.array([2**62 + 3]), 3.0),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 2.0**64),
        (np.array([0]), np.array([0.5]), 0.5),
        (np.array([1]), np.array([np.nan]), np.inf),
        (np.array([True]), np.array([2.0]), 1.0),
    ],
)
def test_numbers_of_two_types_are_compared_as_numbers(
    tmp_path: Path, first: Any, second: Any, largest: float
) -> None:
    assert told(of_values(tmp_path, first, second)).largest["x"] == largest


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.array([2**53, -(2**63)]), np.array([2.0**53, -(2.0**63)])),
        (np.array([2**63], np.uint64), np.array([2.0**63])),
        (np.array([5], np.int8), np.array([5], np.uint64)),
        (np.array([True]), np.array([1.0])),
        (np.array([0.5, np.nan], np.float32), np.array([0.5, np.nan])),
    ],
)
def test_one_number_in_two_types_is_equal(tmp_path: Path, first: Any, second: Any) -> None:
    assert of_values(tmp_path, first, second) is None


def test_the_relative_tolerance_is_the_same_from_either_side(tmp_path: Path) -> None:
    assert of_values(tmp_path, np.array([1.0]), np.array([1.1]), rtol=0.095) is None
    assert told(of_values(tmp_path, np.array([1.0]), np.array([1.1]), rtol=0.09)).field == "x"
    assert (
        told(of_values(tmp_path, np.array([np.inf]), np.array([1.0]), atol=1, rtol=1)).field == "x"
    )


def test_what_both_hold_is_compared_even_if_the_samples_are_not_the_same(
    against: Against, columns: Columns
) -> None:
    part = taken(columns, range(4, 24))
    assert told(against(part)).message.endswith("what both hold of the 20 samples in both is equal")
    rewards = part["rewards"].copy()
    rewards[3] += 2
    found = told(against({**part, "rewards": rewards}))
    assert found.field == "rollout_position"
    assert "of the 20 samples in both: sample at rollout position 7: rewards is" in found.message
    np.testing.assert_allclose(found.largest["rewards"], 2)
    other = {**columns, "rollout_position": columns["rollout_position"] + 100}
    assert told(against(other)).message.endswith("no sample is in both")


def test_positions_that_stand_a_different_number_of_times_are_other_samples(tmp_path: Path) -> None:
    paths = [
        write_dump(
            tmp_path / f"{name}.parquet",
            contract="train-dump.v2",
            batch_id=0,
            columns={"rollout_position": np.array(positions), "x": np.arange(3)},
        )
        for name, positions in (("a", [0, 0, 1]), ("b", [0, 1, 1]))
    ]
    with open_dump(paths[0]) as first, open_dump(paths[1]) as second:
        assert "no sample is in both" in told(compare(first, second)).message
