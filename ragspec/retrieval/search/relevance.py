"""How well a passage answers a query: both searches' ranks, and where the query's words stand in the passage.

Titles and headings count as fields of their own, and so do the first words of a sentence or an entry, where a term is defined.
Every number depends on the query, the passage, its ranks and the index's word counts alone, so it is the same in any batch,
segment or shard. `pipelines/train_ranking.py` says what the weights were learned on.

    >>> relevance_of(Relevance(terms).features(QueryWeights.of(text, terms(text), statistics), passage, places))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import chain, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

from ragspec.core import Passage
from ragspec.retrieval.chunking import sentences
from ragspec.retrieval.chunking.chunker import SEPARATOR
from ragspec.retrieval.search.bm25 import TermStatistics, idf
from ragspec.retrieval.search.segment_search import SearchHit

RANK_OFFSET = 60
"""Of reciprocal ranks."""
NUM_READ = 32
"""Passages of a query that are read to order them."""
_TEXTS_KEPT = 4096
_FIRST_TERMS, _FIRST_CHARS = (4, 8), 60
_LEAST_ALIKE = 0.9
_MOST_READ = 64
"""Terms and identifiers of a query that are looked for; later ones count in BM25 alone. Why: each is, in every sentence."""
_IDENTIFIER = re.compile(r"(?<![\w.-])(?:[\w.-]*(?:\w[._-]+\w|[a-z][A-Z]|[A-Za-z]\d)[\w.-]*|_+\w[\w.]*|--?\w[\w-]*)")
"""A name that is no word of prose: json.dump, PyBool_Check, --force, IPv6."""


class Features(NamedTuple):
    """Each is a share from 0 to 1, of the query's words by their rarity where nothing else is said.

    `cosine`, `bm25`: the score in each search, BM25 as a share of its bound; that of its last passage if it has the passage not.
    `by_meaning`, `by_words`: how early each search has the passage. `sentence`: in one sentence. `heading`: in the heading.
    `last_title`: the words of the lowest title that are the query's. `neighbours`: pairs that stand side by side in both.
    `defined`: in title, heading or the first four words of a sentence; `begun`: or the first eight; `told`: or all of it.
    `named`: identifiers of the query, letter by letter, at the beginning of a sentence.
    """

    cosine: float
    bm25: float
    by_meaning: float
    by_words: float
    sentence: float
    heading: float
    last_title: float
    neighbours: float
    defined: float
    begun: float
    told: float
    named: float


WEIGHTS = Features(5.657, 2.592, 2.521, 1.787, 0.809, -1.072, -1.465, 3.454, 3.86, 1.234, 6.892, 2.42)


def relevance_of(features: Features) -> float:
    """Any real number; higher is better, among passages of one query."""
    return math.fsum(weight * value for weight, value in zip(WEIGHTS, features, strict=True))


_MIDDLE, _SPREAD = 10.0, 3.0


def unit_relevance(relevance: float) -> float:
    """Between 0 and 1, in the same order; 1/2 at a relevance of 10.

    The weights give -8 to 31: about 4 to a passage for coming first in both searches, and about 16 if half of all else holds too.
    """
    return 0.5 * (1.0 + math.tanh(0.5 * (relevance - _MIDDLE) / _SPREAD))


class QueryWeights(NamedTuple):
    """A query's terms in their order, the weight of each (its rarity in the index; all together 1), the bound of its BM25 scores,
    and its identifiers."""

    terms: tuple[str, ...]
    weight_of: dict[str, float]
    highest_bm25: float
    identifiers: tuple[str, ...]

    @classmethod
    def of(cls, text: str, terms: Sequence[str], statistics: TermStatistics) -> QueryWeights:
        rarity = {t: idf(statistics.num_rows, statistics.frequencies.get(t, 0)) for t in sorted(set(terms))}
        read = terms[:_MOST_READ]
        total = math.fsum(rarity[term] for term in set(read)) or 1.0
        highest = math.fsum(rarity[term] for term in terms) or 1.0
        names = [name.group().rstrip(".-") for name in islice(_IDENTIFIER.finditer(text), _MOST_READ)]
        parts = dict.fromkeys(part for name in names for part in (name, name.rpartition(".")[2]) if part)
        weight_of = {term: rarity[term] / total for term in sorted(set(read))}
        return cls(tuple(read), weight_of, highest, tuple(sorted(islice(parts, _MOST_READ))))

    def in_text(self, terms: Iterable[str]) -> AbstractSet[str]:
        """The query's terms among these."""
        return self.weight_of.keys() & terms

    def covered(self, found: AbstractSet[str]) -> float:
        """The weight of some of the query's terms. Why fsum: its result does not depend on the order."""
        return math.fsum([self.weight_of[term] for term in found])

    def paired(self, pairs: Collection[tuple[str, str]]) -> float:
        """The share of the query's pairs of neighbours, by their weights."""
        own = [(pair in pairs, self.weight_of[pair[0]] + self.weight_of[pair[1]]) for pair in pairwise(self.terms)]
        total = sum(weight for _, weight in own)
        return sum(weight for is_found, weight in own if is_found) / total if total else 0.0


class ListPlace(NamedTuple):
    """A passage's score in a list of hits, or the last passage's; and how early it comes, less than 1; 0 if it is missing."""

    score: float
    earliness: float


class _Places:
    def __init__(self, ranking: Sequence[SearchHit]) -> None:
        self._ranking = ranking
        self._places = {hit.passage: place for place, hit in enumerate(ranking)}

    def of(self, hit: SearchHit) -> ListPlace:
        place = self._places.get(hit.passage)
        if place is None:
            return ListPlace(self._ranking[-1].score if self._ranking else 0.0, 0.0)
        return ListPlace(self._ranking[place].score, RANK_OFFSET / (RANK_OFFSET + 1 + place))


class ReadHit(NamedTuple):
    hit: SearchHit
    passage: Passage
    features: Features


def hits_to_read(fused: Sequence[SearchHit], depth: int) -> list[SearchHit]:
    """The first hits that a ranking has among its first `depth`. They do not depend on how many hits are wanted."""
    return [hit for hit in fused[:NUM_READ] if hit.score >= 1.0 / (RANK_OFFSET + depth)]


class _ReadText(NamedTuple):
    """A passage's sentences as terms and as their first characters; its pairs of neighbouring terms; and all its terms."""

    sentences: tuple[tuple[str, ...], ...]
    beginnings: tuple[str, ...]
    pairs: frozenset[tuple[str, str]]
    terms: frozenset[str]


class Relevance:
    """Reads passages and keeps what it read of the latest. Safe to call from several threads."""

    def __init__(self, terms: Callable[[str], tuple[str, ...]]) -> None:
        self._terms = lru_cache(_TEXTS_KEPT)(terms)
        self._read = lru_cache(_TEXTS_KEPT)(self._read_text)

    def features(self, query: QueryWeights, passage: Passage, places: Sequence[ListPlace]) -> Features:
        """`places`: in the list by meaning and in the list by words."""
        read, title = self._read(passage.text), self._terms(passage.title)
        heading, last = self._terms(passage.heading), self._terms(passage.heading.rpartition(SEPARATOR)[2])
        above = frozenset(query.in_text((*title, *heading)))
        found = {frozenset(query.in_text(own)) for own in read.sentences}
        first, begun = ({above.union(query.in_text(own[:n])) for own in read.sentences} for n in _FIRST_TERMS)
        meaning, words = places
        return Features(
            meaning.score,
            words.score / query.highest_bm25,
            meaning.earliness,
            words.earliness,
            max(map(query.covered, found), default=0.0),
            query.covered(query.in_text(heading)),
            sum(term in query.weight_of for term in last) / len(last) if last else 0.0,
            query.paired(read.pairs),
            max(map(query.covered, first or (above,))),
            max(map(query.covered, begun or (above,))),
            max(map(query.covered, {above | own for own in found} or (above,))),
            max((_named(query.identifiers, own) for own in read.beginnings), default=0.0),
        )

    def read(
        self,
        query: QueryWeights,
        hits: Sequence[SearchHit],
        passages: Sequence[Passage],
        rankings: Sequence[Sequence[SearchHit]],
    ) -> list[ReadHit]:
        """`rankings`: the first hits by meaning and by words, of which `hits` are some."""
        places = [_Places(ranking) for ranking in rankings]
        return [
            ReadHit(hit, passage, self.features(query, passage, [own.of(hit) for own in places]))
            for hit, passage in zip(hits, passages, strict=True)
        ]

    def ordered(self, read: Sequence[ReadHit], fused: Sequence[SearchHit], depth: int) -> list[SearchHit]:
        """At most `depth` passages: first the read ones by relevance, without those that repeat a better one; then the others in
        their fused order, each with a score below those."""
        scored = [(each.hit._replace(negative_score=-relevance_of(each.features)), each.passage) for each in read]
        best, kept = list[SearchHit](), list[Passage]()
        for hit, passage in sorted(scored, key=itemgetter(0)):
            if len(best) == depth:
                return best
            if not self.is_repeated(passage, kept):
                best.append(hit)
                kept.append(passage)
        passages, lowest = {hit.passage for hit in best}, min((hit.score for hit in best), default=0.0)
        others = (hit._replace(negative_score=1.0 - lowest - hit.score) for hit in fused if hit.passage not in passages)
        return list(islice(chain(best, others), depth))

    def is_repeated(self, passage: Passage, earlier: Sequence[Passage]) -> bool:
        """Whether it has nearly the same words as an earlier passage under the same title and heading, and the same numbers.

        Why the headings: the same words about two products or two options are two facts.
        """
        own, above = self._read(passage.text).terms, (passage.title, passage.heading)
        others = (other.text for other in earlier if (other.title, other.heading) == above)
        return any(_are_alike(own, self._read(other).terms) for other in others)

    def _read_text(self, text: str) -> _ReadText:
        spans = sentences(text)
        own = tuple(self._terms(text[start:end]) for start, end in spans)
        whole = [term for each in own for term in each]
        beginnings = tuple(text[start : min(end, start + _FIRST_CHARS)] for start, end in spans)
        return _ReadText(own, beginnings, frozenset(pairwise(whole)), frozenset(whole))


def _named(identifiers: Sequence[str], beginning: str) -> float:
    return sum(name in beginning for name in identifiers) / len(identifiers) if identifiers else 0.0


def _are_alike(left: frozenset[str], right: frozenset[str]) -> bool:
    shared = len(left & right)
    if not shared or shared < _LEAST_ALIKE * len(left | right):
        return False
    return not any(character.isdigit() for term in left ^ right for character in term)
