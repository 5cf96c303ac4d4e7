"""Make rows for training of Debian's documentation packages, and give the committed rows their texts.

    python -m pipelines.documentation_rows write --names NAMES --packages DIR --model MODEL.gguf --out written.jsonl
    python -m pipelines.documentation_rows rules --names NAMES --packages DIR --out rules.jsonl
    python -m pipelines.documentation_rows pack written.jsonl rules.jsonl
    python -m pipelines.documentation_rows rebuild --packages DIR --out rows.jsonl

`write` lets a model write questions about passages, and `rules` makes them by rule. Both append to their file, one line a
passage or package, and go on where they were stopped. `pack` writes the spans of all rows, without the documents' text, to the
file that is committed; `rebuild` reads it and writes the rows with their texts. Packages are fetched into DIR, outside the
project.
"""

import hashlib
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.disk import atomic_writer
from ragspec.engine.loading import load_engine
from ragspec.errors import RagspecError
from ragspec.rag.prompt import PromptBuilder
from ragspec.training.documentation_rows import (
    WRITTEN,
    PackageFile,
    QuestionWriter,
    Reading,
    Row,
    debian_packages,
    document_of,
    package_files,
    read_packed,
    readings_of,
    restored,
    row_of,
    rule_rows,
    tool_of,
    write_packed,
)

PACKED = Path(__file__).parent / "train" / "documentation_rows.jsonl.gz"
_READINGS_A_FILE = 3
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
Names = Annotated[Path, typer.Option(help="A file with a package's name a line.")]
Packages = Annotated[Path, typer.Option(help="The folder of the packages' files.")]
Out = Annotated[Path, typer.Option(help="The file of rows.")]


@app.command()
def write(
    names: Names,
    packages: Packages,
    out: Out,
    model: Annotated[str, typer.Option(help="The model that writes: a directory or a GGUF file.")],
    threads: Annotated[int, typer.Option(help="Threads at most.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    count: Annotated[int, typer.Option(help="Questions that are enough.")] = 2000,
) -> None:
    """Let a model write questions, and keep those that a part of their passage answers."""
    lines = _resume(out)
    done = {tuple(line["read"]) for line in lines}
    num_kept = sum(len(each["rows"]) for line in lines for each in line["files"])
    debs = list(debian_packages(names.read_text().split(), packages))
    readings = (each for each in _readings(debs) if _key(each) not in done)
    target = TargetConfig(model=model, adapter="none", device=device)
    with load_engine(target, EngineConfig(num_threads=threads), DraftingConfig()) as engine, out.open("a") as file:
        writer = QuestionWriter(engine, PromptBuilder(engine.target.tokenizer, engine.max_context_tokens))
        for number, (reading, questions) in enumerate(writer.write(readings), start=1):
            span = reading.passage.start, reading.passage.end
            found = [
                row_of(reading.file, reading.document, q.question, WRITTEN, span, (q.part.start, q.part.end))
                for q in questions
            ]
            _append(file, found, _key(reading))
            num_kept += len(found)
            print(f"{number} passages read, {num_kept} questions", file=sys.stderr, flush=True)
            if num_kept >= count:
                break


def _readings(debs: Sequence[Path]) -> Iterator[Reading]:
    """Passages of all packages in turn, a few of each file, in an order of their own that repeats."""
    left = [_readings_in(deb) for deb in debs]
    while left:
        for package in list(left):
            if reading := next(package, None):
                yield reading
            else:
                left.remove(package)


def _readings_in(deb: Path) -> Iterator[Reading]:
    for file, content in package_files(deb):
        if document := document_of(file, content):
            mixed = sorted(
                readings_of(file, document), key=lambda each: hashlib.sha256(each.passage.text.encode()).digest()
            )
            yield from mixed[:_READINGS_A_FILE]


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
    inputs: Annotated[list[Path], typer.Argument(help="Files that write and rules have written.")],
    out: Annotated[Path, typer.Option(help="The committed file.")] = PACKED,
) -> None:
    """Write the spans of all rows to the file that is committed."""
    files = [each for path in inputs for line in map(json.loads, _whole_lines(path)) for each in line["files"]]
    rows = [Row(PackageFile(**each["file"]), *values) for each in files for values in each["rows"]]
    print(f"{write_packed(rows, out)} rows, {out.stat().st_size} bytes in {out}")


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


def _key(reading: Reading) -> tuple[str, int]:
    return reading.file.sha256, reading.passage.start


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (RagspecError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
