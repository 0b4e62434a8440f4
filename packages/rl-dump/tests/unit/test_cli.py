"""The command line: what it prints, and exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from stubs.dump_batches import Columns, Pair, batch, ragged, taken
from typer.testing import CliRunner, Result

from rl_dump import open_dump, write_dump
from rl_dump.cli.app import app
from rl_dump.header import seal_header
from rl_dump.parquet.arrow_columns import CRC_KEY, HEADER_KEY


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_show_gives_fields_and_one_sample(pair: Pair) -> None:
    result = run("show", pair[1])
    assert result.exit_code == 0
    assert "train-dump.v2 (minor 0), batch 0, 24 samples, 2 shards, 0 dropped" in result.output
    assert "advantages" in result.output
    document = json.loads(run("show", pair[1], "--json").output)
    assert (document["contract"], document["num_samples"]) == ("train-dump.v2", 24)
    sample = json.loads(run("show", pair[1], "--sample", "3", "--json").output)
    assert sample["rollout_position"] == 3
    assert "tokens" in run("show", pair[1], "--sample", "-1").output


def test_stats_trend_doctor_verify_of_a_good_dump(pair: Pair) -> None:
    assert "log_prob_gap" in run("stats", pair[1]).output
    assert json.loads(run("stats", pair[1], "--json").output)["num_samples"] == 24
    assert "raw_reward" in run("trend", pair[1], pair[1]).output
    assert "entropy" in run("trend", pair[1], "--field", "entropy").output
    assert run("verify", pair[1]).exit_code == 0
    assert json.loads(run("verify", pair[1], "--json").output) == {"problems": []}


def test_join_exits_1_when_something_is_missing(
    tmp_path: Path, pair: Pair, columns: Columns
) -> None:
    assert run("join", *pair).exit_code == 0
    part = write_dump(
        tmp_path / "part.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=taken(columns, range(20)),
    )
    result = run("join", pair[0], part)
    assert result.exit_code == 1
    assert "20 samples in both" in result.output
    assert "4 missing in the train dump" in result.output
    assert len(json.loads(run("join", pair[0], part, "--json").output)["missing_in_train"]) == 4


def test_diff_exits_1_and_names_the_place(tmp_path: Path, pair: Pair, columns: Columns) -> None:
    assert run("diff", pair[1], pair[1]).exit_code == 0
    first = write_dump(
        tmp_path / "a.parquet", contract="train-dump.v2", batch_id=0, columns=columns
    )
    other = write_dump(
        tmp_path / "b.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns={
            **columns,
            "advantages": ragged([item + 1 for item in columns["advantages"]], np.float32),
        },
    )
    result = run("diff", first, other)
    assert result.exit_code == 1
    assert "sample at rollout position 0" in result.output
    assert (
        json.loads(run("diff", first, other, "--json").output)["difference"]["field"]
        == "advantages"
    )
    assert run("diff", first, other, "--atol", "1.5").exit_code == 0


def test_doctor_exits_1_on_an_alarm(tmp_path: Path) -> None:
    columns = {**batch(6), "truncated": np.ones(6, bool)}
    path = write_dump(tmp_path / "x.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    assert run("doctor", path).exit_code == 1
    assert "truncated" in [
        alarm["code"] for alarm in json.loads(run("doctor", path, "--json").output)["alarms"]
    ]


def test_html_and_replay_write_files(tmp_path: Path, pair: Pair) -> None:
    assert run("html", pair[1], "--rollout", pair[0]).exit_code == 0
    assert pair[1].with_suffix(".html").exists()
    assert run("replay", pair[1], tmp_path / "one.parquet", "--rank", "1").exit_code == 0
    assert run("show", tmp_path / "one.parquet").exit_code == 0
    assert run("replay", pair[1], tmp_path / "one.parquet", "--rank", "9").exit_code == 2


def test_convert_goes_there_and_back(tmp_path: Path, pair: Pair) -> None:
    pytest.importorskip("torch")
    assert run("convert", pair[1], tmp_path / "x.pt").exit_code == 0
    assert run("convert", tmp_path / "x.pt", tmp_path / "y.parquet").exit_code == 0
    assert run("diff", pair[1], tmp_path / "y.parquet").exit_code == 0


def bad_files(folder: Path, good: Path) -> list[Path]:
    data = good.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    files = {
        "empty.parquet": b"",
        "empty.pt": b"",
        "text.parquet": b"hello",
        "text.pt": b"hello",
        "cut.parquet": data[: len(data) // 2],
        "tail.parquet": data[-100:],
        "x.json": b"{}",
        "folder.parquet": None,
    }
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return [folder / name for name in [*files, "missing.parquet", "missing.pt"]]


COMMANDS = [
    ("show",),
    ("stats",),
    ("verify",),
    ("doctor",),
    ("trend",),
    ("html",),
    ("convert", "out.parquet"),
    ("replay", "out.parquet"),
    ("join", "same"),
    ("diff", "same"),
]


def test_a_bad_file_is_exit_code_2_and_one_line_for_every_command(
    tmp_path: Path, pair: Pair
) -> None:
    for path in bad_files(tmp_path, pair[1]):
        for command, *rest in COMMANDS:
            second = [path if argument == "same" else tmp_path / argument for argument in rest]
            result = run(command, path, *second)
            assert result.exit_code == 2, (command, path, result.output)
            lines = result.output.strip().splitlines()
            assert len(lines) == 1, (command, path, result.output)
            assert lines[0].startswith("rl-dump: ")
            assert path.name in lines[0]
    assert not (tmp_path / "out.parquet").exists()


def test_a_file_of_another_major_is_exit_code_2_and_says_what_to_do(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rl_dump.header

    with monkeypatch.context() as patch:
        patch.setattr(rl_dump.header, "check_header", lambda *_, **__: None)
        path = write_dump(
            tmp_path / "new.parquet", contract="train-dump.v7", batch_id=0, columns=batch(2)
        )
    result = run("show", path)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "train-dump.v7" in result.output
    assert "install a release of rl-dump that knows this one" in result.output


def test_another_parquet_file_is_not_a_dump(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    result = run("show", tmp_path / "a.parquet")
    assert result.exit_code == 2
    assert "a Parquet file, but not a dump" in result.output


def test_the_module_runs_as_a_program_and_shows_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rl_dump", "show", tmp_path / "nope.parquet"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip().splitlines() == [
        f"rl-dump: {tmp_path / 'nope.parquet'}: cannot be opened: No such file or directory"
    ]


def test_verify_lists_what_is_wrong_and_exits_1(tmp_path: Path, pair: Pair) -> None:
    column = pq.read_metadata(pair[1]).row_group(0).column(0)
    end_of_values = (
        column.dictionary_page_offset or column.data_page_offset
    ) + column.total_compressed_size
    raw = bytearray(pair[1].read_bytes())
    raw[end_of_values - 1] ^= 0xFF
    pair[1].write_bytes(raw)
    result = run("verify", pair[1])
    assert result.exit_code == 1
    assert "1 problem" in result.output
    assert "damaged" in result.output
    (problem,) = json.loads(run("verify", pair[1], "--json").output)["problems"]
    assert problem["code"] == "damaged"


def test_trend_and_show_give_json(pair: Pair) -> None:
    (batch,) = json.loads(run("trend", pair[1], "--json").output)
    assert (batch["batch_id"], batch["num_samples"]) == (0, 24)
    header = json.loads(run("show", pair[1], "--json").output)
    assert (header["contract"], header["num_samples"]) == ("train-dump.v2", 24)


def test_warnings_are_one_line_on_standard_error(tmp_path: Path, pair: Pair) -> None:
    """The entry point itself, as a user starts it, on a file of a newer minor."""
    with open_dump(pair[1]) as dump:
        header = dump.header
    header["minor"] = 7
    text, crc = seal_header(header)
    table = pq.read_table(pair[1])
    with pq.ParquetWriter(tmp_path / "new.parquet", table.schema.remove_metadata()) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HEADER_KEY: text, CRC_KEY: crc})
    done = subprocess.run(
        [sys.executable, "-m", "rl_dump", "show", str(tmp_path / "new.parquet")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rl-dump: warning: ")
    assert "minor 7" in line


def test_trend_refuses_a_field_that_no_dump_has(pair: Pair) -> None:
    result = run("trend", pair[1], "--field", "entropyy")
    assert result.exit_code == 2
    assert "rl-dump: no dump has the field of numbers 'entropyy'; they have " in result.stderr


def test_no_command_writes_over_what_it_reads(tmp_path: Path, pair: Pair) -> None:
    rollout, train = pair
    before = {path: path.read_bytes() for path in pair}
    (tmp_path / "link.parquet").symlink_to(train)
    for arguments, message in (
        (("html", train, rollout), "--rollout"),
        (("html", train, train), "--rollout"),
        (("html", train, tmp_path / "page.txt"), ".html or .htm"),
        (("convert", train, train), "also an input"),
        (("convert", train, tmp_path / "link.parquet"), "also an input"),
        (("replay", train, train), "also an input"),
        (("html", train, tmp_path), ".html or .htm"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
    assert {path: path.read_bytes() for path in pair} == before


def test_what_a_dump_holds_is_text_and_never_markup_or_terminal_codes(
    tmp_path: Path, columns: Columns
) -> None:
    folder = tmp_path / "run[red]"
    prompts = [
        r"\[x^2\] = \[a+b\]",
        "[/b]",
        "[red]hi[/red]",
        "a\x1b]0;owned\x07b\x1b[31m\x9bc",
        r"\\[/b]",
    ]
    part = {
        **taken(columns, range(len(prompts))),
        "prompt": prompts,
        "x[/b]\x1b": np.arange(len(prompts)),
    }
    path = write_dump(
        folder / "r[/b].parquet", contract="rollout-dump.v1", batch_id="[/b]\x1b", columns=part
    )
    for row, prompt in enumerate(prompts):
        result = run("show", path, "--sample", row)
        assert result.exit_code == 0
        assert str(path) in result.output.replace("\n", "")
        assert (
            prompt.replace("\x1b", r"\x1b").replace("\x07", r"\x07").replace("\x9b", r"\x9b")
            in result.output
        )
    for arguments in (
        ("show", path),
        ("stats", path),
        ("verify", path),
        ("trend", path, "-f", "x[/b]\x1b"),
        ("show", path, "-s", 3, "--json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 0
        assert not set(result.output) & {"\x1b", "\x07", "\x9b"}
    assert json.loads(run("show", path, "-s", 3, "--json").output)["prompt"] == prompts[3]
    assert "\x1b" not in run("show", tmp_path / "no\x1b[31m.parquet").stderr
