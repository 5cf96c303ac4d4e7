"""Files become documents: plain text that can be quoted, with the places of its titles.

Text files (.txt .md .rst), web pages (.html), .pdf and .docx are one document each, named by their path below the input they came
from. A row of a .jsonl or .csv file is one document, named by its own `id` or by file and line. Nothing is read that is no
plain file, and whatever goes wrong inside a file, of its own making or of the library that reads it, is an InputError with file
and reason. Headers, footers and footnotes of .docx, pictures, and text that was scanned are not read.

    >>> list(read_documents(["manual/", "notes/**/*.md", "faq.jsonl"]))
"""

from ragspec.retrieval.reading.file_reader import read_documents, read_file
from ragspec.retrieval.reading.file_search import SUFFIXES, find_files, input_root

__all__ = ["SUFFIXES", "find_files", "input_root", "read_documents", "read_file"]
