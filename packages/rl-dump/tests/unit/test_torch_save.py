"""Train dumps of one process: what is a sample's field, what the shard's, what is copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stubs.dump_batches import batch, equal, items_of, numbers_of

from rl_dump import BackgroundWriter, Dump, DumpError, RaggedArray, WriteError, open_dump
from rl_dump.torch import (
    DumpTopology,
    restore_context_parallel_fields_to_cpu,
    save_debug_train_data,
)
from rl_dump.torch.columns import end_to_end, new_cpu_tensor

ALONE = DumpTopology(global_rank=0)


def trainer_batch(num_samples: int = 12) -> dict[str, Any]:
    """Make a batch as a trainer holds it: lists of tensors."""
    columns = batch(num_samples)
    data = {}
    for name, column in columns.items():
        if name == "rollout_position":
            continue
        data[name] = (
            [torch.from_numpy(item.copy()) for item in column]
            if isinstance(column, RaggedArray)
            else column
            if isinstance(column, list)
            else column.tolist()
        )
    half = num_samples // 2
    return {
        **data,
        "partition": list(range(num_samples)),
        "micro_batch_indices": [list(range(half)), list(range(half, num_samples))],
        "num_microbatches": [1, 1],
        "global_batch_sizes": [4, 4],
    }


def saved(folder: Path, data: dict[str, Any], **options: Any) -> Dump:
    path = save_debug_train_data(
        folder / "t_{batch_id}.parquet", batch_id=3, rollout_data=data, topology=ALONE, **options
    )
    assert path is not None
    return open_dump(path)


def test_the_dump_holds_what_the_trainer_held_and_where_it_ran(tmp_path: Path) -> None:
    data, columns = trainer_batch(), batch(12)
    with saved(tmp_path, data, raw_reward=columns["raw_reward"], metadata={"lr": 1e-6}) as dump:
        assert dump.path.name == "t_3.parquet"
        for name, column in columns.items():
            assert equal(dump.column(name), column), name
        assert numbers_of(dump, "step").tolist() == [0] * 6 + [1] * 6
        assert numbers_of(dump, "micro_batch").tolist() == [0] * 12
        assert numbers_of(dump, "data_parallel_rank").tolist() == [0] * 12
        assert dump.dp_shards == [
            {
                "rank": 0,
                "data_parallel_rank": 0,
                "partition": list(range(12)),
                "micro_batch_indices": data["micro_batch_indices"],
                "num_microbatches": [1, 1],
                "global_batch_sizes": [4, 4],
                "sample_indices": list(range(1000, 1012)),
            }
        ]
        assert dump.metadata == {"lr": 1e-6}
        assert dump.verify() == []


def test_samples_stand_in_rollout_order_whatever_the_shards_order(tmp_path: Path) -> None:
    data = trainer_batch()
    data["partition"] = list(range(11, -1, -1))
    with saved(tmp_path, data) as dump:
        assert numbers_of(dump, "rollout_position").tolist() == list(range(12))
        assert numbers_of(dump, "sample_index").tolist() == list(range(1011, 999, -1))


def test_without_positions_the_index_orders_and_without_both_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = trainer_batch()
    del data["partition"]
    data["sample_index"] = list(range(12, 0, -1))
    with saved(tmp_path, data) as dump:
        assert numbers_of(dump, "sample_index").tolist() == list(range(1, 13))
    del data["sample_index"]
    with saved(tmp_path, data):
        assert "not every sample has a rollout_position or a sample_index" in caplog.text


def test_nothing_is_told_apart_by_its_length(tmp_path: Path) -> None:
    data = {
        **trainer_batch(),
        "learning_rates": [0.1] * 12,
        "source_names": ["math"] * 12,
        "custom": [torch.ones(2)] * 12,
    }
    with saved(tmp_path, data, sample_fields=("source_names",)) as dump:
        assert dump.dp_shards[0]["learning_rates"] == [0.1] * 12
        assert "learning_rates" not in dump.fields
        assert dump.column("source_names") == ["math"] * 12
        assert dump.column("custom")[3].tolist() == [1, 1]


def test_custom_response_fields_and_half_precision_are_kept(tmp_path: Path) -> None:
    data = trainer_batch()
    data["mine"] = [torch.randn(len(item)).bfloat16() for item in data["log_probs"]]
    with saved(tmp_path, data, response_fields=("log_probs", "mine")) as dump:
        assert dump.fields["mine"].response_aligned
        assert dump.fields["mine"].dtype == "bfloat16"
        assert all(
            np.array_equal(found, item.float().numpy())
            for found, item in zip(dump.column("mine"), data["mine"], strict=True)
        )


def test_training_may_change_its_tensors_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    data = trainer_batch()
    expected = [item.clone() for item in data["advantages"]]
    with BackgroundWriter() as writer:
        path = save_debug_train_data(
            tmp_path / "{batch_id}.parquet",
            batch_id=0,
            rollout_data=data,
            topology=ALONE,
            background=writer,
        )
        for item in data["advantages"]:
            item.fill_(7)
        data["rewards"][0] = 99.0
        data["micro_batch_indices"][0].clear()
    assert path is not None
    with open_dump(path) as dump:
        assert all(
            np.array_equal(found, item.numpy())
            for found, item in zip(dump.column("advantages"), expected, strict=True)
        )
        assert dump.column("rewards")[0] != 99.0
        assert dump.dp_shards[0]["micro_batch_indices"][0]


def test_tensors_that_require_grad_are_dumped_detached(tmp_path: Path) -> None:
    data = trainer_batch()
    data["log_probs"] = [item.requires_grad_() for item in data["log_probs"]]
    with saved(tmp_path, data) as dump:
        assert items_of(dump, "log_probs").dtype == np.float32


def test_the_suffix_chooses_the_container(tmp_path: Path) -> None:
    path = save_debug_train_data(
        tmp_path / "{batch_id}.pt", batch_id=1, rollout_data=trainer_batch(), topology=ALONE
    )
    assert path is not None
    assert len(torch.load(path, weights_only=True)["samples"]) == 12
    with open_dump(path) as dump, saved(tmp_path, trainer_batch()) as other:
        assert dump.column("log_probs") == other.column("log_probs")


def test_a_failed_background_write_raises_at_the_next_batch_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").mkdir()
    with BackgroundWriter() as writer:
        save_debug_train_data(
            tmp_path / "{batch_id}.parquet",
            batch_id=0,
            rollout_data=trainer_batch(),
            topology=ALONE,
            background=writer,
        )
        while writer._count():
            pass
        with pytest.raises(
            WriteError, match=r"dump .*0\.parquet was not written: cannot write .*it is a folder"
        ):
            save_debug_train_data(
                tmp_path / "{batch_id}.parquet",
                batch_id=1,
                rollout_data=trainer_batch(),
                topology=ALONE,
                background=writer,
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"log_probs": [torch.zeros(1)] * 3},
            "log_probs: needs a list of 12 tensors, one per sample, got 3",
        ),
        (
            {"log_probs": torch.zeros(12)},
            "log_probs: needs a list of 12 tensors, one per sample, got Tensor",
        ),
        ({"log_probs": [0.0] * 12}, "log_probs: sample 0 is float, not a tensor"),
        (
            {"log_probs": [torch.zeros(())] * 12},
            "log_probs: a field has one dtype, at least one dimension",
        ),
        (
            {"log_probs": [torch.zeros(1), torch.zeros(1, dtype=torch.float64)] * 6},
            r"its tensors are \['torch.float32', 'torch.float64'\]",
        ),
        (
            {"custom": [torch.zeros(2), torch.zeros(2, 3)] * 6},
            "custom: tensors of shapes that differ",
        ),
        (
            {"custom": [torch.zeros(2), torch.zeros(2).long()] * 6},
            "custom: tensors of different dtypes",
        ),
        (
            {"log_probs": [torch.zeros(99)] * 12},
            "log_probs: sample 0 has 99 values after restoring, its response has",
        ),
        ({"tokens": [torch.zeros(3)] * 12}, "tokens: the contract says int64, got float32"),
        ({"num_microbatches": [1]}, r"2 micro_batch_indices, num_microbatches adds up to 1"),
        ({"micro_batch_indices": [[0], [1]]}, "local sample 2 is in no micro-batch"),
        ({"partition": [0] * 12}, "rollout_position 0 is in more than one place"),
    ],
)
def test_a_batch_that_makes_no_dump_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DumpError, match=message):
        saved(tmp_path, {**trainer_batch(), **change})
    assert list(tmp_path.iterdir()) == []


def test_context_parallel_pieces_need_something_that_joins_them(tmp_path: Path) -> None:
    topology = DumpTopology(global_rank=0, cp_size=2)
    with pytest.raises(DumpError, match="gather_tensor must join"):
        save_debug_train_data(
            tmp_path / "{batch_id}.parquet",
            batch_id=0,
            rollout_data=trainer_batch(),
            topology=topology,
        )


def test_a_template_that_would_overwrite_itself_is_refused_before_anything_happens(
    tmp_path: Path,
) -> None:
    with pytest.raises(DumpError, match="every batch would overwrite"):
        save_debug_train_data(tmp_path / "x.parquet", batch_id=0, rollout_data={}, topology=ALONE)


def test_restoring_keeps_one_chunk_at_a_time_and_copies_only_where_asked() -> None:
    lengths = [10, 20, 30, 5, 0, 8]
    data = {
        "total_lengths": lengths,
        "response_lengths": lengths,
        "log_probs": [torch.arange(length, dtype=torch.float32) for length in lengths],
    }
    calls = []

    def gather(
        pieces: Sequence[torch.Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        samples: range,
    ) -> list[torch.Tensor]:
        calls.append(sum(response_lengths) * 4)
        assert (
            list(total_lengths) == list(response_lengths) == lengths[samples.start : samples.stop]
        )
        return [piece.clone() for piece in pieces]

    kept = restore_context_parallel_fields_to_cpu(data, gather, keep_restored=True, chunk_bytes=120)
    assert calls == [120, 120, 52]
    assert [item.tolist() for item in kept.values["log_probs"]] == [
        torch.arange(length, dtype=torch.float32).tolist() for length in lengths
    ]
    calls.clear()
    discarded = restore_context_parallel_fields_to_cpu(
        data, gather, keep_restored=False, chunk_bytes=120
    )
    assert calls == [120, 120, 52]
    assert discarded.values == {}


def test_a_gather_that_loses_a_sample_is_refused() -> None:
    data = {"total_lengths": [3], "response_lengths": [2], "log_probs": [torch.zeros(1)]}
    with pytest.raises(DumpError, match="gather_tensor gave 0 tensors for 1 samples"):
        restore_context_parallel_fields_to_cpu(data, lambda *_, **__: [], keep_restored=True)


@pytest.mark.parametrize("layout", ["one storage", "own storages", "gaps", "wide", "reversed"])
def test_restored_fields_are_right_however_the_gathered_tensors_lie(layout: str) -> None:
    lengths = [3, 0, 2, 4]
    shape = (9, 2) if layout == "wide" else (9,)
    flat = torch.arange(18 if layout == "wide" else 9, dtype=torch.float32).reshape(shape)
    parts = list(torch.split(flat, lengths))
    given = {
        "one storage": parts,
        "wide": parts,
        "own storages": [part.clone() for part in parts],
        "gaps": [torch.repeat_interleave(part, 2)[::2] for part in parts],
        "reversed": [part.clone() for part in reversed(parts)][::-1],
    }[layout]
    data = {
        "total_lengths": [5] * 4,
        "response_lengths": lengths,
        "log_probs": [torch.zeros((0, *shape[1:]))] * 4,
    }
    restored = restore_context_parallel_fields_to_cpu(
        data, lambda *_, **__: given, keep_restored=True
    )
    found = restored.values["log_probs"]
    assert isinstance(found, RaggedArray)
    assert np.array_equal(found.values, flat.numpy())


def test_tensors_that_lie_end_to_end_are_one_view() -> None:
    flat = torch.arange(12.0)
    for parts in (
        [flat[:3], flat[3:3], flat[3:7]],
        list(torch.split(flat.reshape(6, 2), [1, 2, 3])),
    ):
        whole = end_to_end(parts)
        assert whole is not None
        assert whole.data_ptr() == flat.data_ptr()
        assert torch.equal(whole, torch.cat(parts))
    for parts in (
        [flat[:3], flat[4:5]],
        [flat[3:5], flat[:3]],
        [flat[:3], flat[3:6].clone()],
        [flat[::2], flat[6:]],
        [flat[:0]],
    ):
        assert end_to_end(parts) is None


def test_there_is_memory_for_any_dtype_that_a_dump_holds_and_no_other() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        made = new_cpu_tensor((3, 2), dtype)
        assert (made.shape, made.dtype) == ((3, 2), dtype)
        made[:] = 1
        assert bool((made == 1).all())
    with pytest.raises(DumpError, match=r"tensors of torch\.float8_e4m3fn cannot be dumped"):
        new_cpu_tensor((3,), torch.float8_e4m3fn)
