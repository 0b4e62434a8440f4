"""Names that `[megatron]` and `[sglang]` may have, read from the installed sources.

Importing the libraries takes half a minute, so their sources are parsed instead: a mistyped name is
found before anything starts.

Invariants: nothing is imported; where a library is not installed, nothing is said about its names.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["unknown_names"]


def unknown_names(*, megatron: Mapping[str, Any], sglang: Mapping[str, Any]) -> Iterator[str]:
    """Find names that the libraries do not have.

    Args:
        megatron: fields of Megatron-Core's TransformerConfig.
        sglang: arguments of SGLang's server, with underscores.

    Yields:
        One line per unknown name, with the nearest known one.
    """
    if megatron and (
        files := _sources(
            "megatron", "core/transformer/transformer_config.py", "core/model_parallel_config.py"
        )
    ):
        known = _annotated_names(files, classes=("TransformerConfig", "ModelParallelConfig"))
        yield from _problems(
            "megatron", megatron, known, what="a field of Megatron-Core's TransformerConfig"
        )
    if sglang and (files := _sources("sglang", "srt/server_args.py")):
        known = _annotated_names(files, classes=("ServerArgs",)) | _flags(files)
        yield from _problems("sglang", sglang, known, what="an argument of SGLang's server")


def _sources(package: str, *names: str) -> list[ast.Module]:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / name for folder in folders or () for name in names]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]


def _annotated_names(modules: Iterable[ast.Module], *, classes: tuple[str, ...]) -> set[str]:
    bodies = [
        node.body
        for module in modules
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in classes
    ]
    return {
        statement.target.id
        for body in bodies
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _flags(modules: Iterable[ast.Module]) -> set[str]:
    """Return every literal such as "--tensor-parallel-size", an alias of a field, as a name."""
    literals = (
        node.value
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Constant)
    )
    return {
        text.removeprefix("--").replace("-", "_")
        for text in literals
        if isinstance(text, str) and text.startswith("--")
    }


def _problems(section: str, given: Iterable[str], known: set[str], *, what: str) -> Iterator[str]:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            yield f"{section}.{name}: is not {what}" + (
                f"; did you mean {near[0]}?" if near else ""
            )
