"""Make rows for training of Debian's documentation packages, and give the committed rows their texts.

    python -m pipelines.documentation_rows passages --names NAMES --packages DIR --out passages.jsonl
    python -m pipelines.documentation_rows written questions.jsonl --names NAMES --packages DIR --out written.jsonl
    python -m pipelines.documentation_rows rules --names NAMES --packages DIR --out rules.jsonl
    python -m pipelines.documentation_rows pack written.jsonl rules.jsonl
    python -m pipelines.documentation_rows rebuild --packages DIR --out rows.jsonl

`passages` writes passages as numbered parts for a reader, a person or a model; `written` makes rows of the reader's questions.
`rules` makes questions by rule, a line a package, and goes on where it was stopped. `pack` adds the spans of rows, without the
documents' text, to the file that is committed; `rebuild` reads it and writes the rows with their texts. Packages are fetched into
DIR, outside the project.
"""

import itertools
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.disk import atomic_writer
from ragspec.errors import RagspecError
from ragspec.training.documentation_rows import (
    PackageFile,
    Row,
    debian_packages,
    read_packed,
    readings,
    restored,
    rule_rows,
    tool_of,
    write_packed,
)

PACKED = Path(__file__).parent / "train" / "documentation_rows.jsonl.gz"
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Names = Annotated[Path, typer.Option(help="A file with a package's name a line.")]
Packages = Annotated[Path, typer.Option(help="The folder of the packages' files.")]
Out = Annotated[Path, typer.Option(help="The file of rows.")]


@app.command()
def passages(
    names: Names,
    packages: Packages,
    out: Out,
    count: Annotated[int, typer.Option(help="Passages at most.")] = 1280,
) -> None:
    """Write passages as numbered parts, for a reader who asks about them."""
    with atomic_writer(out) as file:
        for number, reading in enumerate(islice(readings(_debs(names, packages)), count)):
            titles = " > ".join(filter(None, (reading.passage.title, reading.passage.heading)))
            parts = [reading.text_of(part) for part in reading.parts]
            passage = {"passage": number, "tool": tool_of(reading.file.package), "titles": titles, "parts": parts}
            file.write(f"{json.dumps(passage, ensure_ascii=False)}\n".encode())


@app.command()
def written(
    questions: Annotated[Path, typer.Argument(help='Lines {"passage": 3, "question": ..., "parts": [1]}.')],
    names: Names,
    packages: Packages,
    out: Out,
) -> None:
    """Make rows of a reader's questions about the numbered passages; no parts: the passage does not answer."""
    asked, num_rows = defaultdict[int, list[tuple[str, list[int]]]](list), 0
    for line in map(json.loads, questions.read_text(encoding="utf-8").splitlines()):
        asked[line["passage"]].append((line["question"], line["parts"]))
    with out.open("w") as file:
        for number, reading in enumerate(islice(readings(_debs(names, packages)), max(asked, default=-1) + 1)):
            rows = [row for each in asked[number] if (row := reading.row(*each))]
            num_rows += len(rows)
            _append(file, rows, (number,))
    num_left_out = sum(map(len, asked.values())) - num_rows
    print(f"{num_rows} rows; left out: {num_left_out} questions whose parts no answer may quote as one")


def _debs(names: Path, packages: Path) -> list[Path]:
    return list(debian_packages(names.read_text().split(), packages))


@app.command()
def rules(
    names: Names,
    packages: Packages,
    out: Out,
    limit: Annotated[int, typer.Option(help="Rows of a package at most.")] = 400,
) -> None:
    """Make questions by rule."""
    done = {line["read"][0] for line in _resume(out)}
    with out.open("a") as file:
        for deb in debian_packages((name for name in names.read_text().split() if name not in done), packages):
            package = deb.name.partition("_")[0]
            found = rule_rows(deb, tool_of(package), limit)
            _append(file, found, (package,))
            print(f"{deb.name}: {len(found)} rows", file=sys.stderr, flush=True)


@app.command()
def pack(
    inputs: Annotated[list[Path], typer.Argument(help="Files of `written` and `rules`.")],
    out: Annotated[Path, typer.Option(help="The committed file.")] = PACKED,
) -> None:
    """Add the spans of rows to the file that is committed."""
    files = [each for path in inputs for line in map(json.loads, _whole_lines(path)) for each in line["files"]]
    rows = [Row(PackageFile(**each["file"]), *values) for each in files for values in each["rows"]]
    earlier = list(read_packed(out)) if out.exists() else []
    print(f"{write_packed([*earlier, *rows], out)} rows, {out.stat().st_size} bytes in {out}")


@app.command()
def rebuild(
    packages: Packages, out: Out, packed: Annotated[Path, typer.Option(help="The committed file.")] = PACKED
) -> None:
    """Read the texts of the committed rows from the packages."""
    lost, kinds = Counter[str](), Counter[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(out) as file:
        for row in restored(read_packed(packed), packages, lost):
            kinds[row.kind] += 1
            file.write(f"{json.dumps(row._asdict(), ensure_ascii=False)}\n".encode())
    print(json.dumps({"rows": kinds.total(), "kinds": dict(kinds), "lost": dict(lost)}))


def _resume(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file to append to; its last line may have been cut and is then removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _whole_lines(path) if path.exists() else []
    if path.exists():
        os.truncate(path, sum(map(len, lines)))
    return list(map(json.loads, lines))


def _whole_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _append(file: Any, rows: Sequence[Row], read: tuple[Any, ...]) -> None:
    """One line; `read`: the passage or package that the rows are from."""
    grouped = itertools.groupby(sorted(rows), key=lambda row: row.file)
    files = [{"file": origin._asdict(), "rows": [row[1:] for row in own]} for origin, own in grouped]
    file.write(json.dumps({"read": read, "files": files}, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (RagspecError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
