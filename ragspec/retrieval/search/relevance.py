"""How well a passage answers a query: both searches' ranks, and where the query's words stand in the passage.

Titles and headings count as fields of their own, and so do the first words of a sentence or an entry, where a term is defined.
Every number depends on the query, the passage, its ranks and the index's word counts alone, so it is the same in any batch,
segment or shard. `pipelines/train_ranking.py` says what the weights were learned on.

    >>> relevance_of(Relevance(terms).features(QueryWeights.of(text, terms(text), statistics), passage, places))
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Passage
from ragspec.retrieval.chunking import sentences
from ragspec.retrieval.chunking.chunker import SEPARATOR
from ragspec.retrieval.search.bm25 import TermStatistics, idf
from ragspec.retrieval.search.segment_search import SearchHit

TermSets = NDArray[np.uint64]
"""Sets of a query's terms, a bit for each."""

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


WEIGHTS = Features(9.93, 3.08, 3.386, 1.081, 1.498, -1.243, -0.05, 3.841, 4.207, 1.586, 6.608, 0.817)


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
    bit_of: dict[str, int]
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
        bit_of = {term: 1 << number for number, term in enumerate(weight_of)}
        return cls(tuple(read), weight_of, bit_of, highest, tuple(sorted(islice(parts, _MOST_READ))))

    def in_text(self, terms: Iterable[str]) -> int:
        """The query's terms among these, as a set of bits."""
        return sum(self.bit_of[term] for term in self.bit_of.keys() & terms)

    def covered(self, found: TermSets) -> NDArray[np.float64]:
        """The weight of each set of the query's terms. Why fsum: its result does not depend on the order."""
        distinct, places = np.unique(found, return_inverse=True)
        weights = list(zip(self.bit_of.values(), self.weight_of.values(), strict=True))
        sums = [math.fsum(weight for bit, weight in weights if own & bit) for own in distinct.tolist()]
        return np.array(sums)[places.reshape(found.shape)]

    def paired(self, texts: Iterable[Sequence[int]]) -> list[float]:
        """The share of the query's pairs of neighbours, by their weights, that are neighbours in each text. A text holds the
        bit of each of its terms, 0 for a term that is not the query's."""
        own = [(self.bit_of[a], self.bit_of[b], self.weight_of[a] + self.weight_of[b]) for a, b in pairwise(self.terms)]
        total = sum(weight for _, _, weight in own) or 1.0
        pairs = ({pair for pair in pairwise(bits) if pair[0] and pair[1]} for bits in texts)
        return [sum(weight for a, b, weight in own if (a, b) in found) / total for found in pairs]


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
    """A passage's terms after an empty one; the places where its sentences with a term begin among them, after 0; and the first
    characters of all its sentences."""

    terms: tuple[str, ...]
    starts: tuple[int, ...]
    beginnings: tuple[str, ...]


class Relevance:
    """Reads passages and keeps what it read of the latest. Safe to call from several threads."""

    def __init__(self, terms: Callable[[str], tuple[str, ...]]) -> None:
        self._terms_of, self._terms = terms, lru_cache(_TEXTS_KEPT)(terms)
        self._read = lru_cache(_TEXTS_KEPT)(self._read_text)

    def features(
        self, query: QueryWeights, passages: Sequence[Passage], places: Sequence[Sequence[ListPlace]]
    ) -> list[Features]:
        """`places` of each passage: in the list by meaning and in the list by words."""
        if not passages:
            return []
        texts = [self._read(passage.text) for passage in passages]
        titles = [self._terms(passage.title) for passage in passages]
        headings = [self._terms(passage.heading) for passage in passages]
        bits = [[query.bit_of.get(term, 0) for term in text.terms] for text in texts]
        above = [query.in_text((*title, *heading)) for title, heading in zip(titles, headings, strict=True)]
        most, paired = self._most_covered(query, texts, bits, above), query.paired(bits)
        in_heading = query.covered(np.array([*map(query.in_text, headings)], np.uint64))
        found = []
        for number, (passage, (meaning, words)) in enumerate(zip(passages, places, strict=True)):
            last = self._terms(passage.heading.rpartition(SEPARATOR)[2])
            sentence, defined, begun, told = most[number]
            found.append(
                Features(
                    meaning.score,
                    words.score / query.highest_bm25,
                    meaning.earliness,
                    words.earliness,
                    sentence,
                    float(in_heading[number]),
                    sum(term in query.weight_of for term in last) / len(last) if last else 0.0,
                    paired[number],
                    defined,
                    begun,
                    told,
                    max((_named(query.identifiers, own) for own in texts[number].beginnings), default=0.0),
                )
            )
        return found

    def _most_covered(
        self, query: QueryWeights, texts: Sequence[_ReadText], bits: Sequence[Sequence[int]], above: Sequence[int]
    ) -> list[list[float]]:
        """The most of the query in a sentence of each text, and in the text's titles with a sentence's first four terms, with its
        first eight, and with all of them.

        Shapes: -> [K, 4].
        """
        own = np.fromiter(chain.from_iterable(bits), np.uint64)  # [T]
        num_sentences = [len(text.starts) for text in texts]
        begins = accumulate(map(len, bits), initial=0)
        each = [begin + start for begin, text in zip(begins, texts, strict=False) for start in text.starts]
        starts = np.array(each, np.int64)  # [sentences]
        place = np.arange(len(own)) - np.repeat(starts, np.diff(starts, append=len(own)))  # in its sentence
        parts = [np.where(place < n, own, 0) for n in (*_FIRST_TERMS, len(own))]
        first, begun, whole = (np.bitwise_or.reduceat(part, starts) for part in parts)  # [sentences]
        over = np.repeat(np.array(above, np.uint64), num_sentences)
        covered = query.covered(np.stack([whole, over | first, over | begun, over | whole]))  # [4, sentences]
        first_of_text = np.array([*accumulate(num_sentences[:-1], initial=0)], np.int64)
        best: list[list[float]] = np.maximum.reduceat(covered, first_of_text, axis=1).T.tolist()
        return best

    def read(
        self,
        query: QueryWeights,
        hits: Sequence[SearchHit],
        passages: Sequence[Passage],
        rankings: Sequence[Sequence[SearchHit]],
    ) -> list[ReadHit]:
        """`rankings`: the first hits by meaning and by words, of which `hits` are some."""
        lists = [_Places(ranking) for ranking in rankings]
        features = self.features(query, passages, [[own.of(hit) for own in lists] for hit in hits])
        return [*map(ReadHit, hits, passages, features)]

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
        own, above = frozenset(self._read(passage.text).terms[1:]), (passage.title, passage.heading)
        others = (other.text for other in earlier if (other.title, other.heading) == above)
        return any(_are_alike(own, frozenset(self._read(other).terms[1:])) for other in others)

    def _read_text(self, text: str) -> _ReadText:
        terms, starts, spans = [""], [0], sentences(text)
        for start, end in spans:
            if own := self._terms_of(text[start:end]):
                starts.append(len(terms))
                terms += own
        beginnings = tuple(text[start : min(end, start + _FIRST_CHARS)] for start, end in spans)
        return _ReadText(tuple(terms), tuple(starts), beginnings)


def _named(identifiers: Sequence[str], beginning: str) -> float:
    return sum(name in beginning for name in identifiers) / len(identifiers) if identifiers else 0.0


def _are_alike(left: frozenset[str], right: frozenset[str]) -> bool:
    shared = len(left & right)
    if not shared or shared < _LEAST_ALIKE * len(left | right):
        return False
    return not any(character.isdigit() for term in left ^ right for character in term)
