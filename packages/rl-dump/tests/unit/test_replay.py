"""One micro-batch on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stubs.dump_batches import Columns, Pair

from rl_dump import DumpError, export_micro_batch, open_dump


@pytest.mark.parametrize("suffix", [".parquet", ".pt"])
def test_the_export_holds_the_micro_batchs_samples_and_where_they_ran(
    tmp_path: Path, pair: Pair, suffix: str
) -> None:
    if suffix == ".pt":
        pytest.importorskip("torch")
    with open_dump(pair[1]) as dump:
        path = export_micro_batch(
            dump, tmp_path / f"one{suffix}", step=0, data_parallel_rank=1, micro_batch=2
        )
        rows = dump.dp_shards[1]["micro_batch_indices"][2]
        positions = [dump.dp_shards[1]["partition"][row] for row in rows]
        expected = {
            name: dump.column(name)
            for name in ("tokens", "log_probs", "loss_denominators", "nucleus_ids")
        }
    with open_dump(path) as one:
        assert one.positions().tolist() == positions
        assert all(
            np.array_equal(one.column(name)[at], column[row])
            for name, column in expected.items()
            for at, row in enumerate(positions)
        )
        source = one.metadata["replay"]
        assert source == {
            "step": 0,
            "data_parallel_rank": 1,
            "micro_batch": 2,
            "file": pair[1].name,
            "num_microbatches": 4,
            "global_batch_size": source["global_batch_size"],
        }
        assert one.dp_shards[0]["micro_batch_indices"] == [[0, 1, 2]]
        assert one.verify() == []


def test_a_micro_batch_that_is_not_there_is_refused_naming_the_highest(
    tmp_path: Path, pair: Pair
) -> None:
    with (
        open_dump(pair[1]) as dump,
        pytest.raises(
            DumpError, match=r"no sample ran in step 0, rank 1, micro-batch 9 .*'micro-batch': 3"
        ),
    ):
        export_micro_batch(
            dump, tmp_path / "x.parquet", step=0, data_parallel_rank=1, micro_batch=9
        )


def test_rollout_dumps_and_dumps_without_places_are_refused(
    tmp_path: Path, pair: Pair, columns: Columns
) -> None:
    from rl_dump import write_dump

    with open_dump(pair[0]) as dump, pytest.raises(DumpError, match="only a train-dump"):
        export_micro_batch(
            dump, tmp_path / "x.parquet", step=0, data_parallel_rank=0, micro_batch=0
        )
    path = write_dump(tmp_path / "y.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    with open_dump(path) as dump, pytest.raises(DumpError, match="without micro_batch_indices"):
        export_micro_batch(
            dump, tmp_path / "x.parquet", step=0, data_parallel_rank=0, micro_batch=0
        )
