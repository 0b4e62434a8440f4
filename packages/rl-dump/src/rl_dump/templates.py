"""Which file a batch is written to; templates that would overwrite a batch are refused.

A template is a path with `{batch_id}`; `{rollout_id}` means the same.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from string import Formatter

from rl_dump.errors import DumpError

__all__ = ["check_templates", "resolve_template"]

_ALIASES = frozenset({"batch_id", "rollout_id"})
_WIDTH = re.compile(r"(0?[1-9][0-9]*)?d?")
_PROBES = (*range(12), 99, 100, 101, 110, 111, 999, 1000, 10**6, "eval_0", "eval_1", "eval_10")
"""Batch ids whose paths are compared: those of few and many digits, and words."""
_SUFFIXES = (".parquet", ".pt")


def resolve_template(template: str | os.PathLike[str], *, batch_id: int | str) -> Path:
    """Return the path of one batch's dump.

    Args:
        template: a path with `{batch_id}` (or its alias `{rollout_id}`), with a width if wanted:
            `train_{batch_id:06d}.parquet`.
        batch_id: the batch counter, or a word such as `"eval_3"`.

    Raises:
        DumpError: the template has no such placeholder, another placeholder or format, an unknown
            suffix, or cannot take this `batch_id`.
    """
    text = os.fspath(template)
    _check_placeholders(text)
    if isinstance(batch_id, str) and (
        batch_id in {"", ".", ".."} or any(mark in batch_id for mark in ("/", "\\", "\0"))
    ):
        raise DumpError(
            f"batch_id {batch_id!r} cannot be part of a file name: it must be a number or a word"
            " without slashes"
        )
    try:
        return Path(text.format(batch_id=batch_id, rollout_id=batch_id))
    except (ValueError, TypeError, IndexError) as error:
        raise DumpError(
            f"dump template {text!r} does not take batch_id {batch_id!r}: {error}"
        ) from error


def check_templates(
    *, rollout: str | os.PathLike[str] | None, train: str | os.PathLike[str] | None
) -> None:
    """Refuse, at the start of a run, templates that would lose data.

    Args:
        rollout: template of the rollout dump; None if it is off.
        train: template of the train dump; None if it is off.

    Raises:
        DumpError: a template cannot be resolved (see `resolve_template`), or two batches, of
            one template or of both, get the same path.
    """
    named = {
        name: template
        for name, template in (("dump.rollout", rollout), ("dump.train", train))
        if template is not None
    }
    owners: dict[str, tuple[str, int | str]] = {}
    for (name, template), batch_id in itertools.product(named.items(), _PROBES):
        try:
            path = os.path.realpath(resolve_template(template, batch_id=batch_id))
        except DumpError:
            if isinstance(batch_id, str):  # A word under a format of numbers has no path.
                continue
            raise
        other, other_id = owners.setdefault(path, (name, batch_id))
        if other != name:
            raise DumpError(
                f"{other} for batch {other_id} and {name} for batch {batch_id} both write to"
                f" {path}; give them different paths"
            )
        if other_id != batch_id:
            raise DumpError(
                f"{name}: template {os.fspath(template)!r} gives batches {other_id} and {batch_id}"
                f" the same path {path}"
            )


def _check_placeholders(text: str) -> None:
    try:
        parts = [
            (name, spec or "", conversion)
            for _, name, spec, conversion in Formatter().parse(text)
            if name is not None
        ]
    except ValueError as error:
        raise DumpError(f"dump template {text!r} is not a format string: {error}") from error
    for name, spec, conversion in parts:
        if name not in _ALIASES:
            raise DumpError(
                f"dump template {text!r} has the unknown placeholder {{{name}}}; use {{batch_id}}"
            )
        if conversion is not None or not _WIDTH.fullmatch(spec):
            raise DumpError(
                f"dump template {text!r} has the format {spec!r}; only a width is allowed, because"
                " others can give two batches one path: {batch_id:06d}"
            )
    if not parts:
        raise DumpError(
            f"dump template {text!r} has no {{batch_id}}: every batch would overwrite the one"
            " before; add {batch_id} to the file name"
        )
    if not text.endswith(_SUFFIXES):
        raise DumpError(
            f"dump template {text!r} must end in {' or '.join(_SUFFIXES)}: the suffix chooses the"
            " container"
        )
