"""`rl-topp stats` on small dumps, good and bad."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_topp.cli import app
from rl_topp.stats import nucleus_stats

typer_testing = pytest.importorskip("typer.testing")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
stats_of_dump = pytest.importorskip("rl_topp.parquet").stats_of_dump

COLUMNS: dict[str, list[Any]] = {
    "nucleus_ids": [[1, 2, 3], None, [4, 5]],
    "nucleus_offsets": [[0, 1, 3, 3], None, [0, 2]],
    "nucleus_status": [[0, 0, 2], None, [0]],
    "loss_masks": [[1, 1, 0], [1], [1]],
    "rollout_log_probs": [[0.0, -0.5, 0.0], [-1.0], [-0.25]],
    "rollout_full_log_probs": [[-0.1, -0.6, 0.0], None, [-0.35]],
    "log_probs": [[0.0, -0.5, 9.0], [-1.0], [-0.2]],
}


def _dump(path: Path, columns: dict[str, Any], contract: str | None = "train-dump.v2") -> Path:
    table = pa.table(columns)
    if contract is not None:
        table = table.replace_schema_metadata(
            {"rl_dump": json.dumps({"contract": contract, "minor": 0})}
        )
    pq.write_table(table, path)
    return path


def _dump_with_header(path: Path, header: bytes) -> Path:
    pq.write_table(pa.table(COLUMNS).replace_schema_metadata({"rl_dump": header}), path)
    return path


def _run(*arguments: str) -> Any:
    return typer_testing.CliRunner().invoke(app, list(arguments))


def test_figures_leave_out_tool_tokens_and_samples_without_sets(tmp_path: Path) -> None:
    """Sizes 1, 2, 2: tool token and sample without sets are left out; kept masses are exp(-0.1)."""
    result = _run("stats", str(_dump(tmp_path / "d.parquet", COLUMNS)), "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["num_tokens"] == figures["num_kept"] == 3
    assert figures["mean_size"] == pytest.approx(5 / 3)
    assert figures["median_size"] == 2
    assert figures["singleton_fraction"] == pytest.approx(1 / 3)
    assert figures["wire_bytes_per_token"] == pytest.approx((4 * 5 + 5 * 3) * 4 / 3 / 3)
    assert figures["mean_kept_mass"] == pytest.approx(math.exp(-0.1), abs=1e-6)
    assert figures["mean_log_ratio_without_replay"] == pytest.approx(-0.1, abs=1e-6)
    assert figures["max_log_ratio_with_replay"] == pytest.approx(0.05, abs=1e-6)


def test_the_table_says_no_data_where_a_column_is_missing(tmp_path: Path) -> None:
    columns = {
        name: values
        for name, values in COLUMNS.items()
        if name not in ("rollout_full_log_probs", "log_probs")
    }
    result = _run("stats", str(_dump(tmp_path / "d.parquet", columns, "rollout-dump.v1")))
    assert result.exit_code == 0, result.output
    assert "kept ids, mean" in result.stdout
    assert "no data" in result.stdout


@pytest.mark.parametrize(
    ("columns", "contract", "words"),
    [
        (COLUMNS, "train-dump.v3", "train-dump.v3"),
        (COLUMNS, None, "no key 'rl_dump'"),
        ({"loss_masks": COLUMNS["loss_masks"]}, "train-dump.v2", "nucleus_offsets, nucleus_status"),
        ({**COLUMNS, "nucleus_offsets": [[0, 1, 3], None, [0, 2]]}, "train-dump.v2", "sample 0"),
        ({**COLUMNS, "log_probs": [[0.0] * 3, [0.0], [0.0, 1.0]]}, "train-dump.v2", "log_probs"),
        ({**COLUMNS, "log_probs": [0.0, 0.0, 0.0]}, "train-dump.v2", "list per sample"),
    ],
)
def test_a_dump_that_does_not_fit_is_one_line_and_exit_2(
    columns: dict[str, Any], contract: str | None, words: str, tmp_path: Path
) -> None:
    result = _run("stats", str(_dump(tmp_path / "d.parquet", columns, contract)))
    assert result.exit_code == 2
    assert words in result.stderr
    assert "d.parquet" in result.stderr
    assert "Traceback" not in result.output


INT, UINT8, FLOAT, TEXT = (
    pa.list_(kind) for kind in (pa.int64(), pa.uint8(), pa.float32(), pa.string())
)


@pytest.mark.parametrize(
    ("name", "column", "words"),
    [
        (
            "nucleus_offsets",
            pa.array([[0, 5, 3, 3], None, [0, 2]], INT),
            "sample 0 has 3 in nucleus_offsets",
        ),
        (
            "nucleus_offsets",
            pa.array([[7, 8, 10, 10], None, [0, 2]], INT),
            "sample 0 has 7 in nucleus_offsets",
        ),
        (
            "nucleus_offsets",
            pa.array([[0, 1, 3, 3], None, [0, -2]], INT),
            "sample 1 has -2 in nucleus_offsets",
        ),
        ("nucleus_offsets", pa.array([[0, None, 3, 3], None, [0, 2]], INT), "1 null entries"),
        ("nucleus_offsets", pa.array([None, None, [0, 2]], INT), "sample 0 has 0 nucleus_offsets"),
        (
            "nucleus_offsets",
            pa.array([[0, 1, 1, 1], None, [0, 2]], INT),
            "sample 0 has 0 in nucleus_status",
        ),
        (
            "nucleus_offsets",
            pa.array([[0, 1, 3, 4], None, [0, 2]], INT),
            "sample 0 has 2 in nucleus_status",
        ),
        (
            "nucleus_status",
            pa.array([[0, 9, 2], None, [0]], UINT8),
            "sample 0 has 9 in nucleus_status",
        ),
        (
            "nucleus_status",
            pa.array([[0, 0, 2], None, [256]], INT),
            "sample 1 has 256 in nucleus_status",
        ),
        ("nucleus_status", pa.array([[0, None, 2], None, [0]], UINT8), "1 null entries"),
        ("nucleus_status", pa.array([["a", "b", "c"], None, ["d"]], TEXT), "of integers"),
        ("nucleus_status", pa.array([[[0], [0], [2]], None, [[0]]], pa.list_(INT)), "of integers"),
        ("loss_masks", pa.array([None, [1], [1]], INT), "sample 0 has 0 loss_masks"),
        ("loss_masks", pa.array([[1, 2, 0], [1], [1]], INT), "sample 0 has 2 in loss_masks"),
        ("loss_masks", pa.array([["a", "b", "c"], ["d"], ["e"]], TEXT), "of integers"),
        ("log_probs", pa.array([["a", "b", "c"], ["d"], ["e"]], TEXT), "of floating-point numbers"),
        ("log_probs", pa.array([[None, -0.5, 0.0], [-1.0], [-0.2]], FLOAT), "1 null entries"),
    ],
)
def test_a_column_that_cannot_be_what_it_is_called_gives_no_figure(
    name: str, column: Any, words: str, tmp_path: Path
) -> None:
    result = _run("stats", str(_dump(tmp_path / "d.parquet", {**COLUMNS, name: column})), "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table(COLUMNS).append_column("loss_masks", pa.array(COLUMNS["loss_masks"]))
    path = tmp_path / "d.parquet"
    pq.write_table(
        table.replace_schema_metadata({"rl_dump": json.dumps({"contract": "train-dump.v2"})}), path
    )
    result = _run("stats", str(path))
    assert result.exit_code == 2
    assert "more than one column loss_masks" in result.stderr


def test_a_footer_with_a_name_that_is_not_text_is_one_line_and_exit_2(tmp_path: Path) -> None:
    path = _dump(tmp_path / "d.parquet", COLUMNS)
    path.write_bytes(
        path.read_bytes().replace(b"rollout_full_log_probs", b"\xff\xferollout_log_probs_\xff")
    )
    result = _run("stats", str(path))
    assert result.exit_code == 2
    assert "cannot be read as Parquet" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_damaged_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    path = _dump(tmp_path / "d.parquet", COLUMNS)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        result = _run("stats", str(path), "--json")
        assert result.exit_code in (0, 2), result.exception


def test_a_log_prob_above_zero_leaves_json_json(tmp_path: Path) -> None:
    """A full log-prob of 1e4 makes the kept mass infinite: no figure, no `Infinity` in the JSON."""
    columns = {**COLUMNS, "rollout_full_log_probs": [[1e4, -0.6, 0.0], [-1.5], [-0.35]]}
    result = _run("stats", str(_dump(tmp_path / "d.parquet", columns)), "--json")
    assert result.exit_code == 0, result.output

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(result.stdout, parse_constant=refuse)["mean_kept_mass"] is None


def test_brackets_are_text_in_help_titles_and_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "rl-topp[parquet]" in _run("stats", "--help").stdout
    folder = tmp_path / "[red]x"
    folder.mkdir()
    _dump(folder / "[bold]d.parquet", COLUMNS)
    monkeypatch.chdir(folder)
    assert "[bold]d.parquet" in _run("stats", "[bold]d.parquet").stdout
    assert "[bold]e.parquet" in _run("stats", "[bold]e.parquet").stderr


def test_a_field_that_some_samples_lack_counts_where_it_is(tmp_path: Path) -> None:
    """Sample 2 has no log-probs over the vocabulary; two tokens alone say what the kept mass is."""
    columns = {**COLUMNS, "rollout_full_log_probs": [[-0.1, -0.7, 0.0], [-1.5], None]}
    result = _run("stats", str(_dump(tmp_path / "d.parquet", columns)), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["mean_kept_mass"] == pytest.approx(
        (math.exp(-0.1) + math.exp(-0.2)) / 2, abs=1e-6
    )


def test_a_dump_without_samples_has_no_data(tmp_path: Path) -> None:
    table = pa.table(
        {
            name: pa.array([], pa.list_(pa.float32() if "log" in name else pa.int64()))
            for name in COLUMNS
        }
    )
    path = tmp_path / "d.parquet"
    pq.write_table(
        table.replace_schema_metadata(
            {"rl_dump": json.dumps({"contract": "train-dump.v2", "minor": 0})}
        ),
        path,
    )
    result = _run("stats", str(path), "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["num_tokens"] == 0
    assert figures["mean_size"] is None


def test_a_dump_of_a_newer_minor_is_read_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = _dump_with_header(tmp_path / "d.parquet", b'{"contract": "train-dump.v2", "minor": 97}')
    with caplog.at_level(logging.WARNING, logger="rl_topp"):
        figures = [stats_of_dump(newer) for _ in range(2)]
    assert figures[0] == figures[1]
    assert figures[0].num_tokens == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "minor 97" in caplog.text


@pytest.mark.parametrize(
    ("header", "words"), [(b"not JSON", "is not JSON"), (b"[1]", "expected an object")]
)
def test_a_header_that_is_not_an_object_is_one_line_and_exit_2(
    header: bytes, words: str, tmp_path: Path
) -> None:
    result = _run("stats", str(_dump_with_header(tmp_path / "d.parquet", header)))
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rl_topp.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = _run("stats", str(tmp_path / "d.parquet"))
    assert result.exit_code == 2
    assert "rl-topp[parquet]" in result.stderr


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing"])
def test_a_file_that_is_not_parquet_is_one_line_and_exit_2(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(content)
    result = _run("stats", str(tmp_path / "broken.parquet"))
    assert result.exit_code == 2
    assert "broken.parquet" in result.stderr
    assert _run("stats", str(tmp_path / "absent.parquet")).exit_code == 2


def test_nothing_trained_is_no_data_not_zero() -> None:
    figures = nucleus_stats(
        set_sizes=np.array([3]), status=np.zeros(1, np.uint8), loss_masks=np.zeros(1, np.int32)
    )
    assert figures.num_tokens == 0
    assert figures.mean_size is figures.wire_bytes_per_token is figures.mean_kept_mass is None
