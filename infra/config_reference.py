#!/usr/bin/env python3
"""Writes ragspec/CONFIGURATION.md from the pydantic models, so that the page cannot disagree with the code.

.venv/bin/python infra/config_reference.py            writes the page
.venv/bin/python infra/config_reference.py --check    ends non-zero where the page is out of date

A key's text is the docstring under its field. The keys of `EXAMPLE` come first; all others are for experts.
"""

import ast
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ragspec.cluster.topology import Topology
from services.settings import ServiceConfig

PAGE = Path(__file__).resolve().parent.parent / "ragspec" / "CONFIGURATION.md"
EXAMPLE = """retriever:
  index_dir: my-index               # written by `ragspec index add`
  num_passages: 3
  mode: hybrid
  device: auto
target:
  model: Qwen/Qwen3-0.6B            # or a directory, or a .gguf file
  adapter: auto
  device: cpu                       # or cuda
  dtype: auto
  quantization: auto
drafting:
  speculation: true
  drafters: [copy, eagle]
  eagle: {path: heads/qwen}
  draft_model: {path: ""}
engine:
  max_kv_tokens: 32768
  max_num_seqs: 64
  num_threads: 8
generation:
  max_tokens: 192
  temperature: 0.0
  top_p: 1.0
  seed: 7
  verbatim_quotes: true
service:                            # `ragspec serve`
  host: 127.0.0.1
  port: 8000
  keys_file: keys.json              # written by `ragspec keys add`
  ssl_certfile: cert.pem
  ssl_keyfile: key.pem
  data_dir: /data/service
topology:                           # `ragspec cluster up`
  num_replicas: 2
  tensor_parallel_size: 1
  num_shards: 2
  gpus_per_rank: 0
"""
HEAD = """# Configuration

Every command that has settings takes `--config FILE`, a YAML file with any of these sections; every key may be left out. A
command checks the sections that it does not need, and ignores them. An unknown key is an error that names the nearest known key.
Keys of earlier versions are read, with one warning that names them.

The first part has the keys that most deployments set, all {num_first} of them in this example; the second part has the other
{num_others}. This page is written by `infra/config_reference.py`.

```yaml
{example}```

# Keys that people set
"""
EXPERT = """
# Expert

A key here trades one thing for another, or serves a rare deployment.
"""


class Key(NamedTuple):
    """A key of the configuration, with the section that holds it."""

    section: str
    name: str
    field: FieldInfo
    text: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def row(self) -> str:
        kind = " ".join(filter(None, (type_name(self.field.annotation), bounds_of(self.field))))
        return f"| `{self.name}` | {kind} | {default_of(self.field)} | {self.text} |"


def type_name(annotation: object) -> str:
    """`int`, `float or null`, `"a" or "b"`, `list of str`."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        values = typing.get_args(annotation)
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
    if typing.get_origin(annotation) is tuple:
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is dict:
        return "sections by name"
    if parts := typing.get_args(annotation):
        return " or ".join(map(type_name, parts))
    return getattr(annotation, "__name__", str(annotation))


def bounds_of(field: FieldInfo) -> str:
    """`from 1 to 64`, `above 0.0`."""
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    limits = (
        (word, getattr(each, name)) for each in field.metadata for name, word in words.items() if hasattr(each, name)
    )
    return " ".join(f"{word} {'2^64' if limit == 2**64 else limit}" for word, limit in limits)


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return "null" if value is None else f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value!r}`".replace("'", '"')


@cache
def texts_of(model: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field of a model and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (section,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(section, ast.ClassDef)
        for field, text in zip(section.body, section.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def is_section(field: FieldInfo) -> bool:
    return inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)


def sections_of(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """A section and those within it."""
    yield name, model
    for key, field in model.model_fields.items():
        if is_section(field):
            yield from sections_of(f"{name}.{key}", typing.cast(type[BaseModel], field.annotation))


def all_sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in ServiceConfig.model_fields.items():
        yield from sections_of(key, typing.cast(type[BaseModel], field.annotation))
    yield from sections_of("topology", Topology)


def keys_of(name: str, model: type[BaseModel]) -> list[Key]:
    texts = texts_of(model)
    return [Key(name, key, field, texts[key]) for key, field in model.model_fields.items() if not is_section(field)]


def all_keys() -> list[Key]:
    """Every key of every section. Raises: KeyError for a key without a docstring."""
    return [key for name, model in all_sections() for key in keys_of(name, model)]


def example_paths(tree: object, above: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [above.removesuffix(".")]
    return [path for name, part in tree.items() for path in example_paths(part, f"{above}{name}.")]


def tables(keys: list[Key], *, with_texts: bool) -> Iterator[str]:
    """A heading and a table for each section. `with_texts`: with the section's docstring."""
    sections = dict(all_sections())
    for section in dict.fromkeys(key.section for key in keys):
        yield f"\n## `{section}`\n"
        if with_texts:
            yield inspect.cleandoc(sections[section].__doc__ or "") + "\n"
        yield "| key | type | default | |\n|---|---|---|---|"
        yield from (key.row for key in keys if key.section == section)


def page() -> str:
    first = set(example_paths(yaml.safe_load(EXAMPLE)))
    keys = all_keys()
    basic = [key for key in keys if key.path in first]
    assert len(basic) == len(first), first - {key.path for key in basic}
    others = [key for key in keys if key.path not in first]
    head = HEAD.format(num_first=len(basic), num_others=len(others), example=EXAMPLE)
    lines = [head.rstrip(), *tables(basic, with_texts=False), EXPERT.rstrip(), *tables(others, with_texts=True), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is out of date: run .venv/bin/python infra/config_reference.py")
