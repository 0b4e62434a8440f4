"""The command line: exit codes, and one line each for what is wrong; nothing is started."""

from pathlib import Path
from typing import Never

import pytest
from typer.testing import CliRunner, Result

from rl_runtime.cli import app as cli
from rl_runtime.cli import train as train_page
from rl_runtime.config import Recipe

RECIPE = str(Path(__file__).parents[4] / "recipes" / "quickstart.toml")


def train(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli.app, ["train", *arguments, "--set", f"run.dir={tmp_path / 'run'}"]
    )


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["/no/such/recipe.toml"], ["/no/such/recipe.toml: No such file"]),
        ([str(Path(__file__).parent)], ["Is a directory"]),
        ([RECIPE, "--set", "optimizer.learning_rate=1"], ["unknown key optimizer.learning_rate"]),
        ([RECIPE, "--set", "train.num_batches=many"], ["train.num_batches", "'many'"]),
        (
            [RECIPE, "--set", "model.path=/no/such/model", "--set", "reward.function=nonsense"],
            ["model.path = /no/such/model", "reward.function"],
        ),
    ],
    ids=["missing recipe", "recipe is a folder", "wrong key", "wrong type", "two problems"],
)
def test_what_is_wrong_is_one_line_each_with_exit_code_2(
    tmp_path: Path, arguments: list[str], mentions: list[str]
) -> None:
    result = train(tmp_path, *arguments)
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert len(lines) == (2 if len(arguments) == 5 else 1)
    assert all(line.startswith("error: ") for line in lines)
    assert all(mention in result.output for mention in mentions)
    assert not (tmp_path / "run").exists()


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(recipe: Recipe) -> Never:
        recipe.run.dir.mkdir(parents=True)
        raise error

    monkeypatch.setattr(train_page, "_run", run)


def test_a_failed_run_ends_with_exit_code_1_and_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(monkeypatch, RuntimeError("engine 0 is dead"))
    result = train(tmp_path, RECIPE)
    assert (result.exit_code, result.output) == (1, "error: RuntimeError: engine 0 is dead\n")


def test_an_interrupted_run_ends_with_exit_code_130_and_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(monkeypatch, KeyboardInterrupt())
    result = train(tmp_path, RECIPE)
    assert (result.exit_code, result.output) == (
        130,
        f"interrupted: everything was stopped; what was written is in {tmp_path / 'run'}\n",
    )


def test_a_report_of_no_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert str(tmp_path / "none") in result.output
