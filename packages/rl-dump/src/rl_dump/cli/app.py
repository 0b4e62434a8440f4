"""Decide which commands there are.

Layer: cli. Each command opens, calls one function of the package, and prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_dump.cli.output import error_line, print_json, print_line, print_table
from rl_dump.join import join
from rl_dump.reader import Dump, open_dump

__all__ = ["app", "main"]

app = typer.Typer(
    name="rl-dump",
    help="Look into dumps: what was generated, and what was trained on, sample by sample.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DumpPath = Annotated[Path, typer.Argument(help="A dump: .parquet or .pt.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def show(
    path: DumpPath,
    sample: Annotated[int | None, typer.Option("--sample", "-s", help="Show this row instead of the overview.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a dump holds, or one sample of it."""
    with error_line(), open_dump(path) as dump:
        if sample is None:
            _show_overview(dump, as_json=as_json)
        else:
            values = dump.sample(sample)
            if as_json:
                print_json(values)
            else:
                print_table(f"{path}, row {sample}", ["field", "value"], [(name, _short(value)) for name, value in values.items()])


@app.command(name="join")
def join_command(
    rollout: Annotated[Path, typer.Argument(help="The rollout dump.", show_default=False)],
    train: Annotated[Path, typer.Argument(help="The train dump of the same batch.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Match the samples of a rollout dump and a train dump; exit 1 if one is missing on either side."""
    with error_line(), open_dump(rollout) as rollout_dump, open_dump(train) as train_dump:
        result = join(rollout_dump, train_dump)
    if as_json:
        print_json(result)
    else:
        print_line(f"{len(result.pairs)} samples in both")
        for side, missing in (("train", result.missing_in_train), ("rollout", result.missing_in_rollout)):
            if missing:
                rows = [(entry.row, entry.rollout_position, entry.sample_index, entry.reason) for entry in missing]
                print_table(f"{len(missing)} missing in the {side} dump", ["row", "position", "index", "reason"], rows)
    if result.missing_in_rollout or result.missing_in_train:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; the entry point of `rl-dump`."""
    app()


def _show_overview(dump: Dump, *, as_json: bool) -> None:
    header = dump.header
    if as_json:
        print_json({"path": str(dump.path), **{key: value for key, value in header.items() if key not in {"row_groups", "checksums"}}})
        return
    producer = header["producer"]
    print_line(
        f"{dump.path}: {dump.contract} (minor {header['minor']}), batch {dump.batch_id}, {dump.num_samples} samples, "
        f"{len(dump.dp_shards)} shards, {len(dump.dropped)} dropped; written by {producer.get('distribution')} {producer.get('version')}"
    )
    rows = [
        (name, field.kind, field.dtype, field.stored, "yes" if field.response_aligned else "", "yes" if field.nullable else "")
        for name, field in dump.fields.items()
    ]
    print_table("fields", ["name", "kind", "dtype", "stored", "per response token", "may be missing"], rows)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    shape = f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', []))} " if hasattr(value, "shape") else ""
    return shape + (text if len(text) <= 100 else text[:97] + "...")
