"""Comparing: nothing differs from itself, and one changed value is found where it is."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs.dump_batches import Columns, batch, ragged, taken

from rl_dump import Dump, compare, open_dump, write_dump


def written(folder: Path, name: str, columns: Columns) -> Dump:
    return open_dump(
        write_dump(
            folder / f"{name}.parquet", contract="train-dump.v2", batch_id=0, columns=columns
        )
    )


@settings(max_examples=25)
@given(st.integers(0, 50), st.randoms(use_true_random=False))
def test_a_batch_equals_itself_in_any_order(seed: int, random: Random) -> None:
    columns = batch(7, seed=seed)
    order = list(range(7))
    random.shuffle(order)
    with (
        tempfile.TemporaryDirectory() as name,
        written(Path(name), "a", columns) as first,
        written(Path(name), "b", taken(columns, order)) as second,
    ):
        assert compare(first, second) is None
        assert compare(first, first) is None


@settings(max_examples=40)
@given(st.integers(0, 20), st.data())
def test_one_changed_value_is_found_where_it_is_from_either_side(
    seed: int, data: st.DataObject
) -> None:
    columns = batch(6, seed=seed)
    name = data.draw(
        st.sampled_from(["tokens", "log_probs", "advantages", "loss_masks", "weight_versions"])
    )
    long_enough = [row for row in range(6) if len(columns[name][row])]
    if not long_enough:
        return
    row = data.draw(st.sampled_from(long_enough))
    token = data.draw(st.integers(0, len(columns[name][row]) - 1))
    items = [item.copy() for item in columns[name]]
    items[row][token] += 1
    changed = {**columns, name: ragged(items, columns[name].dtype)}
    with (
        tempfile.TemporaryDirectory() as folder,
        written(Path(folder), "a", columns) as first,
        written(Path(folder), "b", changed) as second,
    ):
        there, back = compare(first, second), compare(second, first)
        assert there is not None
        assert back is not None
        assert (
            (there.rollout_position, there.token, there.field)
            == (back.rollout_position, back.token, back.field)
            == (row, token, name)
        )
        assert set(there.largest) == {name}
        np.testing.assert_allclose(there.largest[name], 1.0, rtol=1e-5)
        assert (there.first, there.second) == (back.second, back.first)
