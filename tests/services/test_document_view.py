"""A quote in its document: the marked text is the quote, nothing of the file runs, and nobody else's document is shown."""

import html
import re
import shutil
from pathlib import Path

import httpx2 as httpx
import pytest
from letter_encoder import LetterEncoder
from library_files import ended
from office_files import write_docx, write_pdf
from service_parts import Service, Serving

from pipelines.file_ingest import FileIngest
from ragspec.retrieval.index.index_directory import ORIGINALS
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading.bounded_reader import BoundedReader
from services.openai.answer_fields import view_url
from services.settings import ServiceSettings
from services.stores.backup import back_up, restore
from services.stores.document_view import POLICY

HOSTILE = "<script>alert(1)</script> & <b onclick=alert(2)>"
FILES = {
    "page.html": f"<h1>The mill</h1><p>It opens at nine.<p>{html.escape(HOSTILE)}<table><tr><th>Day<tr><td>Monday</table>",
    "notes.md": f"# The mill\n\nIt opens at *nine*.\n\n1. Knock.\n2. Wait.\n\n    {HOSTILE}\n",
    "odd\nname.md": "It opens at nine.",
}
LINE = "The mill was built in 1874 by the people of the valley."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of ann, in an index that keeps them."""
    folder = tmp_path_factory.mktemp("view")
    (folder / "docs").mkdir()
    for name, text in FILES.items():
        (folder / "docs" / name).write_text(text)
    write_docx(folder / "docs" / "manual.docx")
    write_pdf(folder / "docs" / "mill.pdf", [LINE, "A line between.", LINE], ["The second page ends."])
    with IndexWriter(folder / "index", LetterEncoder()) as writer, BoundedReader() as reader:
        ingest = FileIngest(writer, reader, "ann", None, keep_originals=True)
        for path in sorted((folder / "docs").iterdir()):
            ingest.add_file(path, f"docs/{path.name}")
        assert not ingest.report.skipped
        writer.commit()
    return folder


@pytest.fixture(scope="module")
def viewing(folder: Path, serving: Serving) -> Service:
    with serving(folder / "index") as service:
        yield service


def view(service: Service, document_id: str, start: int = 0, end: int = 0, key: str | None = None) -> httpx.Response:
    with service.client(service.keys.ann if key is None else key) as client:
        return client.get(view_url(document_id, start, end).replace("/document?", "/v1/documents/view?"))


def marked(markup: str) -> str:
    return "".join(html.unescape(part) for part in re.findall(r"<mark[^>]*>(.*?)</mark>", markup, re.DOTALL))


@pytest.mark.parametrize("name", ["page.html", "notes.md", "manual.docx", "mill.pdf", "odd\nname.md"])
def test_the_marked_text_is_the_span(viewing: Service, folder: Path, name: str) -> None:
    """A quote that is marked elsewhere, in part, or with markup that runs."""
    document = next(each for each in Store.open(folder / "index").documents() if each.id == f"ann/docs/{name}")
    length = len(document.text)
    for start, end in [(0, length), (3, 8), (length // 3, 2 * length // 3), (length - 4, length), (5, 10**9)]:
        reply = view(viewing, document.id, start, end)
        assert reply.status_code == 200 and marked(reply.text) == document.text[start:end]
        assert reply.text.count('id="quote"') == 1
        assert reply.headers["content-security-policy"] == POLICY and "script" not in POLICY
    shown = re.sub(r"<[^>]*>", "", reply.text.partition("<article>")[2])
    assert html.unescape(shown) == document.text
    assert not re.search(r"<script|<b\b|onclick=(?!alert\(2\)&gt;)", reply.text)
    assert ("<image" in reply.text) == (name == "mill.pdf")


def test_pages_of_a_pdf_are_drawn_with_the_quote(viewing: Service) -> None:
    """The first of two equal lines marked in place of the second; a quote over two pages of which one is shown."""
    spans = ((0, 20), (73, 93))
    first, second = (view(viewing, "ann/docs/mill.pdf", *span).text for span in spans)
    (upper,), (lower,) = (
        re.findall('<rect id="quote" x="(.*?)" y="(.*?)" width="(.*?)"', text) for text in (first, second)
    )
    assert upper[::2] == lower[::2] and int(upper[1]) + 20 < int(lower[1])
    whole = view(viewing, "ann/docs/mill.pdf", 0, 10**6).text
    assert re.findall("<figcaption>(.*?)</figcaption>", whole) == ["Page 1", "Page 2"] and "page 1" in whole


def test_only_who_may_search_a_document_sees_it(viewing: Service) -> None:
    """A link of another tenant that opens; or one that tells a document of another tenant from none."""
    keys = viewing.keys
    for key, status in ((keys.ann, 200), (keys.bob, 404), (keys.trusted, 404), ("", 401)):
        assert view(viewing, "ann/docs/mill.pdf", key=key).status_code == status
        with viewing.client(key) as client:
            assert client.get("/v1/documents/content", params={"id": "ann/docs/mill.pdf"}).status_code == status
    missing, foreign = (view(viewing, name, key=keys.bob).json() for name in ("ann/docs/none.pdf", "ann/docs/mill.pdf"))
    assert str(missing).replace("none", "mill") == str(foreign)


def test_a_file_that_changed_or_is_gone_is_named(viewing: Service, folder: Path) -> None:
    """A quote of last year's file shown as if it stood in this year's."""
    path = folder / "docs" / "page.html"
    text = path.read_text()
    assert "class=note" not in view(viewing, "ann/docs/page.html").text
    path.write_text(text + "<p>New.")
    assert "has changed since it was indexed" in view(viewing, "ann/docs/page.html").text
    path.unlink()
    assert "is no longer where it was" in view(viewing, "ann/docs/page.html").text
    path.write_text(text)


def test_originals_leave_with_their_documents_and_are_in_backups(folder: Path, tmp_path: Path) -> None:
    """A deleted contract whose copy stays on the disk; a restored index that has lost its pages."""
    index = Path(shutil.copytree(folder / "index", tmp_path / "index"))
    with IndexWriter(index) as writer:
        assert writer.delete("ann/docs/mill.pdf")
        writer.commit()
        assert len(list((index / ORIGINALS).iterdir())) == len(FILES) + 2
        writer.compact()
    kept = {path.name for path in (index / ORIGINALS).iterdir()}
    assert kept == {document.digest for document in Store.open(index).documents()} and len(kept) == len(FILES) + 1
    back_up(index, ServiceSettings(), tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored", ServiceSettings())
    assert {path.name for path in (tmp_path / "restored" / ORIGINALS).iterdir()} == kept


def test_uploads_are_their_own_originals(viewing: Service, tmp_path: Path) -> None:
    """An uploaded PDF shown as text alone; or shown to another tenant, or after its deletion."""
    library = viewing.backend.library
    store = library.create_store("bob").id
    with open(write_pdf(tmp_path / "a.pdf", ["The bridge was built in 1921."]), "rb") as content:
        file = library.upload("bob", "bridge.pdf", "assistants", content).id
    library.attach("bob", store, file, {})
    assert ended(library, store, file, "bob") == ("completed", "")
    name = f"{store}:{file}"
    reply = view(viewing, name, 0, 10, viewing.keys.bob)
    assert "<image" in reply.text and marked(reply.text) == "The bridge" and "class=note" not in reply.text
    assert view(viewing, name, 0, 10).status_code == 404
    with viewing.client(viewing.keys.bob) as client:
        client.delete(f"/v1/files/{file}")
    assert view(viewing, name, 0, 10, viewing.keys.bob).status_code == 404
