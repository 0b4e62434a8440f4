"""Dumps frozen at earlier releases of each contract read as they did when they were written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stubs.dump_batches import items_of, numbers_of

from rl_dump import join, open_dump

FOLDER = Path(__file__).parent
FILES = sorted(
    path
    for contract in ("train-dump.v2", "rollout-dump.v1")
    for path in (FOLDER / contract).glob("*.parquet")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_frozen_dump_is_whole_and_of_its_contract(path: Path) -> None:
    with open_dump(path) as dump:
        assert dump.contract == path.parent.name
        assert dump.verify() == []
        assert (dump.batch_id, dump.num_samples) == (4, 3)
        assert items_of(dump, "tokens").dtype == np.int64
        assert numbers_of(dump, "rollout_position").tolist() == [0, 1, 2]


def test_the_two_frozen_dumps_are_of_one_batch() -> None:
    with (
        open_dump(FOLDER / "rollout-dump.v1/three_samples.parquet") as rollout,
        open_dump(FOLDER / "train-dump.v2/three_samples.parquet") as train,
    ):
        found = join(rollout, train)
        assert [(pair.rollout_row, pair.train_row, pair.method) for pair in found.pairs] == [
            (0, 0, "position"),
            (1, 1, "position"),
            (2, 2, "position"),
        ]
        assert train.column("rollout_log_probs") == rollout.column("rollout_log_probs")
