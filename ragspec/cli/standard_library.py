"""The index of Python's documentation: of the whole standard library, or of the modules that the demo asks about.

`ragspec ask`, `evaluate` and `serve` use the whole library where no index is configured. An index lies in the user's cache, in a
folder named by a hash of documents, encoder and settings; a damaged one is built again. A build commits as it goes, so a killed
build resumes, and the whole library begins with the demo's passages. The copy that a service writes to is never rebuilt: it holds
other documents too.

    >>> store = cached_library(documents_of(corpus, DEMO_MODULES), encoder, cache_folder(), say)
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ragspec.config import IndexConfig
from ragspec.core import Document, Say
from ragspec.disk import saving
from ragspec.errors import StoreError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter

NO_INDEX = "no index is configured: the docstrings of Python's standard library answer (--index names your documents)"
DEMO_MODULES = frozenset(
    "calendar collections contextlib datetime functools heapq itertools json math re sqlite3 statistics textwrap time".split()
)
"""The modules of the demo's questions, and those whose passages come next to theirs in a search of the whole library."""

_CACHE_NAME = "stdlib"
_PASSAGES_PER_ENCODE = 128
_PASSAGES_PER_COMMIT = 1024

Corpus = Iterable[tuple[str, str]]
"""Pairs of a qualified name and its documentation."""


def documents_of(corpus: Corpus, modules: Collection[str] = ()) -> list[Document]:
    """A document for each documented name, titled by the name; of these modules, or of all."""
    return [Document(name, text, title=name) for name, text in corpus if not modules or _module(name) in modules]


def cached_library(documents: Sequence[Document], encoder: TextEncoder, cache: Path, say: Say) -> Store:
    """The index of these documents in the cache, built if it is not there. Raises: SaveError, IndexBusy."""
    library = cache / _CACHE_NAME
    folder = library / _key(documents, encoder)
    try:
        return Store.open(folder, encoder.identity)
    except StoreError:
        building = folder.with_name(f"{folder.name}.building")
        demo = library / _key([document for document in documents if _module(document.id) in DEMO_MODULES], encoder)
        with saving(building):
            if demo != folder and demo.exists() and not building.exists():
                shutil.copytree(demo, building)
        _build(documents, building, encoder, say)
        with saving(folder):
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(building, folder)
    return Store.open(folder, encoder.identity)


def service_library(documents: Sequence[Document], encoder: TextEncoder, cache: Path, home: Path, say: Say) -> Path:
    """The folder in `home` of an index that a service may add documents to; at first a copy of the cached index.

    Raises: SaveError; StoreError if the index is damaged.
    """
    folder = home / _key(documents, encoder)
    if folder.exists():
        return Store.open(folder, encoder.identity).index_dir
    store = cached_library(documents, encoder, cache, say)
    with saving(folder):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            os.rename(shutil.copytree(store.index_dir, Path(scratch) / "index"), folder)
    return folder


def _build(documents: Sequence[Document], folder: Path, encoder: TextEncoder, say: Say) -> None:
    """Makes an index of exactly these documents. Documents that the folder's index holds already are not encoded again."""
    committed = 0
    with IndexWriter(folder, encoder, IndexConfig(), replace=True, passages_per_encode=_PASSAGES_PER_ENCODE) as writer:
        for number, document in enumerate(documents):
            say("encoding docstrings, once", number, len(documents))
            writer.upsert(document)
            if writer.changes.encoded - committed >= _PASSAGES_PER_COMMIT:
                writer.commit()
                committed = writer.changes.encoded
        writer.delete_unseen()
        writer.compact()
        writer.purge()


def _key(documents: Sequence[Document], encoder: TextEncoder) -> str:
    return content_key(documents, encoder.identity, IndexConfig())[:24]


def _module(name: str) -> str:
    return name.partition(".")[0]
