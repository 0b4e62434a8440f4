"""Each tool of this folder finds what it is for, and nothing where there is nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import changelogs
import pytest
import skeleton
import skipped
import statements

MODULE = '''"""The idea."""

__all__ = ["double"]


def double(x):
    """Double it."""
    return 2 * x
'''


def written(folder: Path, text: str, name: str = "module.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path) -> list[str]:
    return [
        problem
        for check in (skeleton.size_problems, skeleton.text_problems, skeleton.module_problems)
        for problem in check(path)
    ]


def test_a_module_that_keeps_the_rules_has_no_problem(tmp_path: Path) -> None:
    assert problems(written(tmp_path, MODULE)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MODULE + "#\n" * 400, "lines, at most 400"),
        (MODULE + "\n\ndef f():\n    '''Long.'''\n" + "    print()\n" * 80, "function f has 82"),
        (MODULE.replace('"""The idea."""', "import os"), "has no docstring"),
        (MODULE.replace('    """Double it."""\n', ""), "double has no docstring"),
        (MODULE.replace("__all__", "names"), "declares no __all__"),
        (MODULE + "# see `" + "`double`" + "`\n", "double backticks"),
        (MODULE + "if double:\n    m = 'no'\n    raise ValueError(m)\n", "write it in the raise"),
    ],
)
def test_what_breaks_a_rule_is_told_once(tmp_path: Path, text: str, told: str) -> None:
    found = problems(written(tmp_path, text))
    assert len(found) == 1, found
    assert told in found[0]


def test_a_name_that_says_nothing_is_told(tmp_path: Path) -> None:
    assert "the name says nothing" in problems(written(tmp_path, MODULE, "utils.py"))[0]


def test_only_a_package_that_writes_a_contract_needs_one(tmp_path: Path) -> None:
    project = '[project]\nname = "rl-x"\n'
    package = written(tmp_path, project, "rl-x/pyproject.toml").parent
    parts = {Path(line.split(":")[0]).name for line in skeleton.missing_parts(package)}
    assert {"errors.py", "README.md"} <= parts
    assert not {"contract.py", "schemas", "pyproject.toml"} & parts
    writes = '\n[project.entry-points."rl.contracts.writes"]\n"x.v1" = "rl_x.contract"\n'
    written(tmp_path, project + writes, "rl-x/pyproject.toml")
    parts = {Path(line.split(":")[0]).name for line in skeleton.missing_parts(package)}
    assert {"contract.py", "schemas"} <= parts


def test_copies_of_the_machinery_of_headers_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        written(tmp_path, MODULE, f"{name}/src/{name}/contract_header.py")
    packages = [tmp_path / name for name in ("a", "b", "c")]
    assert list(skeleton.differing_copies(packages)) == []
    written(tmp_path, MODULE + "\n", "b/src/b/contract_header.py")
    assert len(list(skeleton.differing_copies(packages))) == 1


def test_docstrings_are_no_statements() -> None:
    assert statements.count_statements(MODULE) == 3  # the assignment, the function, its return


def test_only_a_session_whose_interpreter_is_there_counts_as_skipped() -> None:
    reason = "Python interpreter 3.10 not found"
    sessions: list[dict[str, Any]] = [
        {"signatures": ["alone(rl-x-3.10)"], "result": "skipped", "reason": reason},
        {"signatures": ["alone(rl-x-3.12)"], "result": "success", "reason": None},
    ]
    report = {"sessions": sessions}
    assert skipped.skipped_though_present(report, ["3.11"]) == []
    assert skipped.skipped_though_present(report, ["3.10", "3.11"]) == ["alone(rl-x-3.10)"]


def test_fragments_make_a_draft_and_an_unknown_type_is_an_error(tmp_path: Path) -> None:
    config = tmp_path / "pyproject.toml"
    shutil.copy(skeleton.ROOT / "pyproject.toml", config)
    (tmp_path / ".ci").mkdir()
    shutil.copy(skeleton.ROOT / ".ci" / "changelog.jinja", tmp_path / ".ci")
    package = tmp_path / "packages" / "rl-x"
    written(package, "# Changelog\n\n<!-- next entry -->\n", "CHANGELOG.md")
    written(package, "Reads `y.v1`.\n", "changes/reads-y.contracts.md")
    status, printed = changelogs.draft(package, config)
    assert status == 0, printed
    assert "### Contracts\n\n- Reads `y.v1`.\n" in printed
    written(package, "Better.\n", "changes/better.improved.md")
    status, printed = changelogs.draft(package, config)
    assert status == 1
    assert "better.improved.md" in printed
