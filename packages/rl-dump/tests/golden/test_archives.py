"""Frozen torch archives read as they did, with or without torch installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stubs.dump_batches import batch, equal, numbers_of, placed

from rl_dump import convert, open_dump
from rl_dump.columns.tagged_json import Tensor

FOLDER = Path(__file__).parent / "archives"


def test_our_archive_holds_what_was_written() -> None:
    columns, shards = placed(batch(3, longest=8, seed=2))
    with open_dump(FOLDER / "ours.pt") as dump:
        for name, column in columns.items():
            assert equal(dump.column(name), column), name
        assert dump.dp_shards == shards
        assert dump.metadata == {"note": ("a", 1)}
        assert dump.verify() == []


def test_a_slime_train_dump_has_the_contracts_names_and_keeps_what_neither_layout_names() -> None:
    with open_dump(FOLDER / "slime_train.pt") as dump:
        assert (
            dump.contract,
            dump.batch_id,
            dump.header["writer_rank"],
            dump.header["producer"]["distribution"],
        ) == (
            "train-dump.v2",
            9,
            1,
            "slime",
        )
        assert dump.column("sample_index") == [7, None, None]
        assert dump.column("log_probs")[2].tolist() == [-0.5, -1.0, -0.5]
        assert dump.fields["values"].dtype == "bfloat16"
        assert dump.column("values")[0].tolist() == [0.5, 1.0, 2.0]
        assert numbers_of(dump, "loss_denominators").tolist() == [3.0, 3.0, 3.0]
        assert dump.column("nucleus_ids")[0].tolist() == [1, 2, 3, 4]
        assert dump.column("source_names") == ["math"] * 3
        inputs = dump.column("multimodal_train_inputs")
        assert inputs == [
            {"pixels": Tensor(np.ones((2, 2), np.float32), "float32"), "sizes": [np.int64(2)]},
            None,
            None,
        ]
        assert dump.raw_reward == [1.0, 0.0, 0.5]
        assert dump.verify() == []


def test_a_slime_rollout_dump_has_the_contracts_names_and_keeps_what_neither_layout_names() -> None:
    with open_dump(FOLDER / "slime_rollout.pt") as dump:
        assert (dump.contract, dump.batch_id) == ("rollout-dump.v1", 9)
        assert numbers_of(dump, "rollout_position").tolist() == [0, 1]
        assert dump.column("rollout_ids") == [None, None]
        assert dump.column("finish_reason") == ["length", "stop"]
        assert dump.column("nucleus_offsets")[0].tolist() == [0, 1, 2]
        assert dump.column("nucleus_offsets")[1] is None
        assert dump.column("prompt")[0] == [{"role": "user", "content": "1+1?"}]
        assert dump.column("trace") == [{"t": 1.5}] * 2


@pytest.mark.parametrize("name", ["ours.pt", "slime_train.pt", "slime_rollout.pt"])
def test_an_archive_becomes_parquet_without_torch(tmp_path: Path, name: str) -> None:
    with (
        open_dump(FOLDER / name) as dump,
        open_dump(convert(dump.path, tmp_path / "x.parquet")) as other,
    ):
        assert other.verify() == dump.verify() == []
        for row in range(dump.num_samples):
            mine, theirs = dump.sample(row), other.sample(row)
            assert list(mine) == list(theirs)
            assert all(
                np.array_equal(mine[field], theirs[field])
                if isinstance(mine[field], np.ndarray)
                else mine[field] == theirs[field]
                for field in mine
            )
