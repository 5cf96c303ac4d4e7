"""The table of file formats that the index, uploads, batch jobs and the pages share: suffixes, and how files are read.

>>> format_of("manual/Index.HTM").reader
'html.read_html'
"""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class ReaderInput(StrEnum):
    """A reader of TEXT or a PATH gives a `ParsedFile`, of which one document is made; a reader of ROWS gives documents."""

    TEXT = "text"
    PATH = "path"
    ROWS = "rows"


class FileFormat(NamedTuple):
    """`reader`: a function in this package, as `module.name`.

    `is_correctable`: `batch_grammar` corrects a file as it is, markup included. `is_safe`: there is nothing to parse, so that
    an upload needs no process of its own. `is_indexed`: the index takes files of the format. `in_folders`: it takes them from a
    folder, too; other formats only by their names or by a pattern of their suffix: settings hold passwords.
    """

    suffixes: tuple[str, ...]
    reader: str
    reader_input: ReaderInput
    is_correctable: bool = False
    is_safe: bool = False
    is_indexed: bool = True
    in_folders: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether the file is text of an encoding that it does not name."""
        return self.reader_input is ReaderInput.TEXT or ".csv" in self.suffixes


_SETTINGS = (".cfg", ".conf", ".ini", ".log", ".toml", ".yaml", ".yml")
FORMATS = (
    FileFormat((".txt",), "markup.read_plain", ReaderInput.TEXT, is_correctable=True, is_safe=True),
    FileFormat((".md", ".markdown"), "markup.read_markdown", ReaderInput.TEXT, is_correctable=True),
    FileFormat((".rst",), "markup.read_rst", ReaderInput.TEXT, is_correctable=True),
    FileFormat((".adoc", ".asciidoc"), "markup.read_asciidoc", ReaderInput.TEXT),
    FileFormat((".html", ".htm", ".xhtml"), "html.read_html", ReaderInput.PATH, is_correctable=True),
    FileFormat(_SETTINGS, "markup.read_plain", ReaderInput.TEXT, is_safe=True, in_folders=False),
    FileFormat((".tex",), "markup.read_plain", ReaderInput.TEXT, is_correctable=True, is_indexed=False),
    FileFormat((".pdf",), "pdf.read_pdf", ReaderInput.PATH),
    FileFormat((".docx",), "docx.read_docx", ReaderInput.PATH),
    FileFormat((".odt",), "odt.read_odt", ReaderInput.PATH),
    FileFormat((".xlsx",), "containers.read_workbook", ReaderInput.PATH),
    FileFormat((".pptx",), "containers.read_slides", ReaderInput.PATH),
    FileFormat((".epub",), "containers.read_epub", ReaderInput.PATH),
    FileFormat((".eml",), "containers.read_mail", ReaderInput.PATH),
    FileFormat((".ipynb",), "containers.read_notebook", ReaderInput.TEXT),
    FileFormat((".jsonl",), "rows.read_jsonl", ReaderInput.ROWS),
    FileFormat((".csv", ".tsv"), "rows.read_csv", ReaderInput.ROWS),
)
PLAIN_TEXT = FORMATS[0]
_FORMAT_OF = {suffix: each for each in FORMATS for suffix in each.suffixes}
SUFFIXES = tuple(suffix for suffix, each in _FORMAT_OF.items() if each.is_indexed)
NAMED_SUFFIXES = tuple(suffix for suffix in SUFFIXES if not _FORMAT_OF[suffix].in_folders)
CORRECTABLE_SUFFIXES = tuple(suffix for suffix, each in _FORMAT_OF.items() if each.is_correctable)


def format_of(name: str | Path) -> FileFormat:
    """By the suffix, in any case; plain text if the suffix is unknown, as that of README is."""
    return _FORMAT_OF.get(Path(name).suffix.lower(), PLAIN_TEXT)


def has_rows(name: str | Path) -> bool:
    """Whether each row of the file is a document."""
    return format_of(name).reader_input is ReaderInput.ROWS
