"""Writes `docs/configuration.md` from the configuration classes, when it is run as a script."""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rl_runtime.config import Recipe

PAGE = Path(__file__).parents[4] / "docs" / "configuration.md"


def _type(annotation: object) -> str:
    text = (
        getattr(annotation, "__name__", None) if isinstance(annotation, type) else str(annotation)
    )
    return (
        str(text)
        .replace("typing.", "")
        .replace("pathlib.", "")
        .replace("rl_runtime.config.", "")
        .replace("|", "or")
    )


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return (
        "required"
        if value is PydanticUndefined
        else f"`{value!r}`"
        if not isinstance(value, Path)
        else f"`{str(value)!r}`"
    )


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(section: type[BaseModel]) -> list[str]:
    rows = [
        f"| `{name}` | {_cell(_type(field.annotation))} | {_cell(_default(field))} |"
        f" {_cell(field.description)} |"
        for name, field in section.model_fields.items()
    ]
    return ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]


def page() -> str:
    """Return the page's text."""
    lines = [
        "# Configuration",
        "",
        (
            "Written from the classes of `rl_runtime.config`. Any key can be set by `--set"
            " section.key=value`."
        ),
        "",
    ]
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        lines += [f"## `[{name}]`", ""]
        if isinstance(section, type) and issubclass(section, BaseModel):
            lines += [_cell(section.__doc__), "", *_table(section), ""]
        else:
            lines += [_cell(field.description), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
