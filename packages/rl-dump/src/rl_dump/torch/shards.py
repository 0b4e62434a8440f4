"""How all ranks' shards become one file in rollout order, one row group in memory at a time.

Shard senders tell the writer what they hold; it asks for their parts of one row group at a time.

Invariants, each matched by a test in `tests/distributed/test_train_dump.py`:

- the file does not depend on how samples are spread over ranks, except for the columns that say
  where a sample ran;
- the writer never holds another rank's whole shard;
- if any rank fails, every rank raises; none waits longer than its deadline.

Axes: N samples of all ranks in file order, D data-parallel ranks, G row groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rl_dump.columns import tagged_json
from rl_dump.columns.fields import Column, Field
from rl_dump.errors import DumpError, WriteError
from rl_dump.header import field_of
from rl_dump.parquet.arrow_columns import arrow_schema, encode, smallest_stored
from rl_dump.parquet.writer import DumpWriter, integer_range, row_bytes, row_group_bounds
from rl_dump.torch.archive import archive_pieces
from rl_dump.torch.topology import DumpTopology
from rl_dump.torch.wire import receive_bytes, send_bytes

__all__ = ["Shard", "write_shards"]

_FAILED = b"failed: "
"""Start of a message that carries an error; an arrow stream starts with 0xFF."""

_log = logging.getLogger("rl_dump")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One data-parallel rank's part of a batch, restored and on the CPU."""

    columns: Mapping[str, Column]
    """All columns, N local samples each."""
    document: Mapping[str, Any]
    """The shard's entry in `dp_shards`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The row groups of a whole batch: for each, which local rows of which rank, in file order."""

    fields: list[Field]
    """What every rank's columns are."""
    rank: NDArray[np.int64]
    """int64 [N]: the data-parallel rank that holds each sample."""
    row: NDArray[np.int64]
    """int64 [N]: its local row there."""
    bounds: list[tuple[int, int]]
    """[G]: first sample of each row group, and the one after its last."""

    def rows_of(self, peer: int, group: int) -> NDArray[np.int64]:
        part = slice(*self.bounds[group])
        chosen: NDArray[np.int64] = self.row[part][self.rank[part] == peer]
        return chosen


def write_shards(
    path: Path, shard: Shard | DumpError, topology: DumpTopology, header: Mapping[str, Any]
) -> None:
    """Write one file from the shards of all data-parallel ranks; every shard sender calls this.

    Args:
        path: the file; the writer's counts.
        shard: this rank's part, or the error that kept it from being made: the others must hear of
            it.
        topology: this rank's place.
        header: keywords of `DumpWriter` other than `fields` and `dp_shards`; the writer's count.

    Raises:
        DumpError: shards that do not fit together; every rank raises.
        WriteError: the file system refused, or a rank did not answer before the deadline; every
            rank raises.
    """
    if topology.is_writer:
        _write(path, shard, topology, header)
    else:
        _send(shard, topology)


def _write(
    path: Path, shard: Shard | DumpError, topology: DumpTopology, header: Mapping[str, Any]
) -> None:
    peers = range(1, topology.dp_size)
    try:
        summaries = [_summary(shard)]
        for peer in peers:
            message, what = (
                bytes(receive_bytes(peer, topology)),
                f"summary of data-parallel rank {peer}",
            )
            summaries.append(tagged_json.loads(message, what=what))
        layout = _plan(summaries)
        assert isinstance(shard, Shard)
        for peer in peers:
            plan = {
                "stored": {field.name: field.to_document() for field in layout.fields},
                "rows": [layout.rows_of(peer, group) for group in range(len(layout.bounds))],
            }
            send_bytes(tagged_json.dumps(plan).encode(), peer, topology)
        shards = [summary["document"] for summary in summaries]
        with _pieces(path, fields=layout.fields, dp_shards=shards, **header) as write:
            for group in range(len(layout.bounds)):
                write(_collect(shard, layout, group, topology))
    except BaseException as error:
        _tell(peers, f"data-parallel rank 0: {error}", topology)
        raise
    _tell(peers, "", topology)


@contextmanager
def _pieces(path: Path, **given: Any) -> Iterator[Callable[[Mapping[str, pa.Array]], None]]:
    """Yield the function that takes one row group, of the container that the suffix names."""
    if path.suffix == ".pt":
        with archive_pieces(path, **given) as write:
            yield write
    else:
        with DumpWriter(path, **given) as writer:
            yield writer.write_arrays


def _collect(
    shard: Shard, layout: _Layout, group: int, topology: DumpTopology
) -> dict[str, pa.Array]:
    start, stop = layout.bounds[group]
    parts, places = [], []
    for peer in range(topology.dp_size):
        rows = layout.rows_of(peer, group)
        if not rows.size:
            continue
        if peer == 0:
            parts.append(_batch(shard.columns, layout.fields, rows))
        else:
            send_bytes(b"go", peer, topology)
            parts.append(_opened(receive_bytes(peer, topology), peer))
        places.append(np.flatnonzero(layout.rank[start:stop] == peer))
    # Parts come rank by rank; `places` says where in the row group each of their rows belongs.
    order = np.argsort(np.concatenate(places))
    table = pa.Table.from_batches(parts)
    if len(parts) > 1:
        table = table.take(pa.array(order)).combine_chunks()
    return {name: table.column(name).combine_chunks() for name in table.column_names}


def _send(shard: Shard | DumpError, topology: DumpTopology) -> None:
    send_bytes(tagged_json.dumps(_summary(shard)).encode(), 0, topology)
    message = bytes(receive_bytes(0, topology))
    if isinstance(shard, DumpError):
        raise shard
    if message.startswith(b"{"):
        plan = tagged_json.loads(message, what="plan of the writer")
        fields = [
            field_of(name, document, where="plan of the writer")
            for name, document in plan["stored"].items()
        ]
        for rows in plan["rows"]:
            if not rows.size:
                continue
            message = bytes(receive_bytes(0, topology))
            if message != b"go":
                break
            send_bytes(_part(shard, fields, rows), 0, topology)
        else:
            message = bytes(receive_bytes(0, topology))
    if message:
        raise WriteError(message.decode())


def _tell(peers: Iterable[int], message: str, topology: DumpTopology) -> None:
    for peer in peers:
        try:
            send_bytes(message.encode(), peer, topology)
        except WriteError:
            if not message:
                raise
            _log.exception("rank %d could not be told that the dump failed", peer)


def _summary(shard: Shard | DumpError) -> dict[str, Any]:
    if isinstance(shard, DumpError):
        return {"error": str(shard)}
    rows = len(next(iter(shard.columns.values()))) if shard.columns else 0
    return {
        "fields": {name: column.field.to_document() for name, column in shard.columns.items()},
        "ranges": {name: integer_range(column) for name, column in shard.columns.items()},
        "bytes": row_bytes(shard.columns, rows),
        "positions": _keys(shard, "rollout_position"),
        "indices": _keys(shard, "sample_index"),
        "document": dict(shard.document),
    }


def _keys(shard: Shard, name: str) -> NDArray[np.int64] | None:
    column = shard.columns.get(name)
    if (
        column is None
        or column.field.kind != "scalar"
        or (column.valid is not None and not column.valid.all())
    ):
        return None
    return np.asarray(column.values, np.int64)


def _plan(summaries: Sequence[Mapping[str, Any]]) -> _Layout:
    failed = [
        f"data-parallel rank {rank}: {summary['error']}"
        for rank, summary in enumerate(summaries)
        if "error" in summary
    ]
    if failed:
        raise DumpError("\n".join(failed))
    counts = [len(summary["bytes"]) for summary in summaries]
    # Which rank holds a sample, as which of its rows: [N] rank by rank first, then in file order.
    rank = np.repeat(np.arange(len(counts)), counts)
    row = np.concatenate([np.arange(count) for count in counts])
    order = _order(summaries)
    sizes = np.concatenate([np.asarray(summary["bytes"], np.int64) for summary in summaries])[order]
    return _Layout(
        fields=_common_fields(summaries),
        rank=rank[order],
        row=row[order],
        bounds=row_group_bounds(sizes),
    )


def _order(summaries: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    for key, name in (("positions", "rollout_position"), ("indices", "sample_index")):
        keys = [summary[key] for summary in summaries if len(summary["bytes"])]
        if any(part is None for part in keys):
            continue
        whole = np.concatenate(keys) if keys else np.zeros(0, np.int64)
        values, counts = np.unique(whole, return_counts=True)
        if name == "rollout_position" and (counts > 1).any():
            raise DumpError(
                f"rollout_position {int(values[counts > 1][0])} is in more than one place; each"
                " sample belongs to one data-parallel rank"
            )
        return np.argsort(whole, kind="stable")
    _log.warning(
        "train dump: not every sample has a rollout_position or a sample_index; samples stand in"
        " the order of their ranks"
    )
    return np.arange(sum(len(summary["bytes"]) for summary in summaries))


def _common_fields(summaries: Sequence[Mapping[str, Any]]) -> list[Field]:
    holding = [rank for rank, summary in enumerate(summaries) if len(summary["bytes"])] or [0]
    described: dict[str, dict[int, Field]] = {}
    for rank in holding:
        for name, document in summaries[rank]["fields"].items():
            described.setdefault(name, {})[rank] = field_of(
                name, document, where=f"data-parallel rank {rank}"
            )
    problems, fields = [], []
    for name, by_rank in described.items():
        missing = [rank for rank in holding if rank not in by_rank]
        kinds = {(field.kind, field.dtype, field.trailing) for field in by_rank.values()}
        if missing:
            problems.append(f"{name}: missing on data-parallel ranks {missing}")
        elif len(kinds) > 1:
            problems.append(f"{name}: differs between data-parallel ranks: {sorted(kinds)}")
        else:
            fields.append(
                _common_field(
                    name,
                    list(by_rank.values()),
                    [summaries[rank]["ranges"][name] for rank in by_rank],
                )
            )
    if problems:
        raise DumpError("\n".join(problems))
    return fields


def _common_field(
    name: str, fields: Sequence[Field], ranges: Sequence[tuple[int, int] | None]
) -> Field:
    spans = [span for span in ranges if span is not None]
    stored = fields[0].stored
    if spans:
        stored = smallest_stored(
            fields[0].dtype, min(low for low, _ in spans), max(high for _, high in spans)
        )
    return replace(
        fields[0], name=name, stored=stored, nullable=any(field.nullable for field in fields)
    )


def _batch(
    columns: Mapping[str, Column], fields: Sequence[Field], rows: NDArray[np.int64]
) -> pa.RecordBatch:
    arrays = [encode(replace(columns[field.name].take(rows), field=field)) for field in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(fields))


def _part(shard: Shard, fields: Sequence[Field], rows: NDArray[np.int64]) -> memoryview:
    """Make one message: an arrow stream, or what went wrong, for the writer to pass on."""
    try:
        batch = _batch(shard.columns, fields, rows)
    except DumpError as error:
        return memoryview(_FAILED + str(error).encode())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def _opened(message: memoryview, peer: int) -> pa.RecordBatch:
    if message[: len(_FAILED)] == _FAILED:
        text = bytes(message[len(_FAILED) :]).decode()
        raise DumpError(f"data-parallel rank {peer}: {text}")
    with pa.ipc.open_stream(message) as stream:
        return stream.read_next_batch()
