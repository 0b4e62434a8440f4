"""How a dump changes its container without changing itself.

Reading needs no torch; writing a `.pt` file does, and imports it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rl_dump.atomic import refuse_input
from rl_dump.columns.fields import Column
from rl_dump.contract import DumpHeader
from rl_dump.errors import DumpError
from rl_dump.parquet import writer as parquet
from rl_dump.reader import open_dump

__all__ = ["convert", "write_columns"]


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Write a dump to another file; the suffixes choose the containers.

    Args:
        source: a dump, ours or slime's; fields keep the contract's names they are read under.
        target: the file to write, `.parquet` or `.pt`.

    Returns:
        The path written.

    Raises:
        DumpError: the source cannot be read, is the target itself, or the target's container is
            unknown or needs torch and there is none.
        WriteError: the file system refused.
    """
    refuse_input(target, source)
    with open_dump(source) as dump:
        return write_columns(target, dump.header, dump.columns())


def write_columns(
    target: str | os.PathLike[str], header: DumpHeader, columns: Mapping[str, Column]
) -> Path:
    """Write columns under a header as it stands, to the container that the suffix names.

    Arguments are those of `rl_dump.parquet.writer.write_columns`, errors those of `convert`.
    """
    path = Path(target)
    if header["num_samples"] and not columns:
        raise DumpError(
            f"{path}: {header['num_samples']} samples without a single field cannot be written"
        )
    if path.suffix == ".pt":
        return _write_archive(path, header, columns)
    if path.suffix != ".parquet":
        raise DumpError(
            f"{path}: cannot tell the container from the suffix {path.suffix!r}; dumps end in"
            " .parquet or .pt"
        )
    return parquet.write_columns(path, header, columns)


def _write_archive(path: Path, header: DumpHeader, columns: Mapping[str, Column]) -> Path:
    try:
        from rl_dump.torch.archive import save_archive
    except ImportError as error:
        raise DumpError(
            f"{path}: writing a .pt file needs torch, which is not installed; `pip install"
            " 'rl-dump[torch]'`, or write .parquet"
        ) from error
    documents = {name: column.field.to_document() for name, column in columns.items()}
    return save_archive(path, {**header, "fields": documents}, columns)
