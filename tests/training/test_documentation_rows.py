"""Rows of documentation packages: spans and hashes that are kept, and the texts that the packages give back."""

import gzip
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from pipelines import documentation_rows
from ragspec.errors import InputError
from ragspec.training.documentation import UNANSWERABLE, is_for_evaluation
from ragspec.training.documentation_rows import (
    check_package,
    debian_packages,
    package_files,
    read_packed,
    restored,
    rule_rows,
    write_packed,
)

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
ABSENT = next(f"no{n}-doc" for n in range(9) if not is_for_evaluation(f"no{n}-doc"))
NAME = next(f"pump{n}-doc" for n in range(9) if not is_for_evaluation(f"pump{n}-doc"))
KEPT_OUT = next(f"pump{n}-doc" for n in range(99) if is_for_evaluation(f"pump{n}-doc"))
SENTENCE = "To stop pump number {n} of hall {n} safely, use the red lever at the side of the tank."
PAGE = "".join(
    f"<h2>Hall {n}</h2><p>This is the text of hall {n}, and the hall is for the pumps that the town has in it. "
    f"{SENTENCE.format(n=n)}</p><p>To clean pump number {n} run:</p><pre>pump --clean {n}</pre>"
    for n in range(12)
)
PAGE += "".join(
    f"<h2>Tour {n}</h2><p>You can book tour {n} of the garden of roses by writing to the office that is in the house. "
    f"To visit rose {n} without waiting for the guide, use the path that is behind the house.</p>"
    for n in range(6)
)


def write_package(folder: Path, page: str = PAGE, name: str = NAME, source: str = "pump") -> Path:
    root = folder / name
    docs = root / "usr/share/doc" / name
    (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
    docs.mkdir(parents=True, exist_ok=True)
    control = f"Package: {name}\nSource: {source}\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: pumps\n"
    (root / "DEBIAN/control").write_text(control)
    (docs / "copyright").write_text("Format: x\n\nFiles: *\nCopyright: us\nLicense: GPL-2+\n all of it\n")
    (docs / "halls.html.gz").write_bytes(gzip.compress(page.encode(), mtime=0))
    (docs / "changelog.html").write_text(page)
    deb = folder / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, deb], check=True, capture_output=True)
    return deb


def test_rows_keep_no_text_and_get_it_back(tmp_path: Path) -> None:
    """Text of a document in the committed file; a quote that is no slice of its passage; a licence or a file that is lost."""
    deb, packed = write_package(tmp_path), tmp_path / "rows.jsonl.gz"
    rows = rule_rows(deb, "pump", 35)
    assert write_packed(rows, packed) == len(rows) > 18
    assert sorted(read_packed(packed)) == sorted(rows)
    assert b"red lever" not in gzip.decompress(packed.read_bytes())
    lost = Counter[str]()
    found = list(restored(read_packed(packed), tmp_path, lost))
    assert len(found) == len(rows) and not lost
    quotes = {row.question: row.quote for row in found if row.quote}
    assert quotes["How do I stop pump number 3 of hall 3 safely?"] == SENTENCE.format(n=3)
    assert quotes["How do I clean pump number 3?"] == "To clean pump number 3 run:\n\npump --clean 3"
    for row in found:
        assert (row.quote in row.passage) and (row.licence, row.path) == (
            "GPL-2+",
            f"{NAME}/usr/share/doc/{NAME}/halls.html.gz",
        )
        assert bool(row.quote) == (row.kind != UNANSWERABLE)
    absent = [row for row in found if row.kind == UNANSWERABLE]
    assert absent and all(("rose" in row.question) != ("rose" in row.passage) for row in absent)


def fake_archive(folder: Path) -> Path:
    """A folder with an apt-get that has no package."""
    (folder / "bin").mkdir()
    (folder / "bin/apt-get").write_text("#!/bin/sh\nexit 100\n")
    (folder / "bin/apt-get").chmod(0o755)
    return folder / "bin"


def test_rows_follow_a_reader_that_moves_the_text_and_leave_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes cut in the middle after a reader's change; a file of another version under the old spans."""
    rows = rule_rows(write_package(tmp_path), "pump", 7)
    before = {(row.question, row.quote) for row in restored(rows, tmp_path)}
    moved = [
        row._replace(
            passage=(row.passage[0] + 9, row.passage[1] + 9), quote=tuple(at + 9 * any(row.quote) for at in row.quote)
        )
        for row in rows
    ]
    assert {(row.question, row.quote) for row in restored(moved, tmp_path)} == before
    monkeypatch.setenv("PATH", f"{fake_archive(tmp_path)}:{os.environ['PATH']}")
    unknown = [row._replace(file=row.file._replace(package=ABSENT)) for row in rows]
    assert not list(restored(unknown, tmp_path, lost := Counter())) and lost == {ABSENT: 7}
    write_package(tmp_path, PAGE.replace("red", "blue"))
    assert not list(restored(rows, tmp_path, lost := Counter())) and lost == {NAME: 7}


def test_packages_for_evaluation_are_refused(tmp_path: Path) -> None:
    """A name or a source that an evaluation uses, read for training."""
    for name, source in ((KEPT_OUT, "pump"), (NAME, "git")):
        deb = write_package(tmp_path, name=name, source=source)
        with pytest.raises(InputError, match="kept for evaluation"):
            next(package_files(deb))
    with pytest.raises(InputError, match="kept for evaluation"):
        next(debian_packages([KEPT_OUT], tmp_path))


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A line that a kill has cut, read as the end of all or joined with the next."""
    write_package(tmp_path)
    (tmp_path / "names").write_text(NAME)
    out, packed, rows = (tmp_path / name for name in ("rules.jsonl", "packed.gz", "rows.jsonl"))
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    assert out.read_bytes() == whole
    documentation_rows.pack([out], packed)
    documentation_rows.rebuild(tmp_path, rows, packed)
    assert len(rows.read_text().splitlines()) == len(list(read_packed(packed))) >= 12


def test_the_committed_rows_keep_to_the_rule() -> None:
    """A package for evaluation among the trained ones, a row without a licence, or a file that outgrows the repository."""
    rows = list(read_packed(documentation_rows.PACKED))
    assert len(rows) > 15_000 and documentation_rows.PACKED.stat().st_size < 4 * 2**20
    for package in {row.file.package for row in rows}:
        check_package(package)
    for row in rows:
        is_inside = row.passage[0] <= row.quote[0] < row.quote[1] <= row.passage[1]
        assert row.file.licence and is_inside == (row.kind != UNANSWERABLE)
