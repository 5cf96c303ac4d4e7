"""Documents of the index as pages without scripts: the text as it was read, a span of it marked, and pages of a kept PDF.

Draws everything from the reader's form of the text, escaped. Never sends a part of a file as anything that a browser would run.

    >>> views.html(views.find("ann", "manual/mill.pdf"), start=120, end=161)
"""

import base64
import contextlib
import threading
from collections.abc import Iterator
from functools import lru_cache
from html import escape
from pathlib import Path

import pyarrow.compute as pc

from ragspec.core import Block, BlockKind, Document, blocks_reaching
from ragspec.disk import saving
from ragspec.errors import InputError, NotFound, Overloaded
from ragspec.retrieval.index.index_directory import original_of
from ragspec.retrieval.index.manifest import file_checksum
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.reading.bounded_reader import BoundedReader, ReadLimits
from ragspec.retrieval.reading.pdf_page import DrawnPage, letters_of
from ragspec.retrieval.retriever import Retriever
from services.stores.library import Library
from services.stores.records import StoreMember
from services.stores.uploads import FILE, origin_of
from services.web.pages import head

POLICY = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; sandbox"
_SHOWN_CHARS = 60_000
"""On each side of the marked span."""
_BEFORE_CHARS = 200
_MAX_PAGES = 3
_MAX_DRAWN = 2
"""Pages drawn at the same time, each by a process of its own."""
_WAIT_S = 10.0
_LIMITS = ReadLimits(timeout_s=20.0)
_QUOTE = ' id="quote"'
"""Of the first mark."""
_TAGS = {BlockKind.CODE: "pre", BlockKind.TABLE: "pre"}


class DocumentViews:
    """Of one index. Safe to call from several threads."""

    def __init__(self, index_dir: Path, library: Library, retriever: Retriever) -> None:
        self._index_dir, self._library, self._retriever = index_dir, library, retriever
        self._lock, self._drawing = threading.Lock(), threading.Semaphore(_MAX_DRAWN)
        self._store: Store | None = None

    def find(self, tenant: str, document_id: str) -> Document:
        """Raises: NotFound, also for a document that the tenant may not search; StoreError."""
        for live in self._current().segments:
            for number in pc.indices_nonzero(pc.equal(live.segment.documents["id"], document_id)).to_pylist():
                if live.is_live[number] and live.segment.readable(tenant)[number]:
                    return live.segment.document(number)
        raise NotFound(f"there is no document {document_id!r}")

    def texts(self, member: StoreMember) -> list[str]:
        """Of a file in a vector store: its text, or the texts of its rows in their order. Raises: StoreError."""
        origin, found = origin_of(member), dict[int, str]()
        for segment, own in self._current().readable(member.tenant):
            is_of_file = pc.equal(segment.documents["origin"], origin).to_numpy()
            for document in (segment.document(number) for number in own if is_of_file[number]):
                found[int(document.id.removeprefix(origin).lstrip(":") or 0)] = document.text
        return [found[row] for row in sorted(found)]

    def listing(self, tenant: str, offset: int, limit: int) -> tuple[list[dict[str, str]], int]:
        """Ids, titles and sources of documents that the tenant may search, and how many there are. Raises: StoreError."""
        found = [(segment, number) for segment, own in self._current().readable(tenant) for number in own]
        rows = [
            {name: segment.documents[name][number].as_py() for name in ("id", "title", "source")}
            for segment, number in found[offset : offset + limit]
        ]
        return rows, len(found)

    def changed_at(self) -> int:
        """When the index changed last, in seconds since the epoch. Raises: SaveError."""
        with saving(self._index_dir):
            return int((self._index_dir / CURRENT).stat().st_mtime)

    def original(self, document: Document) -> Path | None:
        """The file that the document was read from, as it was then: an upload, or a kept original."""
        path = original_of(self._index_dir, document.digest) if document.digest else None
        if (file_id := document.metadata.get(FILE)) and not document.digest:
            with contextlib.suppress(NotFound):  # the key may be a user's own
                path = self._library.blobs.path(self._library.records.file(document.owner, str(file_id)))
        return path if path is not None and path.is_file() else None

    def html(self, document: Document, start: int, end: int) -> str:
        """A page with the span [start, end) of the document's text marked, in characters."""
        start = max(0, min(start, len(document.text)))
        end = max(start, min(end, len(document.text)))
        shown = document.title or document.id
        title = escape(shown)
        place = " · ".join(escape(each) for each in (document.source, *_place(document, start)) if each)
        pages = "".join(self._pages(document, start, end))
        text = "".join(_text(document, start, end))
        if _QUOTE in pages:
            text = text.replace(f"<mark{_QUOTE}>", "<mark>", 1)
        notes = "".join(f"<p class=note>{escape(note)}</p>" for note in self._changes(document))
        return (
            f"{head(shown, 'base', 'article')}<header><h1>{title}</h1><p class=place>{place}</p>{notes}</header>"
            f"<main>{pages}<article>{text}</article></main>"
        )

    def _current(self) -> Store:
        with self._lock:
            if self._store is None:
                shared = [] if self._retriever.is_elsewhere else [self._retriever.store]
                self._store = Store.open(self._index_dir, sharing=shared)
            self._store = self._store.refreshed()
            return self._store

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Raises: Overloaded. Why not wait for long: the thread is one of those that serve all tenants."""
        if not self._drawing.acquire(timeout=_WAIT_S):
            raise Overloaded("other pages are being drawn: ask again")
        try:
            yield
        finally:
            self._drawing.release()

    def _changes(self, document: Document) -> Iterator[str]:
        if not document.digest:
            return
        try:
            stat = (path := Path(document.origin)).stat()
            digest = _digest(path, stat.st_size, stat.st_mtime_ns)
        except OSError:
            yield "The file is no longer where it was when it was indexed; this is its text as it was then."
        else:
            if digest != document.digest:
                yield "The file has changed since it was indexed; this is its text as it was then."

    def _pages(self, document: Document, start: int, end: int) -> Iterator[str]:
        """The pages of a kept PDF on which the span stands."""
        blocks = blocks_reaching(document.blocks, start, max(end, start + 1))
        path = self.original(document) if blocks and blocks[0].page else None
        if path is None or not document.source.lower().endswith(".pdf"):
            return
        quote = letters_of(document.text[start:end])
        before = letters_of(document.text[max(0, start - _BEFORE_CHARS) : start])
        number, last = blocks[0].page, min(blocks[0].page + _MAX_PAGES, document.metadata.get("pages", 0) + 1)
        for page in range(number, last):
            try:
                with self._turn(), BoundedReader(_LIMITS) as reader:
                    image, drawn = reader.draw_page(path, page, quote, before)
            except InputError:
                yield "<p class=note>This page cannot be drawn; below is its text as it was read.</p>"
                return
            yield _figure(page, image, drawn, _QUOTE if page == number else "")
            quote, before = quote[drawn.num_found :], ""
            if not quote or not drawn.num_found:
                return


@lru_cache(maxsize=1024)
def _digest(path: Path, *_: int) -> str:
    """Of a file with that size and time. Raises: OSError."""
    return file_checksum(path).sha256


def _figure(number: int, image: bytes, drawn: DrawnPage, first: str) -> str:
    """A page with the quote marked. `first`: attributes of the first mark."""
    width, height = drawn.size
    source = base64.b64encode(image).decode()
    boxes = [f'x="{x}" y="{y}" width="{w}" height="{h}"' for x, y, w, h in drawn.boxes]
    marks = "".join(f"<rect{first * (n == 0)} {box}/>" for n, box in enumerate(boxes))
    picture = f'<image href="data:image/png;base64,{source}" width="{width}" height="{height}"/>'
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Page {number}">{picture}{marks}</svg>'
    return f"<figure>{svg}<figcaption>Page {number}</figcaption></figure>"


def _place(document: Document, start: int) -> Iterator[str]:
    """The page and the headings above a character."""
    blocks = blocks_reaching(document.blocks, start, start + 1)
    if blocks and blocks[0].page:
        yield f"page {blocks[0].page}"
    path: list[tuple[int, str]] = []
    for heading in document.headings:
        if heading.start <= start:
            path = [*(each for each in path if each[0] < heading.level), (heading.level, heading.text)]
    yield " > ".join(text for _, text in path if text)


def _text(document: Document, start: int, end: int) -> Iterator[str]:
    """The text around the span in its blocks. The marked parts together are the span, character by character."""
    text, levels = document.text, {heading.start: heading.level for heading in document.headings}
    first, last = max(0, start - _SHOWN_CHARS), min(len(text), end + _SHOWN_CHARS)
    whole = [Block(0, len(text), BlockKind.PARAGRAPH)]
    blocks = blocks_reaching(document.blocks or whole, first, last)
    at = first = min(first, blocks[0].start) if blocks and document.blocks else first
    if first:
        yield "<p class=note>The document begins above.</p>"
    for block in blocks:
        begin, stop = max(block.start, first), block.end if document.blocks else min(block.end, last)
        yield _marked(text, at, begin, start, end)
        tag = _TAGS.get(block.kind, "p")
        if block.kind is BlockKind.HEADING:
            tag = f"h{min(6, 1 + levels.get(block.start, 1))}"
        yield f'<{tag} class="{block.kind.value}">{_marked(text, begin, stop, start, end)}</{tag}>'
        at = stop
    yield _marked(text, at, max(at, end), start, end)
    if at < len(text.rstrip()):
        yield "<p class=note>The document goes on.</p>"


def _marked(text: str, begin: int, stop: int, start: int, end: int) -> str:
    """The text from `begin` to `stop`, escaped, with the part inside [start, end) marked; the first part has the id "quote"."""
    low, high = max(begin, start), min(stop, end)
    if low >= high:
        return escape(text[begin:stop])
    first = _QUOTE if low == start else ""
    return f"{escape(text[begin:low])}<mark{first}>{escape(text[low:high])}</mark>{escape(text[high:stop])}"
