"""The pages say what is true: links lead somewhere, code runs, and the configuration page is the models'."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

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


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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


def test_the_readme_stays_short() -> None:
    """Bug guarded: a first page that nobody reads to its end."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_the_configuration_page_is_the_models() -> None:
    """Bug guarded: a setting that was added, renamed or given another default, unseen by users."""
    sys.path.insert(0, str(ROOT / "infra"))
    try:
        import config_reference
    finally:
        sys.path.remove(str(ROOT / "infra"))
    message = "run .venv/bin/python infra/config_reference.py"
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.page(), message
