"""Reads files as documents: plain text that can be quoted, with its headings and blocks.

A file is one document, named by its path below the input. Each row of a .jsonl, .csv or .tsv file is one document, named by its
`id` or by file and line. Reads plain files only. Every error in a file, or in a library that parses it, becomes an InputError
with file and reason; a part that is not read becomes an `Unread` with place and reason. Never reads headers and footers of
.docx files, pictures, or scanned text.

    >>> list(read_documents(["manual/", "notes/**/*.md", "faq.jsonl"]))
"""

from ragspec.retrieval.reading.file_reader import read_documents, read_file
from ragspec.retrieval.reading.file_search import find_files, input_root, passed_over
from ragspec.retrieval.reading.formats import CORRECTABLE_SUFFIXES, NAMED_SUFFIXES, SUFFIXES, format_of, has_rows
from ragspec.retrieval.reading.parsed_file import Unread

__all__ = [
    "CORRECTABLE_SUFFIXES",
    "NAMED_SUFFIXES",
    "SUFFIXES",
    "Unread",
    "find_files",
    "format_of",
    "has_rows",
    "input_root",
    "passed_over",
    "read_documents",
    "read_file",
]
