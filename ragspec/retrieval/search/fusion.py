"""Several rankings become one by ranks alone, so scores of different kinds need no common scale."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.retrieval.search.segment_search import SearchHit

_RANK_OFFSET = 60


def reciprocal_rank_fusion(rankings: Sequence[Sequence[SearchHit]], depth: int) -> list[SearchHit]:
    """Hits among the first `depth` of any ranking, by the sum of 1 / (60 + rank), ranks from 1; then the rest, by 1 / (60 + best
    rank), which is always less. Ties by document id and ordinal. So the first hits do not depend on how many are wanted.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet (SIGIR 2009).
    """
    scores: dict[tuple[str, int], float] = {}
    places: dict[tuple[str, int], SearchHit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking[:depth], 1):
            scores[hit.passage] = scores.get(hit.passage, 0.0) + 1.0 / (_RANK_OFFSET + rank)
            places[hit.passage] = hit
    deeper: dict[tuple[str, int], float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking[depth:], depth + 1):
            if hit.passage not in scores:
                deeper[hit.passage] = max(deeper.get(hit.passage, 0.0), 1.0 / (_RANK_OFFSET + rank))
                places[hit.passage] = hit
    scores |= deeper
    return sorted(places[passage]._replace(negative_score=-score) for passage, score in scores.items())
