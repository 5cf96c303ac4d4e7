"""How likely an answer quotes each span that it may quote, and the bias of tokens that follows.

A span's score is a linear function of `SpanFeatures`; a softmax over the spans of all passages makes it a probability. A quote of
neighbouring spans has the sum of their probabilities, less a cost for each span beyond the first. The quotes' tokens make a tree.
Where quotes part, behind the quotation mark, each branch gets the probability of its best quote times a weight. Why no negative
biases: a grammar lets a target write a word in other tokens than the tokenizer's, and those would escape them. The bias is a
sampling parameter, so drafts change no token.

The weights were learned by `pipelines/train_quote_choice.py`. Source: Robertson and Zaragoza, The Probabilistic Relevance
Framework (2009), for BM25; Yih et al., Question Answering Using Enhanced Lexical Semantic Models (2013), for the scoring of
sentences by features.

    >>> quote_bias("Who built the mill?", passages, prompts.plain_ids, TextRules(fit=AnswerFit(quote_weight=20.0)))
    {(18,): {540: 14.3, 504: 1.1}, (18, 504): {9103: 1.1, 2117: 0.2}}
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.core import BlockKind, Passage
from ragspec.rag.quotable import lines_above, quotable_runs
from ragspec.rag.retrieval_head import SpanAttention
from ragspec.rag.wording import TextRules
from ragspec.retrieval.chunking import Span
from ragspec.retrieval.chunking.chunker import SEPARATOR
from ragspec.retrieval.search.analysis import COMMON_WORDS, Analyzer
from ragspec.retrieval_config import AnalyzerConfig


class SpanFeatures(NamedTuple):
    """Of a span and a question, from 0 to 1, `words` to about 2.

    `words`: BM25 among the spans, over the score of a span that holds every word of the question once; common words do not count.
    Symbols are words, and the words of the nearest heading are the span's, where the rules say so. `pairs`: the question's pairs
    of neighbouring words that are neighbours here. `heading`: the question's words in the title and headings above, by rarity.
    `number`: it asks for a number or a time, and the span names one. `code`: it asks for a command or a name, and the span holds
    code. `row`: the span is a row of a table. `place`: 1 over the rank of its passage. `default`: it asks for a default, and the
    span names one.
    """

    words: float
    pairs: float
    heading: float
    number: float
    code: float
    row: float
    place: float
    default: float


PassageRuns = Sequence[tuple[Passage, list[Span]]]
"""Of all passages, the runs of `quotable_runs`."""


class LatestQuote(NamedTuple):
    """In a dialogue: its place, in characters of its document."""

    document_id: str
    start: int
    end: int
    is_record: bool

    @classmethod
    def of(cls, passage: Passage, quote: str) -> Self:
        start = passage.start + passage.text.index(quote)
        return cls(passage.document_id, start, start + len(quote), is_record(quote))

    def bonus(self, document_id: str, start: int) -> float:
        """Of a span, in the unit of scores: the next question reads on, or is about another value of a record."""
        if document_id != self.document_id or self.is_record:
            return _SAME_RECORD * (document_id == self.document_id and start == self.start)
        return _READ_ON * math.exp((self.end - start) / _READ_ON_CHARS) if start >= self.end else 0.0


WEIGHTS = SpanFeatures(5.633, 5.213, 1.102, 2.398, 0.932, 0.917, 1.962, 2.01)
FORMER_WEIGHTS = SpanFeatures(5.319, 4.762, 2.753, 2.511, 0.987, 1.021, 2.097, 0.0)
"""Without `TextRules.places`."""
_READ_ON, _READ_ON_CHARS, _SAME_RECORD = 2.0, 1500.0, 4.0
"""Of a span behind the latest quote of a dialogue, the less the more characters are between. Fitted to the follow-ups of
`pipelines/benchmarks/documentation/tuning`: of 38 whose passages hold the answer 23 choose it, 20 without. And of the record that
was quoted."""
_MAX_SPANS, _SPAN_COST = 3, 0.05
"""Of a quote; and the probability that each span beyond the first must add. Why so little: a reader misses an answer that stands
in the next sentence, and hardly minds a sentence more."""
_MAX_CHARS = 300
"""Of a quote of several spans."""
_BIASED_TOKENS = 3
_LEAST_PROBABILITY = 0.01
"""Of a quote that gets a bias. Why: a prompt of many passages has hundreds of quotes, and each is tokenised."""
_MOST_BIAS = 100.0

_ASKS_NUMBER = re.compile(
    r"(?i)\bhow (?:big|deep|far|fast|high|large|long|many|much|often|old|small|soon|tall|wide)\b|\bwhen\b|\b(?:max|min)imum\b|"
    r"\bwhat (?:is the )?(?:\w+ )?(?:age|date|length|limit|number|percentage|port|rate|size|timeout|version|year)\b|"
    r"\bwhich (?:number|port|version|year)\b"
)
_NUMBER = re.compile(
    r"(?i)\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|hundred|thousand|half|once|twice|zero|never|unlimited)\b"
)
_ASKS_CODE = re.compile(
    r"(?i)\bhow (?:can|do|should|would) i\b|\bwhat (?:do|should) i (?:add|put|run|set|type|use|write)\b|\bwhich\b|"
    r"\b(?:argument|boot|called|command|config\w*|directive|directory|file|flag|function|keyword|one-?liner|option|package|"
    r"parameter|script|setting|switch|syntax|tool|variable)s?\b"
)
_CODE = re.compile(
    r"(?:^|[\s(\"'`|])(?:--?\w[\w-]*|\w+_\w+|[\w.-]*/[\w./-]+|\w+\.\w+\(|\w+\(\)|\$ ?\w+|[a-z]+[A-Z]\w+)|[`<>{}=]|"
    r"\w\.(?:cfg|conf|d|ini|json|log|py|sh|xml|ya?ml)\b"
)
_ASKS_DEFAULT = re.compile(
    r"(?i)\bdefaults?\b|\bout of the box\b|"
    r"(?:\b(?:never|not|unless|without)|n't) (?:\w+ ){0,3}(?:chang|choos|configur|set\b|specif)"
)
_DEFAULT = re.compile(r"(?i)\bdefault|\bunset\b|\bunless\b|\binitial(?:ly\b| value)")
_ASKING_END = re.compile(r"[?？][\"'”’»)\]*`]{0,4}$")
_RECORD = re.compile(r"\|.*(?:\n\|.*)*|[^\n:]{1,80}: .*(?:\n[^\n:]{1,80}: .*)+")
_SYMBOL = re.compile(
    r"(?:(?<![\w~$%@:/.?\\=+^&#!<-])|(?<=\w/)(?=-))(?!\.\.+\w)[~$%@:/.?\\=+^&#!<-]+\w(?:(?:[\w.:+-]|/(?!-))*\w)?"
)
"""An option, pattern, variable or path, whose signs and letter case count: `~N`, `$timeout`, `/etc/hosts`; in `-S/--size` two."""
_ONE_LETTER = re.compile(r"[^\w]+[^\W\d]")
_SATURATION, _LENGTH_WEIGHT = 1.2, 0.3
"""BM25's k1 and b; sentences are short, so their length counts less than a passage's."""


def quote_bias(
    question: str,
    passages: Sequence[Passage],
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    rules: TextRules,
    left_out: Collection[str] = (),
    latest: LatestQuote | None = None,
    seen: SpanAttention | None = None,
) -> dict[tuple[int, ...], dict[int, float]]:
    """Biases of the next token, in logits, by the output tokens before it.

    `passages`: best first. `rules`: the weight of their fit is the bias of a quote of probability 1. `left_out`: as in
    `quotable_runs`. `latest`: of a dialogue that the question follows up. `seen`: where the target looks.
    """
    by_blocks = rules.quotes == "blocks"
    runs = [(passage, run) for passage in passages for run in quotable_runs(passage, left_out, by_blocks=by_blocks)]
    quotes: dict[str, float] = {}
    for passage, run, values in _with_probabilities(question, runs, rules, latest, seen):
        asks = [rules.places and _ASKING_END.search(passage.text, start, end) is not None for start, end in run]
        for first, last, probability in _best_quotes(run, values, asks):
            text = passage.text[run[first][0] : run[last][1]]
            quotes[text] = max(probability, quotes.get(text, 0.0))
    likely = {text for text, probability in quotes.items() if probability >= _LEAST_PROBABILITY}
    if not likely:
        return {}
    # Why beginnings: a target chose freely where a quote without a bias parts from a likely one behind the biased tokens, each of
    # which is a letter at least, or a part of another character
    begins = tuple(
        {text[:_BIASED_TOKENS] if text[:1].isascii() else text[:1] for text in likely} if rules.places else ()
    )
    quotes = {text: each for text, each in quotes.items() if text in likely or text.startswith(begins)}
    (mark, *joined), parted = encode(['"', *(f'"{text}"' for text in quotes)]), encode([f'{text}"' for text in quotes])
    # Why both: some tokenizers have tokens that begin with the mark, and a target may write it alone
    ids = [*map(tuple, joined), *((*mark, *own) for own in parted)]
    return _tree_bias(list(dict(zip(ids, [*quotes.values()] * 2, strict=True)).items()), rules.fit.quote_weight)


def _with_probabilities(
    question: str, runs: PassageRuns, rules: TextRules, latest: LatestQuote | None, seen: SpanAttention | None
) -> Iterator[tuple[Passage, list[Span], list[float]]]:
    scores = span_features(question, runs, rules) @ np.array(WEIGHTS if rules.places else FORMER_WEIGHTS)  # [spans]
    if seen:
        shares = seen.log_shares([(passage, *span) for passage, run in runs for span in run])
        scores += rules.fit.attention_weight * shares
    if latest and rules.places:
        spans = [(passage.document_id, passage.start + start) for passage, run in runs for start, _ in run]
        scores += [latest.bonus(*span) for span in spans]
    chances = np.exp(scores - scores.max(initial=-math.inf))
    # Why rounded: the last bits of sums differ between processors
    values = iter((chances / max(chances.sum(), 1e-9)).round(6).tolist())
    for passage, run in runs:
        yield passage, run, [next(values) for _ in run]


def is_record(text: str) -> bool:
    """Whether a quote is a row of a table, or lines "name: value" as a row of a file is read."""
    return bool(_RECORD.fullmatch(text))


def _best_quotes(
    run: Sequence[Span], values: Sequence[float], asks: Sequence[bool]
) -> Iterator[tuple[int, int, float]]:
    """First and last span, and probability, of the best quote from each span on, and of all shorter ones. A quote that ends in a
    span that `asks` is not likely."""
    for first, (start, _) in enumerate(run):
        quotes, total = list[tuple[int, int, float]](), _SPAN_COST
        for last in range(first, min(first + _MAX_SPANS, len(run))):
            if last > first and run[last][1] - start > _MAX_CHARS:
                break
            total += values[last] - _SPAN_COST
            quotes.append((first, last, 0.0 if asks[last] else total))
        best = max(quotes, key=lambda quote: quote[2])
        yield from quotes[: best[1] - first + 1]


def _tree_bias(
    quotes: Sequence[tuple[tuple[int, ...], float]], weight: float
) -> dict[tuple[int, ...], dict[int, float]]:
    """Behind the mark, and behind a place where quotes part, a few tokens of each branch get its bias: a quote may end there in
    other tokens. Why behind the mark also of one quote: quotes too unlikely for the tree are left out."""
    biases: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    waiting = [(0, 0, quotes)]
    while waiting:
        length, num_biased, alike = waiting.pop()
        branches: dict[int, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
        for ids, probability in alike:
            if len(ids) > length:
                branches[ids[length]].append((ids, probability))
        left = _BIASED_TOKENS if length == 1 or (length and len(branches) > 1) else num_biased
        for token, own in branches.items():
            if max(each for _, each in own) < _LEAST_PROBABILITY:
                continue
            if left:
                biases[own[0][0][:length]][token] = min(_MOST_BIAS, weight * max(each for _, each in own))
            if len(own) > 1 or left > 1 or not length:
                waiting.append((length + 1, max(0, left - 1), own))
    return dict(biases)


def span_features(question: str, runs: PassageRuns, rules: TextRules) -> NDArray[np.float64]:
    """`SpanFeatures` of all spans of all runs, the runs of the best passage first. Shapes: -> [spans, features]."""
    texts = [passage.text[start:end] for passage, run in runs for start, end in run]
    terms, asked = [_terms(text) for text in texts], _terms(question)
    pairs, words_of = {*pairwise(asked)}, _words if rules.symbols else _terms
    own_words = [words_of(text) for text in texts]
    holding = Counter(chain.from_iterable(map(set, own_words)))
    # Why no letter without its sign: `~n` and any "n" of a text would count as half of `~N`
    signs = _SYMBOL.findall(question) if rules.symbols else []
    letters = {sign[-1].lower() for sign in signs if _ONE_LETTER.fullmatch(sign)}
    counts = {term: holding[term] for term in sorted({*asked, *signs} - letters - _common())}
    weights = {term: math.log1p((len(texts) - count + 0.5) / (count + 0.5)) for term, count in counts.items()}
    whole, average = sum(weights.values()) or 1.0, sum(map(len, own_words)) / max(1, len(own_words)) or 1.0
    asks_number, asks_code, asks_default = (
        bool(pattern.search(question)) for pattern in (_ASKS_NUMBER, _ASKS_CODE, _ASKS_DEFAULT)
    )

    def words(own: Sequence[str]) -> float:
        damping = _SATURATION * (1.0 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * len(own) / average)
        held = ((weights[term], count) for term, count in Counter(own).items() if term in weights)
        return math.fsum(weight * count * (_SATURATION + 1.0) / (count + damping) for weight, count in held) / whole

    def held(above: Collection[str]) -> float:
        return math.fsum(weight for term, weight in weights.items() if term in above) / whole

    passages = [passage for passage, run in runs for _ in run]
    words_above = cache(lambda text: frozenset(words_of(text)))
    if rules.places:
        by_blocks = rules.quotes == "blocks"
        above_spans = (_heading_of(passage, start, by_blocks) for passage, run in runs for start, _ in run)
        nearest = [words_above(text) for text in above_spans]
        own_words = [[*own, *(over.difference(own))] for own, over in zip(own_words, nearest, strict=True)]
    above = [held(words_above(f"{passage.title}\n{passage.heading}")) for passage in passages]
    ranks = {key: rank for rank, key in enumerate(dict.fromkeys(passage.id for passage in passages), 1)}
    rows = [
        SpanFeatures(
            words(held_words),
            len(pairs & {*pairwise(own)}) / max(1, len(pairs)),
            over,
            float(asks_number and _NUMBER.search(text) is not None),
            float(asks_code and _CODE.search(text) is not None),
            float("|" in text),
            1.0 / ranks[passage.id],
            float(asks_default and _DEFAULT.search(text) is not None),
        )
        for text, own, held_words, over, passage in zip(texts, terms, own_words, above, passages, strict=True)
    ]
    return np.array(rows).reshape(len(rows), len(SpanFeatures._fields))


def _heading_of(passage: Passage, start: int, by_blocks: bool) -> str:
    """The heading that is nearest above a place in a passage, and the lines that a line of code is nested in."""
    if by_blocks and any(each.kind is BlockKind.CODE and each.start <= start < each.end for each in passage.blocks):
        return "\n".join([_heading_of(passage, start, False), *lines_above(passage.text, start)])
    inside = [each for each in passage.blocks if each.kind is BlockKind.HEADING and each.end <= start]
    if inside:
        return passage.text[inside[-1].start : inside[-1].end]
    return passage.headings[-1] if passage.headings else passage.heading.rsplit(SEPARATOR, 1)[-1]


@cache
def _analyzer() -> Analyzer:
    return Analyzer(AnalyzerConfig(), rules=2)  # by which the weights were learned


@cache
def _common() -> frozenset[str]:
    return frozenset(term for words in COMMON_WORDS.values() for term in _terms(words))


def _terms(text: str) -> list[str]:
    return _analyzer().terms(text, own_only=True)


def _words(text: str) -> list[str]:
    """The terms and symbols of a text."""
    return [*_terms(text), *_SYMBOL.findall(text)]
