"""Joining survives reordering, drops, fan-out, missing ids, removals, and never guesses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs.dump_batches import Columns, ragged

from rl_dump import join, open_dump, write_dump

Scenario = tuple[list[list[int]], list[int | None], list[list[int]], bool, bool]
"""Tokens and index of each sample; rows of either dump; do they have positions; and indices?"""


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Samples with some equal tokens; for either dump its rows, their order, the ids it lacks."""
    count = draw(st.integers(1, 8))
    tokens = draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=count, max_size=count
        )
    )
    indices = draw(
        st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=count, max_size=count)
    )
    sides = []
    for _ in range(2):
        rows = draw(st.permutations(range(count)))
        sides.append(rows[: draw(st.integers(0, count))])
    return tokens, indices, sides, draw(st.booleans()), draw(st.booleans())


def dumps(folder: Path, scenario: Scenario) -> list[Path]:
    tokens, indices, (rollout_rows, train_rows), positions, with_indices = scenario
    paths = []
    for contract, rows in (("rollout-dump.v1", rollout_rows), ("train-dump.v2", train_rows)):
        columns: Columns = {
            "tokens": ragged([tokens[row] for row in rows], np.int64),
            "truth": np.array(rows, np.int64),
        }
        if positions:
            columns["rollout_position"] = np.array(rows, np.int64)
        if with_indices:
            columns["sample_index"] = [indices[row] for row in rows]
        paths.append(
            write_dump(
                folder / f"{contract}.parquet", contract=contract, batch_id=0, columns=columns
            )
        )
    return paths


@settings(max_examples=40)
@given(scenarios())
def test_every_row_is_in_one_pair_or_one_missing_entry_and_pairs_have_equal_tokens(
    scenario: Scenario,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = dumps(Path(name), scenario)
        with open_dump(paths[0]) as rollout, open_dump(paths[1]) as train:
            result = join(rollout, train)
            assert sorted(
                [pair.rollout_row for pair in result.pairs]
                + [entry.row for entry in result.missing_in_train]
            ) == list(range(rollout.num_samples))
            assert sorted(
                [pair.train_row for pair in result.pairs]
                + [entry.row for entry in result.missing_in_rollout]
            ) == list(range(train.num_samples))
            for pair in result.pairs:
                assert (
                    rollout.column("tokens")[pair.rollout_row].tolist()
                    == train.column("tokens")[pair.train_row].tolist()
                )
            assert all(
                entry.reason for entry in (*result.missing_in_rollout, *result.missing_in_train)
            )


@settings(max_examples=40)
@given(scenarios(), st.randoms(use_true_random=False))
def test_pairs_do_not_depend_on_the_order_of_rows(scenario: Scenario, random: Random) -> None:
    tokens, indices, (rollout_rows, train_rows), _, with_indices = scenario
    pairs = []
    for shuffle in (False, True):
        left, right = list(rollout_rows), list(train_rows)
        if shuffle:
            random.shuffle(left)
            random.shuffle(right)
        with tempfile.TemporaryDirectory() as name:
            paths = dumps(Path(name), (tokens, indices, [left, right], True, with_indices))
            with open_dump(paths[0]) as rollout, open_dump(paths[1]) as train:
                pairs.append(
                    {
                        (left[pair.rollout_row], right[pair.train_row])
                        for pair in join(rollout, train).pairs
                    }
                )
    assert pairs[0] == pairs[1]


@settings(max_examples=40)
@given(scenarios())
def test_with_positions_every_common_sample_is_found_and_no_other(scenario: Scenario) -> None:
    tokens, indices, sides, _, with_indices = scenario
    with tempfile.TemporaryDirectory() as name:
        paths = dumps(Path(name), (tokens, indices, sides, True, with_indices))
        with open_dump(paths[0]) as rollout, open_dump(paths[1]) as train:
            result = join(rollout, train)
            common = set(sides[0]) & set(sides[1])
            by_position = {
                sides[1][pair.train_row] for pair in result.pairs if pair.method == "position"
            }
            assert by_position == common
