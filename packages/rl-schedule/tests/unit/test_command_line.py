"""The command line: files and steps of every kind, a cap of one's own, the end of a pipe."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_schedule.cli import main


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_check_takes_a_cap_of_your_own(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000", "--json") == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    assert run("check", path, lengths, "--max-tokens-per-gpu", "2000") == 0
    assert run("check", path, lengths, "--max-tokens-per-gpu", "4000") == 0
    capsys.readouterr()
    assert run("check", path, lengths, "--max-tokens-per-gpu", "1000", "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["promise"] for problem in problems} == {"P6"}
    assert run("plan", lengths, "--dp", "4", "--micro-batch-size", "7", "--json") == 0
    path.write_text(capsys.readouterr().out)
    assert run("check", path, lengths) == 0
    assert run("check", path, lengths, "--max-tokens-per-gpu", "500") == 1


def test_a_plan_whose_cap_was_altered_is_refused(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", lengths, "--dp", "4", "--max-tokens-per-gpu", "9216", "--json") == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out.replace("9216", "99999"))
    assert run("check", path, lengths) == 2
    assert "altered" in capsys.readouterr().err


def test_steps_of_given_sizes(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """30 rollouts in steps of 4, 6 and 20."""
    options = ("--dp", "2", "--max-tokens-per-gpu", "2000", "--json")
    for more in (
        ("--global-batch-size", "4,6,20"),
        ("--global-batch-size", "4,6,20", "--splitter", "sizes"),
    ):
        assert run("plan", lengths, *options, *more) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["arrays"]["global_batch_sizes"]["data"] == [4, 6, 20]
    assert run("plan", lengths, *options, "--global-batch-size", "30", "--splitter", "sizes") == 0
    assert run("plan", lengths, *options, "--splitter", "all") == 0
    assert run("plan", lengths, *options, "--global-batch-size", "4,x") == 2
    assert run("plan", lengths, *options, "--global-batch-size", "4,6", "--splitter", "fixed") == 2
    assert run("plan", lengths, *options, "--splitter", "sizes") == 2


def test_limits_of_micro_batches_have_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batch.csv"
    path.write_text("length,rollout_id,sample_cost\n" + "9,a,3\n" * 4 + "9,b,1\n" * 4)
    options = ("--dp", "2", "--max-tokens-per-gpu", "99", "--max-samples-per-micro-batch", "2")
    assert run("plan", path, *options, "--equal-samples", "--pad-to-longest") == 0
    assert "2" in capsys.readouterr().out
    assert run("plan", path, *options, "--equal-samples", "--pad-to-longest", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["arrays"]["num_microbatches"]["data"] == [2]
    assert document["rollout_names"] == ["a", "b"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    assert run("check", saved, path) == 0
    assert run("compare", path, "--dp", "2", "--max-tokens-per-gpu", "99") == 0


def test_extra_micro_batches_can_be_forbidden(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--dp", "2", "--max-tokens-per-gpu", "2000", "--json")
    for value, found in (("0", 0), ("auto", "auto")):
        assert run("plan", lengths, *options, "--extra-micro-batches", value) == 0
        assert json.loads(capsys.readouterr().out)["settings"]["extra_micro_batches"] == found


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"rl-schedule \S+\n", capsys.readouterr().out)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="this system has no SIGPIPE")
def test_a_reader_that_goes_away_ends_it_by_the_signal(lengths: Path) -> None:
    """As `cat` does: 128 + 13 for a shell, and not a word on stderr."""
    command = "from rl_schedule.cli import main; main()"
    with subprocess.Popen(
        [
            *(sys.executable, "-c", command, "plan", lengths, "--dp", "2", "--json"),
            *("--max-tokens-per-gpu", "2000"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_output_to_a_full_disk_is_one_line(lengths: Path, options: tuple[str, ...]) -> None:
    command = ["plan", str(lengths), "--dp", "4", "--max-tokens-per-gpu", "2000", *options]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rl_schedule", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == ("rl-schedule: the output cannot be written: No space left on device\n")


def test_an_empty_splitter_is_refused(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", lengths, "--dp", "4", "--max-tokens-per-gpu", "2000", "--splitter", "")
    assert run(*command) == 2
    assert "splitter must be" in capsys.readouterr().err
