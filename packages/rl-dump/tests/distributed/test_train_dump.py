"""Train dumps of four processes equal the one of a single process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from stubs.dump_batches import Columns, batch, equal, placed
from stubs.dump_layouts import CP_FIELDS, Stream, gatherer, stream_gatherer, trainer_shard
from stubs.dump_processes import run_ranks

from rl_dump import (
    BackgroundWriter,
    DumpError,
    WriteError,
    compare,
    open_dump,
    write_dump,
)
from rl_dump.torch import (
    DumpTopology,
    restore_context_parallel_fields_to_cpu,
    save_debug_train_data,
)
from rl_dump.torch import shards as shards_module
from rl_dump.torch.wire import receive_bytes

pytestmark = pytest.mark.distributed


def reference(folder: Path, columns: Columns, shards: list[dict[str, Any]]) -> Path:
    return write_dump(
        folder / "reference.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=columns,
        dp_shards=shards,
    )


def dp2_cp2(
    rank: int,
    folder: Path,
    num_samples: int,
    longest: int,
    background: bool,
    suffix: str = ".parquet",
) -> tuple[str | None, list[int], list[int]]:
    dp_rank, cp_rank = divmod(rank, 2)
    cp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shard_group = dist.new_group([0, 2])
    columns, shards = placed(batch(num_samples, longest=longest))
    gather, restored = gatherer(cp_rank, 2, cp_groups[dp_rank])
    topology = DumpTopology(
        global_rank=rank,
        dp_rank=dp_rank,
        dp_size=2,
        cp_rank=cp_rank,
        cp_size=2,
        shard_group=shard_group if cp_rank == 0 else None,
        deadline_seconds=20,
    )
    received: list[int] = []

    def counted(peer: int, topology: DumpTopology) -> memoryview:
        message = receive_bytes(peer, topology)
        received.append(len(message))
        return message

    vars(shards_module)["receive_bytes"] = counted
    options: dict[str, Any] = {
        "batch_id": 0,
        "rollout_data": trainer_shard(columns, shards[dp_rank], cp_rank, 2),
        "topology": topology,
        "gather_tensor": gather,
    }
    if background:
        with BackgroundWriter() as writer:
            path = save_debug_train_data(
                folder / f"t_{{batch_id}}{suffix}", background=writer, **options
            )
    else:
        path = save_debug_train_data(
            folder / f"t_{{batch_id}}{suffix}", chunk_bytes=4096, **options
        )
    return None if path is None else str(path), restored, received


@pytest.mark.parametrize("background", [False, True])
def test_dp2_cp2_writes_one_file_equal_to_a_single_process(
    tmp_path: Path, background: bool
) -> None:
    results = run_ranks(dp2_cp2, 4, tmp_path, 30, 60, background)
    assert [result[0] is not None for result in results] == [True, False, False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["t_0.parquet"]
    columns, shards = placed(batch(30, longest=60))
    with (
        open_dump(results[0][0]) as found,
        open_dump(reference(tmp_path, columns, shards)) as expected,
    ):
        assert compare(found, expected) is None
        for name in columns:
            assert equal(found.column(name), expected.column(name)), name
        assert found.header["writer_rank"] == 0
        assert [
            (shard["rank"], shard["data_parallel_rank"], shard["partition"])
            for shard in found.dp_shards
        ] == [
            (0, 0, shards[0]["partition"]),
            (2, 1, shards[1]["partition"]),
        ]
        assert found.verify() == []


def test_restored_memory_is_one_chunk_and_collectives_are_few(tmp_path: Path) -> None:
    for _, restored, _ in run_ranks(dp2_cp2, 4, tmp_path, 60, 200, False):
        assert max(restored) <= 4096
        assert len(restored) < 60 * len(CP_FIELDS) / 3, (
            "one collective per field and chunk, not per sample"
        )


def test_the_writer_holds_one_row_group_of_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shards_module,
        "row_group_bounds",
        lambda sizes: [(start, min(start + 8, len(sizes))) for start in range(0, len(sizes), 8)],
    )
    results = run_ranks(dp2_cp2, 4, tmp_path, 160, 200, False)
    messages = [size for size in results[0][2] if size > 100]
    assert len(messages) > 15
    assert max(messages[1:]) < sum(messages[1:]) / 8


def test_an_archive_is_written_by_the_same_call(tmp_path: Path) -> None:
    results = run_ranks(dp2_cp2, 4, tmp_path, 20, 30, False, ".pt")
    columns, shards = placed(batch(20, longest=30))
    with (
        open_dump(results[0][0]) as found,
        open_dump(reference(tmp_path, columns, shards)) as expected,
    ):
        assert compare(found, expected) is None


def tp2_pp2(rank: int, folder: Path) -> str | None:
    pp_rank, tp_rank = divmod(rank, 2)
    topology = DumpTopology(
        global_rank=rank, tp_rank=tp_rank, tp_size=2, pp_rank=pp_rank, pp_size=2
    )
    columns, shards = placed(batch(10), dp_size=1)
    data = trainer_shard(columns, shards[0]) if topology.takes_part else {}
    path = save_debug_train_data(
        folder / "t_{batch_id}.parquet", batch_id=0, rollout_data=data, topology=topology
    )
    return None if path is None else str(path)


def test_tp2_pp2_only_the_last_stages_first_rank_writes(tmp_path: Path) -> None:
    results = run_ranks(tp2_pp2, 4, tmp_path)
    assert [result is not None for result in results] == [False, False, True, False]
    columns, shards = placed(batch(10), dp_size=1)
    with (
        open_dump(results[2]) as found,
        open_dump(reference(tmp_path, columns, shards)) as expected,
    ):
        assert compare(found, expected) is None
        assert found.header["writer_rank"] == 2


def restore_only(rank: int) -> dict[str, list[bytes]]:
    columns = batch(16, longest=50)
    shard = {
        "partition": list(range(16)),
        "micro_batch_indices": [],
        "num_microbatches": [],
        "global_batch_sizes": [],
    }
    gather, _ = gatherer(rank, 4, dist.group.WORLD)
    restored = restore_context_parallel_fields_to_cpu(
        trainer_shard(columns, shard, rank, 4), gather, keep_restored=rank == 0, chunk_bytes=1000
    )
    return {name: [item.tobytes() for item in column] for name, column in restored.values.items()}


def test_cp4_fields_are_restored_bit_for_bit_on_the_writer_only() -> None:
    results = run_ranks(restore_only, 4)
    columns = batch(16, longest=50)
    assert results[0] == {
        name: [item.tobytes() for item in columns[name]]
        for name in ("rollout_log_probs", "log_probs", "advantages", "entropy")
    }
    assert results[1:] == [{}, {}, {}]


def restore_streams(rank: int) -> tuple[dict[str, list[bytes]], list[int]]:
    columns = batch(16, longest=50)
    totals, responses = columns["total_lengths"].tolist(), columns["response_lengths"].tolist()
    streams = []
    for first in range(
        0, 16, 5
    ):  # micro-batches of up to five samples, each a stream padded to the number of ranks
        lengths = totals[first : first + 5]
        padded = -(-sum(lengths) // 2) * 2
        streams += [Stream(offset, padded) for offset in np.cumsum([0, *lengths[:-1]]).tolist()]
    data = {"total_lengths": totals, "response_lengths": responses}
    for name in CP_FIELDS:
        data[name] = [
            torch.from_numpy(item[stream.owned(total, len(item), rank, 2)])
            for item, stream, total in zip(columns[name], streams, totals, strict=True)
        ]
    gather = stream_gatherer(streams, rank, 2, dist.group.WORLD)
    restored = restore_context_parallel_fields_to_cpu(
        data, gather, keep_restored=rank == 1, chunk_bytes=1000
    )
    pieces = [len(piece) for piece in data["log_probs"]]
    return {
        name: [item.tobytes() for item in column] for name, column in restored.values.items()
    }, pieces


def test_contiguous_parts_of_several_streams_are_restored_by_the_samples_numbers() -> None:
    (none, first), (restored, second) = run_ranks(restore_streams, 2)
    columns = batch(16, longest=50)
    assert none == {}
    assert restored == {
        name: [item.tobytes() for item in columns[name]]
        for name in sorted(CP_FIELDS, key=list(restored).index)
    }
    assert [mine + other for mine, other in zip(first, second, strict=True)] == columns[
        "response_lengths"
    ].tolist()
    assert min(first) == min(second) == 0, "some sequences lie on one rank only"


def three_shards(rank: int, folder: Path, fault: str) -> str | tuple[str, str]:
    group = dist.new_group([0, 1, 2])
    topology = DumpTopology(
        global_rank=rank,
        dp_rank=rank,
        dp_size=3,
        shard_group=group,
        deadline_seconds=2 if fault == "absent" else 20,
    )
    columns, shards = placed(batch(30), dp_size=3)
    data = trainer_shard(columns, shards[rank])
    if rank == 1 and fault == "absent":
        return "absent"
    if rank == 1 and fault == "field missing":
        del data["entropy"]
    if rank == 1 and fault == "bad batch":
        data["tokens"] = data["tokens"][:3]
    if rank == 1 and fault == "not json":
        data["label"] = [object()] * len(data["partition"])
    elif fault == "not json":
        data["label"] = [{"a": 1}] * len(data["partition"])
    if rank == 2 and fault == "same sample twice":
        data["partition"] = shards[1]["partition"]
    if rank == 1 and fault == "empty shard":
        columns, shards = placed(batch(0), dp_size=1)
        data = trainer_shard(
            columns,
            {**shards[0], "partition": [], "micro_batch_indices": [], "num_microbatches": [0]},
        )
    target = (
        folder / "file" / "t_{batch_id}.parquet"
        if fault == "disk"
        else folder / "t_{batch_id}.parquet"
    )
    try:
        save_debug_train_data(target, batch_id=0, rollout_data=data, topology=topology)
    except DumpError as error:
        return type(error).__name__, str(error)
    return "written"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("field missing", "entropy: missing on data-parallel ranks [1]"),
        ("bad batch", "different numbers of samples"),
        ("not json", "label of sample"),
        ("same sample twice", "is in more than one place"),
        ("disk", "cannot write"),
    ],
)
def test_a_fault_of_one_rank_raises_on_every_rank_with_its_reason(
    tmp_path: Path, fault: str, message: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    for result in run_ranks(three_shards, 3, tmp_path, fault):
        assert message in result[1], result
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_rank_that_does_not_come_meets_the_deadline_and_is_named(tmp_path: Path) -> None:
    results = run_ranks(three_shards, 3, tmp_path, "absent")
    assert results[1] == "absent"
    assert results[0][0] == WriteError.__name__
    assert "data-parallel rank 1" in results[0][1]
    assert results[2][0] == WriteError.__name__
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_samples_is_fine(tmp_path: Path) -> None:
    assert run_ranks(three_shards, 3, tmp_path, "empty shard") == ["written"] * 3
    with open_dump(tmp_path / "t_0.parquet") as dump:
        assert dump.num_samples == 20
        assert [len(shard["partition"]) for shard in dump.dp_shards] == [10, 0, 10]
