"""Files into an index by the job: new, again, changed, gone, unreadable, twice."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from letter_encoder import LetterEncoder
from typer.testing import CliRunner

import pipelines.build_index as build_index_job
from pipelines import file_ingest
from ragspec.config import EncoderConfig
from ragspec.core import Document
from ragspec.errors import SaveError
from ragspec.retrieval.chunking import chunker
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading import Unread, bounded_reader, read_file
from ragspec.retrieval.reading.bounded_reader import BoundedReader, ReadLimits
from ragspec.retrieval.search.analysis import RULES, rules_of


class Ended(NamedTuple):
    code: int
    err: str
    summary: dict[str, Any]


Run = Callable[..., Ended]


@pytest.fixture
def run(run_on: Run, tmp_path: Path) -> Run:
    """One run of the job over `tmp_path/docs`."""
    return lambda *arguments: run_on(tmp_path / "docs", *arguments)


@pytest.fixture(scope="module")
def reader() -> Iterator[BoundedReader]:
    with BoundedReader(build_index_job._READ_LIMITS) as reader:
        yield reader


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reader: BoundedReader) -> Run:
    """One run of the job over an input with a cheap encoder; runs with the usual limits share one process that reads."""
    monkeypatch.setattr(build_index_job.Encoder, "load", lambda _: LetterEncoder())
    usual = build_index_job._READ_LIMITS

    def opened(limits: ReadLimits, *more: Any) -> AbstractContextManager[BoundedReader]:
        return nullcontext(reader) if limits == usual and not any(more) else BoundedReader(limits, *more)

    monkeypatch.setattr(build_index_job, "BoundedReader", opened)

    def call(*arguments: object) -> Ended:
        given = ["--index", str(tmp_path / "index"), *map(str, arguments)]
        done = CliRunner().invoke(build_index_job.app, given)
        assert "Traceback" not in done.stderr and (done.exception is None or isinstance(done.exception, SystemExit))
        return Ended(done.exit_code, done.stderr, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {})

    return call


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("The Danube flows into the Black Sea.")
    (folder / "sub" / "b.md").write_text("# Kings\n\nCharlemagne was crowned in 800.")
    rows = [{"id": "r1", "text": "Roots take up water.", "year": 1900}, {"id": "r2", "text": "Leaves are green."}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def documents(tmp_path: Path) -> dict[str, Document]:
    return {document.id: document for document in Store.open(tmp_path / "index").documents()}


def counts(summary: dict[str, Any]) -> tuple[int, ...]:
    return tuple(summary[name] for name in ("added", "updated", "unchanged", "duplicate", "deleted"))


def test_a_second_run_does_only_what_is_new(run: Run, docs: Path, tmp_path: Path) -> None:
    """An hour of encoding again because one file changed."""
    first = run()
    assert first.code == 0 and counts(first.summary) == (4, 0, 0, 0, 0)
    assert (first.summary["documents"], first.summary["files"], first.summary["dimension"]) == (4, 3, 16)
    assert {d.source for d in documents(tmp_path).values()} == {"docs/a.txt", "docs/sub/b.md", "docs/rows.jsonl"}
    assert documents(tmp_path)["r1"].metadata == {"year": 1900}
    again = run()
    assert counts(again.summary) == (0, 0, 4, 0, 0) and again.summary["generation"] == first.summary["generation"]
    (docs / "a.txt").write_text("The Danube is long.")
    (docs / "new.txt").write_text("New.")
    third = run()
    assert counts(third.summary) == (1, 1, 3, 0, 0) and third.summary["encoded"] == 2


def test_what_is_gone_is_deleted_when_asked_for(run: Run, docs: Path, tmp_path: Path) -> None:
    """Deleted files, and rows that left their file, that go on being quoted; or other inputs' documents deleted with them."""
    with IndexWriter(tmp_path / "index", LetterEncoder()) as writer:
        writer.upsert(Document("other", "Of another input.", source="elsewhere/x.txt"))
        writer.commit()
    run()
    (docs / "a.txt").unlink()
    (docs / "sub" / "b.md").write_bytes(b"caf\xe9")
    (docs / "rows.jsonl").write_text('{"id": "r2", "text": "Leaves are green."}')
    assert counts(run().summary)[4] == 0
    ended = run("--remove-missing")
    assert ended.code == 0 and counts(ended.summary) == (0, 0, 1, 0, 2)
    assert sorted(documents(tmp_path)) == ["docs/sub/b.md", "other", "r2"]  # b.md cannot be read: what it held stays


def test_a_duplicate_outlives_the_file_it_was_a_copy_of(run: Run, docs: Path, tmp_path: Path) -> None:
    """A text that is in two files, and in the index no more when the first of them is deleted."""
    (docs / "z.txt").write_text((docs / "a.txt").read_text())
    ended = run()
    assert counts(ended.summary) == (4, 0, 0, 1, 0) and "duplicate: docs/z.txt" in ended.err
    (docs / "a.txt").unlink()
    assert counts(run("--remove-missing").summary) == (1, 0, 3, 0, 1)
    assert "docs/z.txt" in documents(tmp_path) and "docs/a.txt" not in documents(tmp_path)
    (docs / "y.txt").write_text((docs / "z.txt").read_text())
    assert counts(run("--keep-duplicates").summary)[0] == 1


def test_unreadable_files_are_named_and_left_out_whole(run: Run, docs: Path, tmp_path: Path) -> None:
    """One bad file that ends the job; half of a file in the index; a file that gave nothing and that nothing names; most rows of
    a file lost because all have one id; a bad file that keeps its ids from a good one; a row that no index can hold."""
    (docs / "bad.pdf").write_bytes(b"%PDF-1.7 and then nothing")
    (docs / "half.jsonl").write_text('{"id": "x", "text": "One."}\n' + '{"id": "x", "text": "Two."}\n' * 2)
    (docs / "nan.jsonl").write_text('{"id": "y", "text": "One."}\n{"id": "z", "text": "Two.", "n": NaN}')
    (docs / "of_both.jsonl").write_text('{"id": "y", "text": "Good."}\n{"id": "x", "text": "Good, too."}')
    (docs / "twice.jsonl").write_text('{"id": "r1", "text": "The id of a row of another file."}')
    (docs / "z.txt").write_text(" \n")
    ended = run()
    names = ["bad.pdf", "half.jsonl", "nan.jsonl", "twice.jsonl", "z.txt"]
    assert ended.code == 0 and ended.summary["skipped"] == [f"docs/{name}" for name in names]
    reasons = ("bad.pdf", "line 2: an earlier row has its id, 'x'", "not JSON", "the id 'r1' is that of a document in")
    assert all(word in ended.err for word in (*reasons, "z.txt holds no text"))
    assert {d.text for d in documents(tmp_path).values()} >= {"Good.", "Good, too."} and len(documents(tmp_path)) == 6
    assert counts(run("--strict").summary)[:3] == (0, 0, 6) and run("--strict").code == 1


def test_a_file_below_another_folder_leaves_no_older_copy(run: Run, run_on: Run, docs: Path, tmp_path: Path) -> None:
    """An answer from the text of last year, because the folder above was given then; or documents of a tenant deleted with it."""
    (docs / "sub" / "t.csv").write_text("text\nFirst.\nSecond.\n")
    run("--owner", "ann")
    run()
    assert counts(run_on(docs / "sub").summary) == (0, 0, 0, 3, 0)  # the same texts
    (docs / "sub" / "new.md").write_text((docs / "sub" / "b.md").read_text())
    (docs / "sub" / "b.md").write_text("# Kings\n\nCharlemagne was crowned in Rome.")
    (docs / "sub" / "t.csv").write_text("text\nFirst.\nThird.\n")
    ended = run_on(docs / "sub")
    assert counts(ended.summary) == (3, 0, 0, 1, 2) and not ended.summary["skipped"]
    of_nobody = {name for name, each in documents(tmp_path).items() if not each.owner and "sub/" in name}
    assert of_nobody == {"sub/b.md", "sub/new.md", "docs/sub/t.csv:2", "sub/t.csv:3"}
    assert sum(each.owner == "ann" for each in documents(tmp_path).values()) == 6


def test_tables_that_number_their_rows_alike_are_all_indexed(run: Run, docs: Path, tmp_path: Path) -> None:
    """A table was left out because another one had a row 1; rows under the numbers of earlier versions beside those of today."""
    for name, cell in (("cats", "Tom"), ("dogs", "Rex")):
        (docs / f"{name}.csv").write_text(f"id,name\n1,{cell}\n2,Ben{cell}\n2,Bob{cell}\n,Max{cell}\n5,Leo{cell}\n")
    with IndexWriter(tmp_path / "index", LetterEncoder()) as writer:
        for number, text in (("1", "id: 1\nname: Tom"), ("2", "id: 2\nname: Old"), ("x", "Kept.")):
            origin = str(docs / "cats.csv") if number != "x" else "elsewhere"
            writer.upsert(Document(number, text, origin=origin))
        writer.commit()
    ended = run()
    assert not ended.summary["skipped"] and "line 6, which is named docs/cats.csv:5:6" in ended.err
    ids = [f"docs/{name}.csv:{row}" for name in ("cats", "dogs") for row in ("1", "2", "2:4", "5", "5:6")]
    found = {name: each.text for name, each in documents(tmp_path).items() if each.source != "docs/rows.jsonl"}
    assert [name for name in found if "csv" in name] == ids and not {"1", "2"} & {*found} and "x" in found
    assert found["docs/cats.csv:1"] == "id: 1\nname: Tom" and counts(run().summary)[:2] == (0, 0)


def test_a_row_without_an_id_replaces_no_row_whose_id_is_its_line(run: Run, docs: Path, tmp_path: Path) -> None:
    """Row 5 could not be read any more and was deleted, because another row stood on line 5."""
    (docs / "t.csv").write_text("id,text\n1,One.\n5,Five.\n")
    run()
    (docs / "t.csv").write_text('id,text\n1,One.\n5,"Five"x.\n,Four.\n,Six.\n')
    run("--sync")
    assert {"1", "5", "docs/t.csv:4", "docs/t.csv:5"} <= set(documents(tmp_path))


def test_settings_that_were_named_once_are_followed(run_on: Run, docs: Path, tmp_path: Path) -> None:
    """Settings of last year that stay searchable, or that the next `sync` of their folder deletes."""
    for name in ("a.ini", "b.ini"):
        (docs / name).write_text(f"port = 1 of {name}")
    assert run_on(docs, docs / "a.ini").summary["passed_over"] == {".ini": 1}
    (docs / "a.ini").write_text("port = 2")
    assert run_on(docs, "--sync").summary["passed_over"] == {".ini": 1}
    assert documents(tmp_path)["a.ini"].text == "port = 2" and "b.ini" not in documents(tmp_path)
    (docs / "a.ini").unlink()
    run_on(docs, "--sync")
    assert "a.ini" not in documents(tmp_path) and "docs/a.txt" in documents(tmp_path)


def test_rows_that_a_column_hides_are_named_and_replaced_with_it(run: Run, docs: Path, tmp_path: Path) -> None:
    """A column `owner` of a table of pets, and every question about it was answered with nothing; or the file was left out from
    the moment on that the column had another name."""
    (docs / "pets.csv").write_text("text,owner\nRex is a dog.,Ann\nTom is a cat.,\n")
    assert "private: 1 rows of docs/pets.csv" in run().err and "private" not in run("--owner", "bob").err
    (docs / "pets.csv").write_text("text,keeper\nRex is a dog.,Ann\nTom is a cat.,\n")
    assert not run().summary["skipped"]
    found = documents(tmp_path)
    pets = [found[f"docs/pets.csv:{line}"] for line in (2, 3)]
    assert [(each.owner, each.metadata) for each in pets] == [("", {"keeper": "Ann"}), ("", {})]


def test_a_dry_run_changes_nothing_and_tells_the_truth(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal that writes, or that counts other things than the performance."""
    monkeypatch.setattr(LetterEncoder, "encode", lambda *_: pytest.fail("encoded"))
    rehearsed = run("--dry-run")
    monkeypatch.undo()
    monkeypatch.setattr(build_index_job.Encoder, "load", lambda _: LetterEncoder())
    assert not (tmp_path / "index").exists()
    done = run()
    assert counts(rehearsed.summary) == counts(done.summary) and rehearsed.summary["encoded"] == done.summary["encoded"]
    before = (tmp_path / "index" / "CURRENT").read_text()
    (docs / "a.txt").unlink()
    assert counts(run("--dry-run", "--remove-missing").summary) == (0, 0, 3, 0, 1)
    assert (tmp_path / "index" / "CURRENT").read_text() == before


PAGE = (
    "The mill was built in {year}. It grinds the corn of four villages, and it stands still when the river is low. " * 3
)


def test_one_text_in_two_formats_is_indexed_once(run: Run, tmp_path: Path) -> None:
    """Every passage of a manual found twice, once with its markup; or the prices of another year left out."""
    for name, text in {
        "page.html": f"<h1>The mill</h1><p>{PAGE.format(year=1874)}",
        "_sources/page.rst.txt": f".. _mill-2:\n\nThe mill\n========\n\n{PAGE.format(year=1874)}",
        "prices.html": PAGE.format(year=2023),
        "prices.md": PAGE.format(year=2024),
        "install/index.html": PAGE.format(year=1900),
        "install.md": PAGE.format(year=1900) + "## Two words",
        "other.txt": PAGE.format(year=1874).replace("It", "\n\nIt"),
    }.items():
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    near = {"docs/_sources/page.rst.txt": "docs/page.html", "docs/install.md": "docs/install/index.html"}
    for expected in ((5, 0, 0, 0, 0), (0, 0, 5, 0, 0)):
        ended = run()
        assert ended.summary["near_duplicates"] == near and counts(ended.summary) == expected
        assert "near-duplicate: docs/install.md says what docs/install/index.html says" in ended.err
    (tmp_path / "docs" / "page.html").unlink()
    assert counts(run("--sync").summary) == (1, 0, 4, 0, 1)
    assert "docs/_sources/page.rst.txt" in documents(tmp_path)
    assert counts(run("--keep-duplicates").summary) == (1, 0, 5, 0, 0)


def test_what_is_excluded_leaves_the_index_with_a_sync(run: Run, docs: Path, tmp_path: Path) -> None:
    """Drafts that answer questions because a folder holds them."""
    run()
    excluded = ("--exclude", "sub", "--exclude", "*.jsonl")
    assert run(*excluded).summary["excluded"] == 2 and len(documents(tmp_path)) == 4
    ended = run("--sync", "--dry-run", *excluded)
    assert ended.summary["would"] == {"added": [], "updated": [], "deleted": ["r1", "r2", "docs/sub/b.md"]}
    assert (
        "would delete 3 documents: r1, r2, docs/sub/b.md" in " ".join(ended.err.split())
        and len(documents(tmp_path)) == 4
    )
    assert run("--sync", *excluded).code == 0 and sorted(documents(tmp_path)) == ["docs/a.txt"]
    assert run("--exclude", "*").code == 1


def test_a_watched_folder_is_followed(run_on: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is never read, every file read at each change, or a folder that is away for a moment."""
    read: list[str] = []
    real = bounded_reader.read_file
    monkeypatch.setattr(
        bounded_reader, "read_file", lambda path, name, *rest: (read.append(name), real(path, name, *rest))[1]
    )
    states: list[set[str]] = []

    def changed(number: int) -> None:
        states.append(set(documents(tmp_path)))
        read.clear()
        if number == 0:
            (docs / "a.txt").write_text("The Danube is long.")
        elif number == 1:
            docs.rename(tmp_path / "away")
        elif number == 2:
            (tmp_path / "away").rename(docs)
            (docs / "rows.jsonl").unlink()

    steps = iter(range(4))
    monkeypatch.setattr(build_index_job.time, "sleep", lambda _: changed(next(steps)))
    watched = CliRunner().invoke(build_index_job.app, [str(docs), "--index", str(tmp_path / "index"), "--watch"])
    assert isinstance(watched.exception, StopIteration)
    everything = {"docs/a.txt", "docs/sub/b.md", "r1", "r2"}
    assert states == [everything] * 3 + [{"docs/a.txt", "docs/sub/b.md"}] and read == []
    assert documents(tmp_path)["docs/a.txt"].text == "The Danube is long."


def test_an_index_is_renewed_with_all_that_is_in_it(run: Run, docs: Path, tmp_path: Path) -> None:
    """An index that stays with the rules of an earlier version, or loses what is not below the folder."""
    shutil.copytree(Path(__file__).parents[1] / "written_before" / "index", tmp_path / "index")
    before = set(documents(tmp_path))
    assert run().code == 0 and rules_of(Store.open(tmp_path / "index").manifest.analyzer) == 1
    (docs / "a.txt").unlink()
    assert counts(run("--sync", "--renew").summary)[0] == len(before) + 3
    store = Store.open(tmp_path / "index")
    assert rules_of(store.manifest.analyzer) == RULES and store.former_documents() == []
    assert set(documents(tmp_path)) == before | {"docs/sub/b.md", "r1", "r2"}
    assert counts(run("--sync", "--renew").summary) == (0, 0, len(before) + 3, 0, 0)
    assert run("--renew").code == 2


def test_a_renewal_cuts_again_what_other_rules_cut(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version that cuts tables better, and an index that nothing but its deletion brings to it."""
    with monkeypatch.context() as patch:
        patch.setattr(chunker, "_tables_apart", lambda text, section, _: [section._replace(header="Old rules")])
        run()
    assert counts(run().summary) == (0, 0, 4, 0, 0)
    assert counts(run("--sync", "--renew").summary) == (0, 4, 0, 0, 0)
    (segment,) = {live.segment for live in Store.open(tmp_path / "index").segments if live.is_live.any()}
    assert {segment.passage(row).heading for row in range(4)} == {"", "Kings"}


def test_a_file_beyond_the_limits_of_reading_is_skipped_alone(
    run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PDF that takes the memory or the night of a whole run."""
    (docs / "page.html").write_text("The wheel turns." * 9)
    for limits, reason in (
        ({"timeout_s": 0.01}, "longer than 0.01 s"),
        ({"memory_bytes": 2**20}, "fit into the memory"),
        ({"max_text_bytes": 9}, "9 bytes"),
    ):
        monkeypatch.setattr(build_index_job, "_READ_LIMITS", bounded_reader.ReadLimits(**limits))  # type: ignore[arg-type]
        ended = run()
        assert ended.summary["skipped"] == ["docs/page.html", "docs/sub/b.md"] and reason in ended.err


def test_a_killed_run_goes_on_where_it_stopped(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an hour's work left after a kill in its last minute."""
    monkeypatch.setattr(build_index_job, "_PASSAGES_PER_COMMIT", 1)
    monkeypatch.setattr(build_index_job, "PASSAGES_PER_ENCODE", 1)
    real = IndexWriter.upsert

    def stop(self: IndexWriter, document: Document) -> Any:
        if document.id == "r2":
            raise SaveError("as if killed")
        return real(self, document)

    monkeypatch.setattr(IndexWriter, "upsert", stop)
    assert run().code == 1
    monkeypatch.setattr(IndexWriter, "upsert", real)
    ended = run()
    assert ended.code == 0 and counts(ended.summary) == (3, 0, 1, 0, 0)


def test_only_what_the_inputs_answer_for_is_removed(run_on: Run, docs: Path, tmp_path: Path) -> None:
    """Documents of another folder of the same name, of another tenant, or of files that are still there, deleted as missing."""
    other = tmp_path / "elsewhere" / "docs"
    other.mkdir(parents=True)
    (other / "own.txt").write_text("Another folder's.")
    run_on(docs)
    run_on(docs, "--owner", "ann")
    run_on(other)
    everything = set(documents(tmp_path))
    assert counts(run_on(docs / "*.txt", "--remove-missing").summary)[4] == 0
    assert counts(run_on(other, "--remove-missing").summary)[4] == 0
    assert set(documents(tmp_path)) == everything
    (docs / "rows.jsonl").write_text('{"id": "r1", "text": "Roots.", "source": "https://x/p", "owner": "bob"}')
    (docs / "a.txt").unlink()
    gone = run_on(docs / "*", "--remove-missing")
    assert not gone.summary["skipped"] and documents(tmp_path)["r1"].owner == "bob"
    assert everything - set(documents(tmp_path)) == {"docs/a.txt", "r2"}
    (other / "own.txt").unlink()
    assert counts(run_on(other, "--remove-missing").summary)[4] == 1


def test_one_name_for_two_files_is_no_update(run_on: Run, docs: Path, tmp_path: Path) -> None:
    """A tenant's notes.txt that replaces another's, or that of another folder, without a word."""
    other = tmp_path / "elsewhere" / "docs"
    other.mkdir(parents=True)
    (other / "a.txt").write_text("Another text of the same name.")
    run_on(docs, "--owner", "ann")
    assert counts(run_on(other, "--owner", "bob").summary) == (1, 0, 0, 0, 0)
    assert {"ann/docs/a.txt", "bob/docs/a.txt"} <= set(documents(tmp_path))
    run_on(docs)
    ended = run_on(other)
    assert ended.summary["skipped"] == ["docs/a.txt"] and str(docs / "a.txt") in ended.err
    (docs / "a.txt").unlink()
    assert counts(run_on(other).summary) == (0, 1, 0, 0, 0)  # moved


def test_a_text_that_was_left_out_comes_in_when_its_twin_changes(run: Run, docs: Path, tmp_path: Path) -> None:
    """Two files that swap their texts: each the duplicate of what the other was, and one text nowhere."""
    (docs / "b.txt").write_text("The second text.")
    run()
    (docs / "b.txt").write_text("A third text.")
    (docs / "a.txt").write_text("The second text.")
    ended = run()
    assert counts(ended.summary) == (1, 1, 3, 0, 0) and "duplicate" not in ended.err
    assert {d.text for d in documents(tmp_path).values()} >= {"The second text.", "A third text."}


def test_a_duplicate_that_vanishes_ends_nothing(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that commits nothing because a file it had left out was deleted meanwhile."""
    (docs / "z.txt").write_text((docs / "a.txt").read_text())
    real = IndexWriter.delete_unseen

    def vanish(self: IndexWriter) -> int:
        (docs / "z.txt").unlink()
        return real(self)

    monkeypatch.setattr(IndexWriter, "delete_unseen", vanish)
    ended = run()
    assert ended.code == 0 and ended.summary["skipped"] == ["docs/z.txt"] and len(documents(tmp_path)) == 4


def test_a_file_that_vanishes_or_changes_is_skipped(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback for a file that was deleted after it was listed; half of one that was being written."""
    real = read_file

    def read(path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
        if name == "docs/a.txt":
            (docs / "sub" / "b.md").unlink(missing_ok=True)
        if name == "docs/rows.jsonl":
            path.write_text(path.read_text() + "\n")
        return real(path, name, unread)

    monkeypatch.setattr(bounded_reader, "read_file", read)
    ended = run()
    assert ended.code == 0 and ended.summary["skipped"] == ["docs/rows.jsonl", "docs/sub/b.md"]
    assert "was changed while it was read" in ended.err and "b.md cannot be read" in ended.err


def test_a_damaged_line_is_named_and_its_rows_stay(run: Run, docs: Path, tmp_path: Path) -> None:
    """A file that was cut while it was copied lost its last document, and the job counted as a success and the file as read."""
    path = docs / "rows.jsonl"
    content = path.read_text()
    (docs / "windows.txt").write_bytes("Tea at the café, 5 €.".encode("cp1252"))
    assert run("--sync", "--strict").code == 0  # read as a whole, in a guessed encoding
    path.write_text(content[:-5])
    before = documents(tmp_path)
    ended = run("--sync")
    assert ended.summary["deleted"] == 0 and documents(tmp_path).keys() == before.keys()
    assert "docs/rows.jsonl" in ended.summary["unread"] and "read in part: docs/rows.jsonl, line 2" in ended.err
    assert "documents that may stand there stay; `index delete` removes them: r2" in ended.err
    assert run("--sync", "--strict").code == 1
    path.write_text("{oops\n" + '{"id": "new", "text": "Good."}')
    assert run("--sync").summary["deleted"] == 2  # more than it has lines that cannot be read
    path.write_text(content)
    run("--sync")
    path.write_text("\n".join(content.splitlines()[:1] * 2))  # a row twice is not the other
    assert run("--sync").summary["deleted"] == 1


def test_a_large_file_is_read_twice_and_the_same(run: Run, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that do not fit the memory, taken in half before their bad row is met."""
    monkeypatch.setattr(file_ingest, "_READ_AT_ONCE_BYTES", 10)
    (docs / "half.jsonl").write_text('{"id": "h1", "text": "Good."}\n' + '{"id": "h1", "text": "Bad."}\n' * 2)
    ended = run()
    assert counts(ended.summary) == (4, 0, 0, 0, 0) and ended.summary["skipped"] == ["docs/half.jsonl"]


def test_a_rebuild_of_nothing_readable_changes_nothing(run: Run, docs: Path, tmp_path: Path) -> None:
    """A file that could not be read for a moment emptied the whole index, with exit code 0."""
    run()
    before = {path.name for path in (tmp_path / "index").iterdir()}
    for path in [path for path in docs.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff\xfe\x00")
    ended = run("--rebuild")
    assert ended.code == 1 and "the index stays as it is" in ended.err and "skipped: " in ended.err
    assert {path.name for path in (tmp_path / "index").iterdir()} == before


def test_a_rebuild_holds_only_its_inputs(run: Run, docs: Path, tmp_path: Path) -> None:
    """An index of other settings, or a damaged one, that can only be removed by hand."""
    run("--max-chars", 50)
    with IndexWriter(tmp_path / "index", LetterEncoder()) as writer:
        writer.upsert(Document("old", "Old."))
        writer.commit()
    assert counts(run("--rebuild", "--max-chars", 50).summary) == (0, 0, 4, 0, 1)
    assert counts(run("--rebuild").summary) == (0, 0, 4, 0, 0)  # with its own settings
    assert counts(run("--rebuild", "--max-chars", 500).summary) == (4, 0, 0, 0, 0)
    assert "old" not in documents(tmp_path)
    path = max((tmp_path / "index").rglob("vectors.npy"))
    path.write_bytes(b"half")
    assert run().code == 1
    assert counts(run("--rebuild").summary) == (4, 0, 0, 0, 0) and "old" not in documents(tmp_path)


def test_a_rebuild_from_another_folder_of_that_name_takes_all_of_it(run_on: Run, docs: Path, tmp_path: Path) -> None:
    """v2/docs in place of v1/docs, which is still there: files of the same name were left out, and then deleted."""
    run_on(docs)
    other = tmp_path / "v2" / "docs"
    other.mkdir(parents=True)
    (other / "a.txt").write_text("The Rhine flows into the North Sea.")
    (other / "rows.jsonl").write_text('{"id": "r1", "text": "Roots take up water.", "owner": "ann"}')
    ended = run_on(other, "--rebuild")
    assert ended.code == 0 and ended.summary["skipped"] == []
    found = documents(tmp_path)
    assert sorted(found) == ["docs/a.txt", "r1"] and found["r1"].owner == "ann" and "Rhine" in found["docs/a.txt"].text


def test_workers_are_those_that_were_asked_for(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that is accepted and does nothing."""
    asked: list[int] = []

    class Pool(LetterEncoder):
        texts_at_once = 7

        def __init__(self, config: EncoderConfig, num_workers: int) -> None:
            asked.append(num_workers)

    monkeypatch.setattr("ragspec.cluster.remote_retrieval.encoders.EncoderPool", Pool)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    done = run("--workers", 3)
    monkeypatch.undo()
    assert done.code == 0 and asked == [3] and len(documents(tmp_path)) == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-chars", "3"], "index.chunking.max_chars"),
        (["--dense", "annoy"], "index.dense.kind"),
        (["--language", "klingon"], "index.words.language"),
        (["none-such.txt"], "does not exist"),
    ],
)
def test_wrong_calls_are_one_line(run: Run, docs: Path, arguments: list[str], reason: str) -> None:
    """A traceback is not an error message."""
    ended = run(*arguments)
    assert ended.code == 1 and reason in ended.err.splitlines()[-1] and not ended.summary


def test_settings_of_an_index_are_kept_unless_asked_otherwise(run: Run, docs: Path) -> None:
    """A second run without the options of the first that refuses, or mixes two kinds of passages."""
    assert run("--max-chars", 50, "--owner", "ann").code == 0
    assert counts(run("--owner", "ann").summary) == (0, 0, 4, 0, 0)
    assert counts(run().summary) == (4, 0, 0, 0, 0)  # for everybody, beside those for ann alone
    ended = run("--max-chars", 60)
    assert ended.code == 1 and "built in another way" in ended.err
