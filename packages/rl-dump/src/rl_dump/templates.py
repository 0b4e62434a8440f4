"""Decide which file a batch is written to, and refuse templates under which one batch would overwrite another.

Layer: records (standard library only). A template is a path with `{batch_id}`; `{rollout_id}` means the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from string import Formatter

from rl_dump.errors import DumpError

__all__ = ["check_templates", "resolve_template"]

_ALIASES = frozenset({"batch_id", "rollout_id"})
_SUFFIXES = (".parquet", ".pt")


def resolve_template(template: str | os.PathLike[str], *, batch_id: int | str) -> Path:
    """Return the path of one batch's dump.

    Args:
        template: a path with `{batch_id}` (or its alias `{rollout_id}`), format specs allowed: `train_{batch_id:06d}.parquet`.
        batch_id: the batch counter, or a word such as `"eval_3"`.

    Raises:
        DumpError: the template has no such placeholder, another placeholder, an unknown suffix, or cannot take this `batch_id`.
    """
    text = os.fspath(template)
    _check_placeholders(text)
    if isinstance(batch_id, str) and (not batch_id or any(mark in batch_id for mark in ("/", "\\", "\0"))):
        msg = f"batch_id {batch_id!r} cannot be part of a file name: it must be a number or a word without slashes"
        raise DumpError(msg)
    try:
        return Path(text.format(batch_id=batch_id, rollout_id=batch_id))
    except (ValueError, TypeError, IndexError) as error:
        msg = f"dump template {text!r} does not take batch_id {batch_id!r}: {error}"
        raise DumpError(msg) from error


def check_templates(*, rollout: str | os.PathLike[str] | None, train: str | os.PathLike[str] | None) -> None:
    """Refuse, at the start of a run, templates that would lose data.

    Args:
        rollout: template of the rollout dump; None if it is off.
        train: template of the train dump; None if it is off.

    Raises:
        DumpError: a template is not one (see `resolve_template`), gives two batches one path, or both give one batch the same path.
    """
    named = {name: template for name, template in (("dump.rollout", rollout), ("dump.train", train)) if template is not None}
    for name, template in named.items():
        first, second = (_resolved(template, batch_id) for batch_id in (0, 1))
        if first == second:
            msg = f"{name}: template {os.fspath(template)!r} gives batches 0 and 1 the same path {first}"
            raise DumpError(msg)
    paths = {_resolved(template, 0) for template in named.values()}
    if len(paths) < len(named):
        msg = f"dump.rollout and dump.train both write to {paths.pop()}; give them different paths"
        raise DumpError(msg)


def _resolved(template: str | os.PathLike[str], batch_id: int) -> str:
    return os.path.realpath(resolve_template(template, batch_id=batch_id))


def _check_placeholders(text: str) -> None:
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        msg = f"dump template {text!r} is not a format string: {error}"
        raise DumpError(msg) from error
    unknown = [name for name in names if name not in _ALIASES]
    if unknown:
        msg = f"dump template {text!r} has the unknown placeholder {{{unknown[0]}}}; use {{batch_id}}"
        raise DumpError(msg)
    if not names:
        msg = f"dump template {text!r} has no {{batch_id}}: every batch would overwrite the one before; add {{batch_id}} to the file name"
        raise DumpError(msg)
    if not text.endswith(_SUFFIXES):
        msg = f"dump template {text!r} must end in {' or '.join(_SUFFIXES)}: the suffix chooses the container"
        raise DumpError(msg)
