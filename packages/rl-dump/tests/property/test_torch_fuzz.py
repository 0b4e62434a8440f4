"""Damaged and hostile files give an error or the right data: no crash, hang or code that runs.

Each case runs in a child process, so that a crash or a hang is seen and told with the seed that
makes it. 300 cases by default; 10,000 with `-m fuzz`.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import random
import resource
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from stubs.dump_batches import batch, placed, write_pair

from rl_dump import DumpError, RaggedArray, UnsupportedContractError, open_dump
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY
from rl_dump.torch import write_torch_archive

DEADLINE_SECONDS = 120.0


def observed(path: Path) -> tuple[dict[str, Any], list[str], str]:
    """Return everything a reader can get out of a dump, as comparable bytes."""
    with open_dump(path) as dump:
        found: dict[str, Any] = {}
        for name in dump.fields:
            column = dump.column(name)
            if isinstance(column, RaggedArray):
                found[name] = (column.dtype.str, column.offsets.tobytes(), column.values.tobytes())
            else:
                found[name] = (
                    (column.dtype.str, column.tobytes())
                    if isinstance(column, np.ndarray)
                    else repr(column)
                )
        samples = [repr(dump.sample(row)) for row in range(0, dump.num_samples, 5)]
        header = {
            key: value
            for key, value in dump.header.items()
            if key not in {"row_groups", "checksums"}
        }
        dump.verify()
        return found, samples, repr(header)


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(out[: rng.randrange(len(out))])
    if kind == 1:
        start = rng.randrange(len(out))
        del out[start : start + rng.randrange(1, 200)]
    elif kind == 2:
        start = rng.randrange(len(out))
        out[start:start] = rng.randbytes(rng.randrange(1, 50))
    elif kind == 3:
        start = rng.randrange(len(out))
        out[start : start + rng.randrange(1, 400)] = bytes(rng.randrange(1, 400))
    elif kind == 4:
        a, b, size = rng.randrange(len(out)), rng.randrange(len(out)), rng.randrange(1, 300)
        out[a : a + size] = out[b : b + size]
    elif kind == 5:
        at = rng.randrange(max(1, len(out) - 8))
        out[at : at + 4] = struct.pack(
            "<I", rng.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, rng.getrandbits(32)])
        )
    else:
        # Half of the changes go to the end, where both containers keep what tells where everything
        # is.
        for _ in range(rng.randrange(1, 4)):
            low = 0 if rng.random() < 0.5 else max(0, len(out) - 6000)
            out[rng.randrange(low, len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def repacked(data: bytes, rng: random.Random) -> bytes:
    """Change the pickle of an archive and make every checksum right again, as an attacker would."""
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    entries[name] = mutate(entries[name], rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for entry, content in entries.items():
            target.writestr(entry, content)
    return buffer.getvalue()


def resealed(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a Parquet dump and make its checksum right again."""
    table = pq.read_table(io.BytesIO(data))
    metadata = pq.read_metadata(io.BytesIO(data)).metadata
    text = metadata[HEADER_KEY.encode()]
    changed = bytearray(text)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(changed))
        changed[at : at + 1] = rng.choice(
            [b"9", b"-", b"", b"[", b"null", b"1e9", b'"', b"\xff", bytes([rng.randrange(256)])]
        )
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(
            {HEADER_KEY: bytes(changed), CRC_KEY: str(zlib.crc32(changed))}
        )
    return sink.getvalue()


MUTATORS = {"mutate": (mutate, True), "repacked": (repacked, False), "resealed": (resealed, False)}


def child(pipe: Connection, data: bytes, path: Path, mutator: str, seeds: Iterable[int]) -> None:
    # A number in a file must not become memory.
    resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
    change, must_match = MUTATORS[mutator]
    path.write_bytes(data)
    expected = observed(path)
    for seed in seeds:
        pipe.send(("at", seed))
        path.write_bytes(change(data, random.Random(seed)))
        try:
            found = observed(path)
        except (DumpError, UnsupportedContractError) as error:
            if "\n" in str(error) and "the columns do not" not in str(error):
                pipe.send(("fail", seed, f"more than one line: {error}"))
            if path.name not in str(error):
                pipe.send(("fail", seed, f"does not name the file: {error}"))
            continue
        except BaseException as error:
            pipe.send(("fail", seed, repr(error)))
            continue
        if must_match and found != expected:
            pipe.send(("fail", seed, "other data"))
    pipe.send(("done",))
    os._exit(0)


def run_cases(data: bytes, path: Path, mutator: str, seeds: Iterable[int]) -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, data, path, mutator, seeds), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    at, failures = None, []
    try:
        while True:
            if not receiver.poll(DEADLINE_SECONDS):
                failures.append((at, "hangs"))
                break
            try:
                message = receiver.recv()
            except EOFError:
                process.join(10)
                failures.append((at, f"ends the process with {process.exitcode}"))
                break
            if message[0] == "done":
                break
            at = message[1]
            if message[0] == "fail":
                failures.append(message[1:])
    finally:
        process.kill()
        process.join()
    assert not failures, f"{mutator}: {len(failures)} failures, the first: {failures[:3]}"


def slime_archive(folder: Path) -> Path:
    columns, shards = placed(batch(10))
    samples = []
    for row in range(10):
        sample = {}
        for name, column in columns.items():
            value = column[row]
            sample[name] = (
                torch.from_numpy(np.array(value))
                if isinstance(column, RaggedArray)
                else value
                if isinstance(value, str)
                else value.item()
            )
        samples.append(
            {**sample, "extra": {"t": torch.ones(2), "n": [1, None, "x"]}, "floats": [0.5] * row}
        )
    torch.save(
        {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": shards},
        folder / "slime.pt",
    )
    return folder / "slime.pt"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    rollout, train = write_pair(folder, 20)
    columns, shards = placed(batch(20))
    archive = write_torch_archive(
        folder / "ours.pt", contract="train-dump.v2", batch_id=0, columns=columns, dp_shards=shards
    )
    return {
        "train.parquet": train.read_bytes(),
        "rollout.parquet": rollout.read_bytes(),
        "ours.pt": archive.read_bytes(),
        "slime.pt": slime_archive(folder).read_bytes(),
    }


CASES = [
    ("train.parquet", "mutate", 90),
    ("rollout.parquet", "mutate", 30),
    ("ours.pt", "mutate", 60),
    ("slime.pt", "mutate", 40),
    ("slime.pt", "repacked", 50),
    ("train.parquet", "resealed", 30),
]


@pytest.mark.parametrize(("name", "mutator", "count"), CASES)
def test_a_changed_file_gives_an_error_or_the_right_data(
    tmp_path: Path, files: dict[str, bytes], name: str, mutator: str, count: int
) -> None:
    run_cases(files[name], tmp_path / name, mutator, range(count))


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "mutator", "count"), CASES)
def test_ten_thousand_changed_files_give_an_error_or_the_right_data(
    tmp_path: Path, files: dict[str, bytes], name: str, mutator: str, count: int
) -> None:
    total = count * 10_000 // 300
    for start in range(1_000_000, 1_000_000 + total, 500):
        run_cases(
            files[name], tmp_path / name, mutator, range(start, min(start + 500, 1_000_000 + total))
        )


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_file_is_refused_by_name_and_never_runs(tmp_path: Path, protocol: int) -> None:
    torch.save(
        {"rollout_id": 0, "samples": [{"x": Evil(tmp_path / "ran")}]},
        tmp_path / "evil.pt",
        pickle_protocol=protocol,
    )
    with pytest.raises(DumpError, match=r"holds an object of posix\.system"):
        open_dump(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the file must be dangerous, or the test shows nothing"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(tmp_path / "again")))
    with pytest.raises(DumpError, match="not a torch archive"):
        open_dump(tmp_path / "plain.pt")
    assert not (tmp_path / "again").exists()
