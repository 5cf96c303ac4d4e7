#!/usr/bin/env python3
"""Counts lines of Python code: blank lines, comments and docstrings are left out.

    python infra/count_lines.py [FOLDER ...]      # by default ragspec services pipelines, each package on its own line

A line counts if a token of code starts or ends on it. The last line of stdout is one JSON document.
"""

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
SHORT_LINES = 60


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of every string that stands alone as a statement."""
    alone = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {
        line for node in alone if isinstance(node.value.value, str) for line in range(node.lineno, node.end_lineno + 1)
    }


def code_lines(text: str) -> int:
    """Lines of `text` that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstring_lines(ast.parse(text)))


def modules_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")


def main(folders: list[str]) -> None:
    root = Path(__file__).resolve().parent.parent
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    short = []
    for path in (path for folder in folders for path in sorted((root / folder).rglob("*.py"))):
        name = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        lines["/".join(name.parts[: min(2, len(name.parts) - 1)])] += code_lines(text)
        if name.name != "__init__.py":
            modules[name.parent.as_posix()] += 1
            short += [name.as_posix()] if text.count("\n") < SHORT_LINES else []
    for package, count in sorted(lines.items()):
        print(f"{count:7,}  {package}")
    largest, size = modules.most_common(1)[0]
    counts = {
        "code_lines": lines.total(),
        "modules": modules.total(),
        "short_modules": len(short),
        "largest_folder": size,
    }
    print(f"largest folder: {largest}; short modules (under {SHORT_LINES} lines): {' '.join(short)}")
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1:] or ["ragspec", "services", "pipelines"])
