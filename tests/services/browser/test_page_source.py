"""The page of a source: a quote is marked in its document, whatever the document's format, and in nobody else's."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_page import ChatPage
from letter_encoder import LetterEncoder
from office_files import write_docx, write_pdf
from scripted import MILL, MILL_QUOTES, SCRIPT_TAG
from service_parts import Service, soon

from pipelines.file_ingest import FileIngest
from ragspec.core import Document
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading.bounded_reader import BoundedReader
from services.openai.answer_fields import view_url

pytestmark = pytest.mark.browser

LINES = [f"Line {n} tells of the mill and of the river, of corn and of rain." for n in range(30)]
SHOWN = "".join(f"<p>{line}</p>" for line in LINES)
QUOTES = {
    "page.html": "The mill opens at nine. 🌾",
    "notes.md": "The mill opens at nine.",
    "manual.docx": "Run the installer. Then restart.",
    "mill.pdf": "The mill opens at nine on all days but Monday.",
}


@pytest.fixture(scope="module")
def quotes(running: tuple[Service, object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of each quote, of ann's files."""
    folder = tmp_path_factory.mktemp("files")
    table = "<table><tr><th>Day<th>Opens<tr><td>Monday<td>never</table><pre>wait\n  then knock</pre><ol><li>Knock.<li>Wait.</ol>"
    page = f"<h1>Visit</h1>{SHOWN}<h2>Hours</h2><p>{QUOTES['page.html']} {SCRIPT_TAG}</p>{table}{SHOWN}"
    (folder / "page.html").write_text(page.replace(SCRIPT_TAG, SCRIPT_TAG.replace("<", "&lt;")))
    (folder / "notes.md").write_text(
        "\n\n".join(["# Visit", *LINES, f"## Hours\n\n*So:* {QUOTES['notes.md']}", *LINES])
    )
    write_docx(folder / "manual.docx")
    write_pdf(
        folder / "mill.pdf",
        ["# Visit", *LINES[:9]],
        [*LINES[:5], "The mill opens at nine on all", "days but Monday. It is closed in winter."],
    )
    index = Path(running[0].backend.config.retriever.index_dir)
    with IndexWriter(index, LetterEncoder()) as writer, BoundedReader() as reader:
        ingest = FileIngest(writer, reader, "ann", None, keep_originals=True)
        for name in QUOTES:
            ingest.add_file(folder / name, name)
        writer.commit()
    documents = {document.source: document for document in Store.open(index).documents() if document.owner == "ann"}
    return {name: _address(documents[name], quote) for name, quote in QUOTES.items()}


def _address(document: Document, quote: str) -> str:
    start = document.text.index(quote)
    return view_url(document.id, start, start + len(quote))


@pytest.mark.parametrize(("name", "scheme"), list(zip(QUOTES, ["light", "dark"] * 2, strict=True)))
def test_a_quote_is_marked_in_its_document(
    open_page: Callable[..., ChatPage], service: Service, quotes: dict[str, str], name: str, scheme: str
) -> None:
    """A mark beside the quote or out of sight, a page without its style, or markup of the file that runs."""
    page = open_page(service, service.keys.ann, quotes[name], color_scheme=scheme)
    frame = page.page.frame_locator("#source")
    frame.locator("#quote").wait_for()
    assert "".join(frame.locator("mark").all_text_contents()) == QUOTES[name]
    assert frame.locator("body").evaluate("body => getComputedStyle(body).maxWidth") == "832px"
    assert soon(lambda: 50 < frame.locator("#quote").bounding_box()["y"] < 850)
    page.shot(f"source-{name}-{scheme}")
    assert frame.locator("#quote").is_visible() and page.page.evaluate("window.hit") is None
    if name == "mill.pdf":
        assert frame.locator("figcaption").all_text_contents() == ["Page 2"]
        box = frame.locator("rect").first.bounding_box()
        assert frame.locator("rect").count() == 2 and 200 < box["y"] < 600 and box["width"] > 150


def test_another_tenant_s_link_opens_nothing(
    open_page: Callable[..., ChatPage], service: Service, quotes: dict[str, str]
) -> None:
    """A document of a tenant shown to whoever has its address."""
    page = open_page(service, service.keys.bob, quotes["notes.md"])
    page.page.get_by_text("There is no such document").wait_for()
    assert page.page.locator("#source").is_hidden()
    page.shot("source-of-another-tenant")


def test_the_chat_opens_a_quote_in_its_document(chat: ChatPage) -> None:
    """A source that can be read only in part; or a tab that asks for the key again."""
    turn = chat.answered(MILL)
    with chat.page.expect_popup() as opened:
        turn.locator(".quote").first.click()
    frame = opened.value.frame_locator("#source")
    frame.locator("#quote").wait_for()
    assert frame.locator("mark").all_text_contents() == [MILL_QUOTES[0]]
    assert "grinds no corn" in frame.locator("article").text_content()
