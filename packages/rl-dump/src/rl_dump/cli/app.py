"""The commands.

Each command opens, calls one function of the package, and prints.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_dump.cli.output import (
    counted,
    error_line,
    print_line,
    print_result,
    print_table,
    print_warnings,
)
from rl_dump.errors import DumpError
from rl_dump.reader import Dump, open_dump
from rl_dump.tools.compare import Difference, compare
from rl_dump.tools.convert import convert
from rl_dump.tools.doctor import Thresholds, doctor
from rl_dump.tools.html import write_html
from rl_dump.tools.join import Join, join
from rl_dump.tools.replay import export_micro_batch
from rl_dump.tools.summary import summary, trend

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
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", "-s", help="Show this row instead of the overview.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a dump holds, or one sample of it."""
    with error_line(), open_dump(path) as dump:
        values = None if sample is None else dump.sample(sample)
        if values is None:
            shown = {key: value for key, value in dump.header.items() if key not in _INTERNAL}
            print_result(
                {"path": str(path), **shown}, as_json=as_json, show=lambda: _show_overview(dump)
            )
        else:
            rows = [(name, _short(value)) for name, value in values.items()]
            print_result(
                values,
                as_json=as_json,
                show=lambda: print_table(f"{path}, row {sample}", ["field", "value"], rows),
            )


@app.command(name="join")
def join_command(
    rollout: Annotated[Path, typer.Argument(help="The rollout dump.", show_default=False)],
    train: Annotated[
        Path, typer.Argument(help="The train dump of the same batch.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Match the samples of a rollout dump and a train dump; exit 1 if either side lacks one."""
    with error_line(), open_dump(rollout) as rollout_dump, open_dump(train) as train_dump:
        result = join(rollout_dump, train_dump)
    missing = bool(result.missing_in_rollout or result.missing_in_train)
    print_result(result, as_json=as_json, show=lambda: _show_join(result), found=missing)


@app.command()
def stats(path: DumpPath, as_json: AsJson = False) -> None:
    """Count, range and mean of every field; per-token fields over trained tokens."""
    with error_line(), open_dump(path) as dump:
        found = summary(dump)
    rows = [
        (e.name, e.count, e.minimum, e.mean, e.maximum, e.num_non_finite or "", e.num_missing or "")
        for e in found.fields
    ]
    columns = ["field", "values", "lowest", "mean", "highest", "not finite", "samples without"]
    print_result(
        found,
        as_json=as_json,
        show=lambda: print_table(f"{path}, batch {found.batch_id}", columns, rows),
    )


@app.command(name="trend")
def trend_command(
    paths: Annotated[
        list[Path], typer.Argument(help="Dumps of several batches.", show_default=False)
    ],
    field: Annotated[
        list[str] | None,
        typer.Option(
            "--field", "-f", help="Fields to show; may be given several times.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the means of fields over batches."""
    with error_line():
        batches = trend(paths)
        known = dict.fromkeys(entry.name for batch in batches for entry in batch.fields)
        unknown = [name for name in field or [] if name not in known]
        if unknown:
            raise DumpError(
                f"no dump has the field of numbers {unknown[0]!r}; they have"
                f" {', '.join(known) or 'none'}"
            )
    names = field or [name for name in _TREND if any(batch.field(name) for batch in batches)]
    rows = [
        (
            batch.batch_id,
            batch.num_samples,
            batch.num_dropped,
            *(getattr(batch.field(name), "mean", None) for name in names),
        )
        for batch in batches
    ]
    print_result(
        batches,
        as_json=as_json,
        show=lambda: print_table("means per batch", ["batch", "samples", "dropped", *names], rows),
    )


@app.command()
def diff(
    first: DumpPath,
    second: DumpPath,
    atol: Annotated[float, typer.Option(help="Absolute tolerance of floats.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative tolerance of floats.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Find the first sample, token and field in which two dumps differ; exit 1 if they do."""
    with error_line(), open_dump(first) as one, open_dump(second) as other:
        found = compare(one, other, atol=atol, rtol=rtol)
    print_result(
        {"equal": found is None, "difference": found},
        as_json=as_json,
        show=lambda: _show_difference(found),
        found=found is not None,
    )


@app.command()
def verify(path: DumpPath, as_json: AsJson = False) -> None:
    """Read the whole file, compare every checksum and length; exit 1 if something is wrong."""
    with error_line(), open_dump(path) as dump:
        found = dump.verify()
    rows = [(problem.code, problem.field, problem.row, problem.message) for problem in found]
    print_result(
        {"problems": found},
        as_json=as_json,
        show=lambda: _show_findings(
            path, "problem", ["problem", "field", "row", "what"], rows, none="nothing wrong"
        ),
        found=bool(found),
    )


@app.command(name="doctor")
def doctor_command(
    path: DumpPath,
    mean_gap: Annotated[
        float, typer.Option(help="Alarm above this mean log-prob gap, nats.")
    ] = Thresholds().mean_log_prob_gap,
    truncated: Annotated[
        float, typer.Option(help="Alarm above this part of truncated samples.")
    ] = Thresholds().truncated_fraction,
    zero_std: Annotated[
        float, typer.Option(help="Alarm above this part of groups with one reward.")
    ] = Thresholds().zero_std_fraction,
    as_json: AsJson = False,
) -> None:
    """Look for signs of trouble; exit 1 if there is one."""
    limits = Thresholds(
        mean_log_prob_gap=mean_gap, truncated_fraction=truncated, zero_std_fraction=zero_std
    )
    with error_line(), open_dump(path) as dump:
        alarms = doctor(dump, limits)
    rows = [(alarm.code, alarm.row, alarm.message) for alarm in alarms]
    print_result(
        {"alarms": alarms},
        as_json=as_json,
        show=lambda: _show_findings(path, "alarm", ["alarm", "row", "what"], rows, none="no alarm"),
        found=bool(alarms),
    )


@app.command(name="convert")
def convert_command(
    source: DumpPath,
    target: Annotated[
        Path,
        typer.Argument(
            help="The file to write: .parquet or .pt (needs torch).", show_default=False
        ),
    ],
) -> None:
    """Write a dump to the other container, without loss."""
    with error_line():
        convert(source, target)
    print_line(f"wrote {target}")


@app.command()
def html(
    path: DumpPath,
    target: Annotated[
        Path | None,
        typer.Argument(help="The page to write; default: beside the dump.", show_default=False),
    ] = None,
    rollout: Annotated[
        Path | None,
        typer.Option(help="The rollout dump of the same batch, for its texts.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json or its folder, for the text of tokens.", show_default=False
        ),
    ] = None,
    max_megabytes: Annotated[
        int, typer.Option(min=1, help="Size of the tokens' part of the page.")
    ] = 48,
) -> None:
    """Write one self-contained page to look through the samples."""
    page = path.with_suffix(".html") if target is None else target
    with error_line(), contextlib.ExitStack() as stack:
        dump = stack.enter_context(open_dump(path))
        texts = None if rollout is None else stack.enter_context(open_dump(rollout))
        write_html(
            dump, page, rollout=texts, tokenizer=tokenizer, max_token_bytes=max_megabytes << 20
        )
    print_line(f"wrote {page}")


@app.command()
def replay(
    path: DumpPath,
    target: Annotated[
        Path, typer.Argument(help="The file to write: .parquet or .pt.", show_default=False)
    ],
    step: Annotated[int, typer.Option(help="Optimizer step within the batch.")] = 0,
    rank: Annotated[int, typer.Option(help="Data-parallel rank.")] = 0,
    micro_batch: Annotated[int, typer.Option(help="Micro-batch within the step on that rank.")] = 0,
) -> None:
    """Export one micro-batch as a file that stands for itself."""
    with error_line(), open_dump(path) as dump:
        export_micro_batch(
            dump, target, step=step, data_parallel_rank=rank, micro_batch=micro_batch
        )
    print_line(f"wrote {target}")


def main() -> None:
    """Run the command line; the entry point of `rl-dump`."""
    with print_warnings(logging.getLogger("rl_dump")):
        app()


_INTERNAL = {"row_groups", "checksums"}
"""Keys of a header that only readers of the file need."""
_TREND = (
    "raw_reward",
    "response_lengths",
    "truncated",
    "log_prob_gap",
    "entropy",
    "kl",
    "advantages",
    "kept_set_size",
)


def _show_overview(dump: Dump) -> None:
    header = dump.header
    producer = header["producer"]
    print_line(
        f"{dump.path}: {dump.contract} (minor {header['minor']}), batch {dump.batch_id},"
        f" {dump.num_samples} samples, {len(dump.dp_shards)} shards, {len(dump.dropped)} dropped;"
        f" written by {producer.get('distribution')} {producer.get('version')}"
    )
    rows = [
        (
            name,
            field.kind,
            field.dtype,
            field.stored,
            "yes" if field.response_aligned else "",
            "yes" if field.nullable else "",
        )
        for name, field in dump.fields.items()
    ]
    print_table(
        "fields", ["name", "kind", "dtype", "stored", "per response token", "may be missing"], rows
    )


def _show_join(result: Join) -> None:
    print_line(f"{counted(len(result.pairs), 'sample')} in both")
    for side, missing in (
        ("train", result.missing_in_train),
        ("rollout", result.missing_in_rollout),
    ):
        if missing:
            print_table(
                f"{len(missing)} missing in the {side} dump",
                ["row", "position", "index", "reason"],
                [
                    (entry.row, entry.rollout_position, entry.sample_index, entry.reason)
                    for entry in missing
                ],
            )


def _show_difference(found: Difference | None) -> None:
    if found is None:
        print_line("no difference")
        return
    print_line(found.message)
    print_table("largest difference per field", ["field", "largest"], sorted(found.largest.items()))


def _show_findings(
    path: Path, noun: str, columns: list[str], rows: Sequence[Sequence[object]], *, none: str
) -> None:
    if rows:
        print_table(f"{path}: {counted(len(rows), noun)}", columns, rows)
    else:
        print_line(f"{path}: {none}")


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    shape = (
        f"{getattr(value, 'dtype', '')}{list(getattr(value, 'shape', []))} "
        if hasattr(value, "shape")
        else ""
    )
    return shape + (text if len(text) <= 100 else text[:97] + "...")
