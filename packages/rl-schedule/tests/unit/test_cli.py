"""The command line end to end, in this process."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs
from rl_schedule.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_plan_prints_steps_ranks_and_bounds(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "plan",
            lengths,
            "--dp",
            "4",
            "--max-tokens-per-gpu",
            "2000",
            "--global-batch-size",
            "10",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "step 2" in out
    assert "No plan can have fewer" in out
    assert re.search(r"planned in [\d.]+ ms; digest [0-9a-f]{12}", out)


def test_plan_with_a_model_gives_seconds(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    arguments = (
        "--dp",
        "2",
        "--cp",
        "2",
        "--tp",
        "2",
        "--pp",
        "2",
        "--vpp",
        "2",
        "--max-tokens-per-gpu",
        "1000",
        "--sync-seconds",
        "0.5",
    )
    assert run("plan", lengths, *arguments, "--model", model, "--tflops", "0.001") == 0
    assert re.search(r"\d s ", capsys.readouterr().out)


def test_the_document_of_plan_passes_check(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--dp",
        "4",
        "--cp",
        "2",
        "--max-tokens-per-gpu",
        "1000",
        "--rank-slack",
        "auto",
        "--json",
    )
    assert run("plan", lengths, *arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["pad_to_multiple"] == 4
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert run("check", path, lengths) == 0
    assert "P1-P13 hold for 60 samples" in capsys.readouterr().out
    assert run("check", path, lengths, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"digest": document["digest"], "problems": []}


def test_check_finds_that_a_plan_is_for_other_lengths(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000", "--json") == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    longer = tmp_path / "longer.jsonl"
    rows = [json.loads(line) for line in lengths.read_text().splitlines()]
    longer.write_text(
        "".join(json.dumps({**row, "total_length": 2 * row["total_length"]}) + "\n" for row in rows)
    )
    assert run("check", path, longer) == 1
    assert "P6" in capsys.readouterr().out
    assert run("check", path, longer, "--json") == 1
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["promise"] for problem in found} <= {"P6", "P10"}
    assert found[0]["samples"]


def test_check_says_what_it_cannot_check(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in lengths.read_text().splitlines()]
    plan = rs.build_dp_schedule(
        total_lengths=[row["total_length"] for row in rows],
        rollout_ids=[row["rollout_id"] for row in rows],
        global_batch_size=30,
        dp_size=2,
        max_tokens_per_gpu=2000,
        cost=np.sqrt,
        rank_slack="auto",
    )
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_document()))
    assert run("check", path, lengths) == 0
    assert "P10 was not checked" in " ".join(capsys.readouterr().out.split())


def test_compare_shows_every_method(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000") == 0
    out = capsys.readouterr().out
    for method in (
        "first-fit + strided",
        "first-fit + KK",
        "FFD + KK",
        "rl-schedule tokens",
        "rl-schedule flops",
        "slack auto",
    ):
        assert method in out
    assert run("compare", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["over_cap"] for row in rows] == [0] * 6
    assert min(rows, key=lambda row: row["rank_imbalance"])["method"].startswith(
        "rl-schedule flops"
    )


def test_the_picture_is_one_file_that_loads_nothing(lengths: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run("plan", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000", "--html", page) == 0
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|@import|url\(|fetch\(", text)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found.group(1))
    assert [lane["rank"] for lane in data["steps"][0]["lanes"]] == [0, 1, 2, 3]
    assert sum(batch[0] for lane in data["steps"][0]["lanes"] for batch in lane["batches"]) == 60


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "none.jsonl", "--dp", "2", "--max-tokens-per-gpu", "9"], 2, "no such file"),
        (["plan", "{lengths}", "--dp", "2"], 2, "exactly one of"),
        (
            ["plan", "{lengths}", "--dp", "2", "--max-tokens-per-gpu", "9", "--rank-slack", "much"],
            2,
            "--rank-slack",
        ),
        (
            [
                "plan",
                "{lengths}",
                "--dp",
                "2",
                "--max-tokens-per-gpu",
                "9",
                "--on-oversized",
                "error",
            ],
            1,
            "exceed the cap of 9",
        ),
        (
            [
                "plan",
                "{lengths}",
                "--dp",
                "2",
                "--max-tokens-per-gpu",
                "2000",
                "--model",
                "{lengths}",
            ],
            2,
            "cannot be read as JSON",
        ),
        (["check", "{lengths}", "{lengths}"], 2, "cannot be read as JSON"),
        (["check", "none.json", "{lengths}"], 2, "cannot be read as JSON"),
        (["plan", "{lengths}"], 2, "--dp"),
        (
            ["plan", "{lengths}", "--dp", "100000000", "--max-tokens-per-gpu", "9"],
            2,
            "is the number right",
        ),
        (
            [
                "plan",
                "{lengths}",
                "--dp",
                "2",
                "--max-tokens-per-gpu",
                "9",
                "--pad-to-multiple",
                "9999999999999",
            ],
            2,
            "pad_to_multiple",
        ),
        (
            [
                "plan",
                "{lengths}",
                "--dp",
                "2",
                "--max-tokens-per-gpu",
                "2000",
                "--html",
                "/none/page.html",
            ],
            2,
            "--html /none/page.html",
        ),
        (["plan", "{lengths}", "--dp", "0"], 2, "--dp"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    lengths: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert run(*(argument.format(lengths=lengths) for argument in arguments)) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_a_file_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(b"5\n\xff\xfe\n")
    assert run("plan", str(path), "--dp", "1", "--max-tokens-per-gpu", "9") == 2
    assert "byte 2 is not UTF-8" in capsys.readouterr().err


def test_a_plan_whose_cost_was_cut_out_is_refused(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", str(lengths), "--dp", "2", "--max-tokens-per-gpu", "2000", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    document["settings"]["cost"] = None
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert run("check", str(path), str(lengths)) == 2
    assert "settings.cost" in capsys.readouterr().err


def test_another_contract_is_refused(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"contract": "schedule-plan.v9"}))
    assert run("check", path, lengths) == 2
    found = capsys.readouterr().err
    assert "schedule-plan.v9" in found
    assert str(path) in found


def test_text_from_the_user_is_data_not_markup(tmp_path: Path) -> None:
    path = tmp_path / "<img onerror=x>.jsonl"
    path.write_text("5\n7\n")
    page = tmp_path / "plan.html"
    assert run("plan", path, "--dp", "1", "--max-tokens-per-gpu", "20", "--html", page) == 0
    assert "<img" not in page.read_text(encoding="utf-8")


def test_dropped_oversized_and_many_ranks_are_mentioned(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    arguments = (
        "--dp",
        "120",
        "--max-tokens-per-gpu",
        "300",
        "--on-oversized",
        "drop",
        "--html",
        page,
    )
    assert run("plan", lengths, *arguments) == 0
    out = capsys.readouterr().out
    assert "dropped:" in out
    assert "oversized:" in out
    assert "8 slowest and 8 fastest of 120 ranks" in " ".join(out.split())
    assert '"ranks":120' in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_columns_that_are_not_used_are_named_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length,uid\n5,a\n6,a\n", encoding="utf-8")
    assert run(command, path, "--dp", "1", "--max-tokens-per-gpu", "16", "--json") == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert "not used: uid; columns are total_length (or total_lengths, length)" in said.err
