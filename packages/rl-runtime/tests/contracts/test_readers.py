"""Every reader of `docs/contracts.md` reads every frozen document, and refuses another major.

Each is called through the function that stands in the table.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from contracts.call_sites import READERS, WRITERS, Site, golden_files

import rl_dump
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY
from rl_runtime.config import Recipe

VOCAB_SIZE = 64
ADAPTERS: dict[str, Callable[[Callable[..., Any], Path], object]] = {
    "rl_dump.tools.plan_drops:plan_drops": lambda read, path: read(
        json.loads(path.read_text()), {}, where=path.name
    ),
    "rl_runtime.stages.replay:read_micro_batch": lambda read, path: read(
        path, vocab_size=VOCAB_SIZE
    ),
    "rl_runtime.rollout.dump:load_rollout_dump": lambda read, path: read(
        Recipe.model_validate({"debug": {"load_rollout_dump": str(path)}}),
        0,
        vocab_size=VOCAB_SIZE,
    ),
}
"""How a reader that takes more than a path is called."""


def _read(reader: Site, path: Path) -> object:
    read = reader.load()
    return ADAPTERS[reader.name](read, path) if reader.name in ADAPTERS else read(path)


def _prepared(reader: Site, path: Path, folder: Path) -> Path:
    """The replay reads one micro-batch, which `rl-dump replay` takes out of a run's dump."""
    if reader.name != "rl_runtime.stages.replay:read_micro_batch":
        return path
    of_a_run, exported = folder / "train.parquet", folder / "micro_batch.parquet"
    with rl_dump.open_dump(path) as dump:
        rl_dump.write_dump(
            of_a_run,
            contract=dump.contract,
            batch_id=dump.batch_id,
            columns={name: dump.column(name) for name in dump.fields},
            dp_shards=dump.dp_shards,
            metadata={"scoring": {"temperature": 1.0, "kept_sets": True, "weights": "batch"}},
        )
    with rl_dump.open_dump(of_a_run) as dump:
        rl_dump.export_micro_batch(dump, exported, step=0, data_parallel_rank=0, micro_batch=0)
    return exported


def _owner(contract: str) -> str:
    return next(site.package for site in WRITERS if site.contract == contract)


CASES = {
    f"{reader.name}-{reader.contract}-{name}": (reader, path)
    for reader in READERS
    for name, path in golden_files(_owner(reader.contract), reader.contract).items()
}


@pytest.mark.parametrize(("reader", "path"), CASES.values(), ids=CASES)
def test_a_reader_reads_every_frozen_document(reader: Site, path: Path, tmp_path: Path) -> None:
    assert _read(reader, _prepared(reader, path, tmp_path)) is not None


@pytest.mark.parametrize(("reader", "path"), CASES.values(), ids=CASES)
def test_a_reader_refuses_another_major_and_names_both(
    reader: Site, path: Path, tmp_path: Path
) -> None:
    contract = reader.contract
    other = f"{contract.rpartition('.v')[0]}.v9"
    given, changed = _prepared(reader, path, tmp_path), tmp_path / f"changed{path.suffix}"
    if given.suffix == ".json":
        changed.write_text(given.read_text().replace(f'"{contract}"', f'"{other}"'))
    else:
        file = pq.ParquetFile(given)
        header = file.metadata.metadata[HEADER_KEY.encode()].replace(
            contract.encode(), other.encode()
        )
        # A changed header alone would be refused as damaged, before anyone reads its contract.
        seal = str(zlib.crc32(header)).encode()
        metadata = {HEADER_KEY.encode(): header, CRC_KEY.encode(): seal}
        pq.write_table(file.read().replace_schema_metadata(metadata), changed)
    with pytest.raises(ValueError, match="contract") as refusal:
        _read(reader, changed)
    assert refusal.type.__name__ == "UnsupportedContractError"
    assert contract in str(refusal.value)
    assert other in str(refusal.value)
