"""The pages say what is true: links lead somewhere, code runs, named settings and routes exist."""

import ast
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

import ragspec
from ragspec.cluster.topology import ClusterConfig
from ragspec.old_keys import OLD_KEYS
from services.settings import ServiceConfig
from services.web.pages import PAGES as WEB_PAGES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(
        ROOT / name
        for name in (
            "infra/README.md",
            "infra/RUNBOOK.md",
            "infra/results/README.md",
            "services/README.md",
            "pipelines/README.md",
        )
    ),
    *sorted((ROOT / "ragspec").glob("**/*.md")),
]
README_LINES = 150
RUN = [
    f"{name}.md"
    for name in "ragspec/PYTHON README ragspec/rag/README ragspec/retrieval/README ragspec/drafting/README".split()
]
NOT_RUN = ["ragspec/cluster/README.md", "services/README.md"]  # they need a deployment and a running service


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


def keys_of(tree: dict[str, Any]) -> Iterator[list[str]]:
    """The way to each leaf of a YAML document."""
    for key, value in tree.items():
        yield from ([key, *rest] for rest in keys_of(value)) if isinstance(value, dict) else [[key]]


def has_setting(kind: Any, keys: Sequence[str]) -> bool:
    """Whether a type of the configuration has these keys; a mapping has every key."""
    if not keys:
        return True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(keys[0])
        return field is not None and has_setting(field.annotation, keys[1:])
    rest = keys[1:] if typing.get_origin(kind) is dict else keys
    return any(has_setting(each, rest) for each in typing.get_args(kind))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    """Bug guarded: a page that moved, or a link that was right from another folder."""
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_that_pages_name_exist(page: Path) -> None:
    """Bug guarded: a map of rooms that were rebuilt."""
    named = re.findall(r"`((?:[\w]+/)+[\w]+\.py)`", page.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "ragspec", page.parent)
    assert not [path for path in named if not any((root / path).exists() for root in roots)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_pages_imports_names_that_exist(page: Path) -> None:
    """Bug guarded: an example that fails at its first line."""
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ragspec":
                module = __import__(str(node.module), fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names), node.module


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_pages_name_exist(page: Path) -> None:
    """Bug guarded: a remedy that was renamed, found in the middle of a fault."""
    sections = ServiceConfig.model_fields.keys()
    dotted = [span.split(".") for span in spans(page) if re.fullmatch(r"\w+(\.[a-z_]+)+", span) and ".py" not in span]
    trees = [span.replace("...", "null") for span in spans(page) if re.match(r"\w+: \{", span)]
    named = [keys for text in (*trees, *blocks(page, "yaml")) for keys in keys_of(yaml.safe_load(text))]
    settings = [keys for keys in (*dotted, *named) if keys[0] in sections and keys[-1] != "yaml"]
    assert page.name not in ("SECURITY.md", "RUNBOOK.md") or settings
    gone = OLD_KEYS if page.name == "CHANGELOG.md" else {}
    assert not [
        ".".join(keys) for keys in settings if not has_setting(ServiceConfig, keys) and ".".join(keys) not in gone
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_routes_and_log_lines_that_pages_name_exist(page: Path) -> None:
    """Bug guarded: a check of health, or a search of the log, that finds nothing."""
    routes, source = {page.path for page in WEB_PAGES}, ""
    for module in sorted((ROOT / "services").rglob("*.py")):
        text = module.read_text(encoding="utf-8")
        prefix = "".join(re.findall(r'APIRouter\(prefix="([^"]+)"', text))
        routes |= {re.sub(r"\{.*?\}", "{}", prefix + route) for route in re.findall(r'@router\.\w+\("([^"]*)"', text)}
        source += text
    words = page.read_text(encoding="utf-8")
    named = re.findall(r"(?:`|URL|[A-Z] )(/(?:health|metrics|v1|v2|grammar)\b[\w/{}]*)", words)
    asked = [re.sub(r"\{.*?\}", "{}", route).rstrip("/") for route in named]
    assert not [route for route in asked if not any(f"{each}/".startswith(f"{route}/") for each in routes)]
    searched = [text for found in re.findall(r"grep\s+'([^']+)'", words) for text in re.findall(r'"([\w ]+)"', found)]
    values = re.findall(r'\w+\{reason="(\w+)"\}', words)
    assert page.name != "RUNBOOK.md" or (asked and searched and values)
    assert not [text for text in (*searched, *values) if f'"{text}"' not in source]


@pytest.mark.slow
def test_the_examples_of_all_pages_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that imports what exists and still fails at its second line."""
    from ragspec import Document, build_index
    from ragspec.config import EncoderConfig
    from ragspec.retrieval.encoder import Encoder

    monkeypatch.chdir(tmp_path)
    text = "The mill was built in 1874 by the people of the valley. It is open from nine to five."
    build_index([Document("mill.md", text, "The mill")], tmp_path / "my-index", Encoder.load(EncoderConfig()))
    names: dict[str, Any] = {}
    Path("ragspec.yaml").write_text("retriever: {index_dir: my-index}\ngeneration: {max_tokens: 16}\n")
    Path("questions.txt").write_text("When was the mill built?\n")
    assert {name_of(page) for page in PAGES if blocks(page, "python")} == {*RUN, *NOT_RUN}
    for page in RUN:
        own = names if page == RUN[0] else {}
        for block in blocks(ROOT / page, "python"):
            exec(compile(block, page, "exec"), own)
    assert names["answer"].citations and "1874" in names["evaluation"].results[0].answer.text
    assert names["langchain_retriever"]


def test_the_readme_stays_short() -> None:
    """Bug guarded: a first page that nobody reads to its end."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_version_is_the_same_everywhere() -> None:
    """A release whose wheel, module and changelog name three versions."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [heading.split()[0] for heading in headings if heading != "Unreleased"]
    assert ragspec.__version__ == built == released[0]


def test_the_example_of_the_configuration_page_is_a_configuration() -> None:
    """Bug guarded: a first page whose example is refused at the start, or a default that no reader can use."""
    page = ROOT / "ragspec" / "CONFIGURATION.md"
    (example,) = blocks(page, "yaml")
    tree = yaml.safe_load(example)
    ClusterConfig.model_validate({name: section for name, section in tree.items() if name != "service"})
    ServiceConfig.model_validate({name: section for name, section in tree.items() if name != "topology"})
    assert "Undefined" not in page.read_text(encoding="utf-8")
