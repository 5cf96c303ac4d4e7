"""Several rankings become one by ranks alone, so scores of different kinds need no common scale."""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.retrieval.search import Hit

_RANK_OFFSET = 60


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Every hit of any ranking, by the sum of 1 / (60 + its rank), ranks from 1; ties by document id and ordinal.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet (SIGIR 2009).
    """
    scores: dict[tuple[str, int], float] = {}
    places: dict[tuple[str, int], Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[hit.passage] = scores.get(hit.passage, 0.0) + 1.0 / (_RANK_OFFSET + rank)
            places[hit.passage] = hit
    return sorted(places[passage]._replace(negative_score=-score) for passage, score in scores.items())
