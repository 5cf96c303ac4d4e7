#!/usr/bin/env python3
"""Fails on a banned name, on a folder with too many modules, on modules that import each other in a circle, and on a size above
its cap.

    python infra/check_house.py

Raising a cap takes a line in CONTRIBUTING.md that says what the lines bought; each cap falls with the lines.

The glossary (ragspec/README.md) has the names to use. A name here is a module, a class, a function or a method; its words are
the parts between underscores or capitals.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from config_reference import all_keys
from count_lines import code_lines

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ragspec", "services", "pipelines")
MOST_MODULES = 15
CAPS = {"product lines": 46_450, "test lines": 36_125, "modules": 305, "configuration keys": 120}
"""Lines of code as infra/count_lines.py counts them, modules of the product, rows of keys in ragspec/CONFIGURATION.md."""
BANNED_WORDS = frozenset("manager helper helpers util utils impl info".split())
"""Words that say nothing about the thing they name."""
BANNED_VERBS = frozenset("handle process".split())
"""Verbs that say nothing about the action: banned as the first word of a function."""
RETIRED_WORDS = frozenset(
    "minder keeper keepers crew haystack manuscript pulse ledger bury sweep condemn shunned homeless sings legs".split()
)
"""Private words of earlier versions. The glossary and the field have a term for each."""
LIBRARY_CALLBACKS = frozenset("handle_starttag handle_endtag handle_data handle_exit".split())
"""Methods whose names a base class outside the project chose."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def fault_of(name: str, is_function: bool) -> str:
    """The banned word in `name`; empty if there is none."""
    parts = [] if name in LIBRARY_CALLBACKS else words(name)
    banned = [word for word in parts if word in BANNED_WORDS | RETIRED_WORDS]
    if is_function and parts[:1] and parts[0] in BANNED_VERBS:
        banned.append(parts[0])
    return banned[0] if banned else ""


def banned_names(path: Path) -> Iterator[str]:
    """One line for each banned name that a file defines."""
    where = path.relative_to(ROOT)
    if fault := fault_of(path.stem, is_function=False):
        yield f"{where}: the module's name holds {fault!r}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Definition) and (fault := fault_of(node.name, not isinstance(node, ast.ClassDef))):
            yield f"{where}:{node.lineno}: {node.name} holds {fault!r}"


def large_folders(paths: list[Path]) -> Iterator[str]:
    modules = Counter(path.parent.relative_to(ROOT) for path in paths if path.name != "__init__.py")
    yield from (f"{name}: {num} modules, at most {MOST_MODULES}" for name, num in modules.items() if num > MOST_MODULES)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The known modules that code imports, also inside functions and for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                if module in known or node.module in known:
                    yield module if module in known else node.module
        else:
            yield from imported(node, known)


def circles(imports: Mapping[str, Collection[str]]) -> set[tuple[str, ...]]:
    """The groups of modules of which each imports all others, directly or not; names sorted."""
    reached = {module: set(names) for module, names in imports.items()}
    for middle in imports:
        for names in reached.values():
            if middle in names:
                names |= reached[middle]
    groups = {module: sorted(other for other in names if module in reached[other]) for module, names in reached.items()}
    return {tuple(group) for group in groups.values() if len(group) > 1}


def import_circles(paths: list[Path]) -> Iterator[str]:
    modules = {module_name(path): path for path in paths}
    imports = {
        module: set(imported(ast.parse(path.read_text(encoding="utf-8")), modules)) - {module}
        for module, path in modules.items()
    }
    yield from (f"a circle of imports: {', '.join(group)}" for group in sorted(circles(imports)))


def sizes(paths: list[Path]) -> dict[str, int]:
    """The size of each thing in `CAPS`."""
    return {
        "product lines": sum(code_lines(path.read_text(encoding="utf-8")) for path in paths),
        "test lines": sum(code_lines(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("*.py")),
        "modules": sum(path.name != "__init__.py" for path in paths),
        "configuration keys": len(all_keys()),
    }


def main() -> int:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = sizes(paths)
    faults = [
        *(f"{found[name]:,} {name}, at most {cap:,}" for name, cap in CAPS.items() if found[name] > cap),
        *large_folders(paths),
        *import_circles(paths),
        *(fault for path in paths for fault in banned_names(path)),
    ]
    counts = ", ".join(f"{count:,} {name}" for name, count in found.items())
    print("\n".join(faults) or f"house: {counts}; no banned name, no folder above {MOST_MODULES} modules, no circle")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
