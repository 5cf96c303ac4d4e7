"""Sharded retrieval in the suite `cluster`: the same index on 1, 2 and 4 shards, each once or twice, against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ragspec.cluster.actors import ActorPool
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.config import IndexConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.errors import StoreError
from ragspec.evaluation.report import Result
from ragspec.evaluation.suites.retrieval.identity import answers_of
from ragspec.evaluation.suites.retrieval.quality import MODES, Mode
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever

LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
"""(shards, holders of each segment)"""

NUM_SEGMENTS = 7
_BATCH = 16


def segmented_index(documents: Sequence[Document], encoder: TextEncoder, cache_dir: Path) -> Path:
    """An index of several segments, built once. Raises: SaveError, InputError."""
    folder = cache_dir / f"{NUM_SEGMENTS}-segments-{content_key(documents, encoder.identity, IndexConfig())[:24]}"
    with contextlib.suppress(StoreError):
        if len(Store.open(folder, encoder.identity).segments) == NUM_SEGMENTS:
            return folder
    with IndexWriter(folder, encoder) as writer:
        for number in range(NUM_SEGMENTS):
            for document in documents[number::NUM_SEGMENTS]:
                writer.upsert(document)
            writer.commit()
    return folder


def sharded(index_dir: Path, encoder: TextEncoder, queries: Sequence[str], tick: Tick) -> list[Result]:
    """One row for each layout and mode: the number of queries whose passages and scores are bitwise equal."""
    configs: dict[Mode, RetrieverConfig] = {m: RetrieverConfig(index_dir=str(index_dir), mode=m) for m in MODES}
    store = Store.open(index_dir, encoder.identity)
    truth = {m: answers_of(Retriever(encoder, store, configs[m], follow=False), queries, 1) for m in MODES}
    rows: list[Result] = []
    for num_shards, copies in LAYOUTS:
        with ActorPool(ShardActor, count=num_shards * copies, prefix="shard") as actors:
            for mode in MODES:
                retriever = ClusterRetriever(configs[mode], encoder, actors.replicas, shard_replicas=copies)
                with contextlib.closing(retriever):
                    found = answers_of(retriever, queries, _BATCH)
                same = sum(a == b for a, b in zip(found, truth[mode], strict=True))
                layout = {"shards": num_shards, "copies": copies, "mode": mode}
                rows.append(layout | {"num_identical": same, "num_compared": len(queries)})
                tick("sharded retrieval", len(rows), len(LAYOUTS) * len(MODES))
    return rows


def identical_share(rows: Sequence[Result]) -> float | None:
    """The share of equal results over all rows."""
    compared = sum(row["num_compared"] for row in rows)
    return sum(row["num_identical"] for row in rows) / compared if compared else None
