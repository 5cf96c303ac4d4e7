"""Builds the next generation of an index: fills, merges and publishes segments.

Owns which documents the next generation holds. Every method that writes files raises OSError where the disk refuses.

    >>> builder.write(embedded_document)
    >>> builder.seal()
    >>> builder.publish().generation
"""

import contextlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ragspec.config import IndexConfig
from ragspec.errors import ConfigError, StoreError, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity, TextEncoder
from ragspec.retrieval.index.document_map import DocumentMap
from ragspec.retrieval.index.embedding_queue import EmbeddedDocument
from ragspec.retrieval.index.index_directory import IndexDirectory
from ragspec.retrieval.index.manifest import Manifest, SegmentRecord, read_current
from ragspec.retrieval.index.segment_writer import IndexSegmentWriter, merge_segments
from ragspec.retrieval.index.store import IndexSegment, LiveSegment, Store, check_encoder
from ragspec.retrieval.search.analysis import RULES, Analyzer, rules_of
from ragspec.retrieval.search.faiss_index import build_faiss_index

MAX_SEGMENT_PASSAGES = 1_000_000
MAX_SEGMENTS = 16
"""A search looks into every segment, so a commit merges the smaller half of the segments that are at most half full if there are
more than this. Fuller segments are left alone, or every commit would write a million passages anew."""

_EARLIER_LANGUAGE = "english"
"""The default before languages were detected. An index built with it keeps it where the settings name no other."""


class GenerationBuilder:
    """States: open -> closed. At most one segment is being filled."""

    def __init__(
        self,
        directory: IndexDirectory,
        encoder: TextEncoder | None,
        config: IndexConfig | None,
        *,
        replace: bool,
        with_texts: bool,
    ) -> None:
        """Build on the index in the directory. `with_texts`: as for `DocumentMap`; the other arguments: as for `IndexWriter`.

        Raises: StoreMissing without index and encoder; unless `replace`, also StoreCorrupt, EncoderMismatch and ConfigError.
        """
        store, self._encoder, self.config = _base_index(directory.path, encoder, config, replace)
        self.documents = DocumentMap(store, with_texts)
        self._manifest = store.manifest if store is not None else None
        self._directory = directory
        self._analyzer = Analyzer(self.config.words, rules_of(store.manifest.analyzer) if store is not None else RULES)
        self._filling: IndexSegmentWriter | None = None

    def close(self) -> None:
        if self._filling is not None:
            self._filling.close()

    def write(self, embedded: EmbeddedDocument) -> None:
        """Add a document to the segment that is being filled."""
        size = self._filling.num_passages if self._filling else 0
        if size and size + len(embedded.passages) > MAX_SEGMENT_PASSAGES:
            self.seal()
        if self._filling is None:
            self._filling = IndexSegmentWriter(self._directory.stage(), self._encoder.dimension)
        terms = (self._analyzer.terms(text) for text in embedded.texts)
        self._filling.add(embedded.document, embedded.passages, embedded.vectors, terms)
        self.documents.add(embedded.document)

    def seal(self) -> None:
        """Complete the segment that is being filled, if there is one."""
        if self._filling is not None:
            self._filling.finish()
            self.documents.seal(self._place(self._filling))
            self._filling = None

    def is_compact(self) -> bool:
        """Whether no segment holds deleted documents and none can be merged with its neighbour."""
        segments = self.documents.segments
        return all(live.is_live.all() for live in segments) and len(_merge_groups(segments)) == len(segments)

    def merge_small(self) -> None:
        """Merge the smaller half of the small segments if there are too many of them. See `MAX_SEGMENTS`."""
        sizes = {number: live.num_live_passages for number, live in enumerate(self.documents.segments)}
        small = sorted((n for n, size in sizes.items() if size <= MAX_SEGMENT_PASSAGES // 2), key=sizes.__getitem__)
        if len(small) > MAX_SEGMENTS:
            self.merge(sorted(small[: len(small) // 2]))

    def merge(self, numbers: Sequence[int]) -> None:
        """Write the live documents of these segments as new segments."""
        sources = [self.documents.segments[number] for number in numbers]
        merged = []
        for group in _merge_groups(sources):
            writer = IndexSegmentWriter(self._directory.stage(), self._encoder.dimension)
            with contextlib.closing(writer):
                merge_segments(group, writer)
            if writer.num_documents:
                merged.append(self._place(writer))
        self.documents.replace(numbers, merged)

    def publish(self) -> Manifest:
        """Make the sealed segments the current generation. Without changes, returns the current manifest."""
        records, deleted = self.documents.records()
        if self._manifest is None or (self._manifest.segments, self._manifest.config) != (records, self.config):
            manifest = Manifest(
                generation=self._directory.free_number("generation"),
                content_key=self.documents.content.key(self._encoder, self.config, self._analyzer.id),
                content_sum=str(self.documents.content),
                created_by=f"ragspec {version('ragspec')}",
                encoder=self._encoder,
                analyzer=self._analyzer.id,
                config=self.config,
                segments=records,
            )
            self._directory.publish(manifest, deleted)
            self._manifest = manifest
        return self._manifest

    def _place(self, writer: IndexSegmentWriter) -> IndexSegment:
        """Build the FAISS index of a finished segment, move it to its final name, and open it."""
        build_faiss_index(writer.folder, self.config.dense)
        number = self._directory.free_number("segment")
        name = f"segment-{number:06d}"
        record = SegmentRecord(
            number=number,
            num_documents=writer.num_documents,
            num_passages=writer.num_passages,
            num_live_passages=writer.num_passages,
            files=self._directory.place(writer.folder, name),
        )
        return IndexSegment(self._directory.path / name, record, self._encoder.dimension, self.config.dense)


def _merge_groups(sources: Sequence[LiveSegment]) -> list[list[LiveSegment]]:
    """Neighbouring segments that fit into one segment, in order."""
    groups: list[list[LiveSegment]] = []
    room = 0
    for live in sources:
        if live.num_live_passages > room or not groups:
            groups.append([])
            room = MAX_SEGMENT_PASSAGES
        groups[-1].append(live)
        room -= live.num_live_passages
    return groups


def _base_index(
    index_dir: Path, encoder: TextEncoder | None, config: IndexConfig | None, replace: bool
) -> tuple[Store | None, EncoderIdentity, IndexConfig]:
    """The index to build on, if there is a fitting one, with the encoder and settings of the next generation."""
    store, built = None, None
    try:
        built = read_current(index_dir)[1].config
        if config is not None and not replace and config.words.language == "auto":
            earlier = config.words.model_copy(update={"language": _EARLIER_LANGUAGE})
            config = config.model_copy(update={"words": earlier}) if built.words == earlier else config
        store = _fitting_store(index_dir, encoder, config or built, renew=replace)
    except StoreMissing:
        pass
    except (StoreError, ConfigError):
        if not replace:
            raise
    if encoder is not None:
        return store, encoder.identity, config or built or IndexConfig()
    if store is None:
        raise StoreMissing(f"there is no index at {index_dir}")
    return store, store.manifest.encoder, config or store.manifest.config


def _fitting_store(index_dir: Path, encoder: TextEncoder | None, config: IndexConfig, *, renew: bool) -> Store:
    """`renew`: an index with earlier rules for words does not fit."""
    store = Store.open(index_dir)
    rules = RULES if renew else rules_of(store.manifest.analyzer)
    if encoder is not None:
        check_encoder(store.manifest, encoder.identity)
    built = store.manifest.config
    if built != config or store.manifest.analyzer != Analyzer(built.words, rules).id:
        raise ConfigError(
            f"the index at {index_dir} was built in another way ({built!r}): "
            "add to it with its own settings, or build another one"
        )
    return store
