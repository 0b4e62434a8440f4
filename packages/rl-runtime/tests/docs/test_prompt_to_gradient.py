"""The page "From a prompt to a gradient" lists the records and names that the code has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "prompt-to-gradient.md").read_text(encoding="utf-8")
SOURCES = Path(__file__).parents[2] / "src" / "rl_runtime"
ON_THE_WAY = [
    "records",
    "rollout",
    "engine",
    "batch",
    "training",
    "algorithms",
    "megatron/attention.py",
    "megatron/attention_plan.py",
]
"""Where a batch passes through."""
NOT_A_BATCH = {"LogProbProvenance"}
"""A record there that holds no piece of a batch: it says how a run scores."""
HOLDERS = {
    "RankBatch",
    "MicroBatch",
    "PackedStream",
    "AttentionPlan",
    "ResponseScores",
    "PolicyLoss",
    "NucleusSet",
    "Column",
    "RaggedArray",
}
"""Types of what holds a batch inside a trainer, or a piece of one."""


def trees(*places: str) -> Iterator[tuple[Path, ast.Module]]:
    for place in places:
        path = SOURCES / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def is_record(node: ast.AST) -> bool:
    """Whether a node defines a public dataclass, TypedDict or NamedTuple."""
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return False
    marks = [*node.decorator_list, *node.bases]
    return any(
        re.search(r"\b(dataclass|TypedDict|NamedTuple)\b", ast.unparse(mark)) for mark in marks
    )


def column_of_table(heading: str, *, column: int) -> list[str]:
    """The code spans in one column of the table under a heading of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[column] for line in section.splitlines() if line.startswith("| `")]
    return [cell.strip().strip("`") for cell in rows]


def declared_names(tree: ast.Module) -> Iterator[str]:
    """Names of arguments, fields and variables that are declared to hold a piece of a batch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        else:
            continue
        if annotation is not None and HOLDERS & set(re.findall(r"\w+", ast.unparse(annotation))):
            yield name


def test_the_records_on_the_way_are_those_of_the_page_and_at_most_14() -> None:
    found = {
        node.name
        for _, tree in trees(*ON_THE_WAY)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and is_record(node)
    }
    listed = column_of_table("The records", column=1)
    assert sorted(listed) == sorted(found - NOT_A_BATCH)
    assert len(listed) <= 14
    drawn = PAGE.split("## The records")[0]
    assert [record for record in listed if record not in drawn] == []


def test_each_record_is_made_where_the_page_says() -> None:
    records = column_of_table("The records", column=1)
    places = column_of_table("The records", column=2)
    wrong = []
    for record, place in zip(records, places, strict=True):
        text = (SOURCES / f"{place.replace('.', '/')}.py").read_text(encoding="utf-8")
        # `read_generation` makes the Generation, `sample` the Sample: named there all the same.
        if not re.search(rf"\b{record}\(|-> .*\b{record}\b", text):
            wrong.append((record, place))
    assert wrong == []


def test_the_names_of_a_batch_in_the_trainer_are_those_of_the_page_and_at_most_12() -> None:
    found = {name for _, tree in trees("training") for name in declared_names(tree)}
    listed = column_of_table("Names of a batch inside the trainer", column=1)
    assert sorted(listed) == sorted(found)
    assert len(listed) <= 12
