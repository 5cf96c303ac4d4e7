#!/usr/bin/env python3
"""Writes ragspec/CONFIGURATION.md from the pydantic models, so that the page cannot disagree with the code.

.venv/bin/python infra/config_reference.py            writes the page
.venv/bin/python infra/config_reference.py --check    ends non-zero where the page is out of date
"""

import inspect
import sys
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ragspec.cluster.topology import Topology
from services.settings import ServiceConfig

PAGE = Path(__file__).resolve().parent.parent / "ragspec" / "CONFIGURATION.md"
HEAD = """# Configuration

Every command takes `--config FILE`, a YAML file with any of these sections. An unknown key is an error that names the key.
This page is written by `infra/config_reference.py`; `make check` compares the two.
"""


def type_name(annotation: object) -> str:
    """`int`, `float or null`, `"a" or "b"`, `list of str`."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(
            f'"{value}"' if isinstance(value, str) else str(value) for value in typing.get_args(annotation)
        )
    if typing.get_origin(annotation) is tuple:
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    if parts := typing.get_args(annotation):
        return " or ".join(map(type_name, parts))
    return getattr(annotation, "__name__", str(annotation))


def bounds_of(field: FieldInfo) -> str:
    """`from 1 to 64`, `above 0.0`."""
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    limits = (
        (word, getattr(each, name)) for each in field.metadata for name, word in words.items() if hasattr(each, name)
    )
    return " ".join(f"{word} {2**64 if limit == 2**64 else limit}" for word, limit in limits)


def default_of(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "null"
    if isinstance(value, str) and "/" in value:
        return "(shipped)"
    return f"`{list(value) if isinstance(value, tuple) else value!r}`".replace("'", '"')


def section(name: str, model: type[BaseModel]) -> list[str]:
    """A section's heading, its docstring, its keys, then its sub-sections."""
    lines = [f"\n## `{name}`\n", inspect.cleandoc(model.__doc__ or "").replace("\n\n", "\n\n"), ""]
    nested = {key: field for key, field in model.model_fields.items() if is_section(field)}
    rows = [
        f"| `{key}` | {describe(field)} | {default_of(field)} |"
        for key, field in model.model_fields.items()
        if key not in nested
    ]
    lines += ["| key | type | default |", "|---|---|---|", *rows] if rows else []
    for key, field in nested.items():
        lines += section(f"{name}.{key}", typing.cast(type[BaseModel], field.annotation))
    return lines


def is_section(field: FieldInfo) -> bool:
    return inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)


def describe(field: FieldInfo) -> str:
    return " ".join(filter(None, (type_name(field.annotation), bounds_of(field))))


def page() -> str:
    sections = {key: field.annotation for key, field in ServiceConfig.model_fields.items() if is_section(field)} | {
        "topology": Topology
    }
    return "\n".join([HEAD.rstrip(), *(line for name, model in sections.items() for line in section(name, model)), ""])


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is out of date: run .venv/bin/python infra/config_reference.py")
