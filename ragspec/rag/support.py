"""Labels every sentence of an answer by what a source says of it, and finds invented quotations.

Owns the rule. A sentence is `quoted` if it stands in a passage, character for character. It is `supported` if all its words and
numbers stand in one sentence of a passage, in their order, and nothing between them was left out that could change their
meaning: negations, numbers, names, conjunctions. It is `related` to the words of a passage that `ragspec.rag.evidence` finds
for it. Any other sentence is `unsupported`, also one that is true. Never calls a sentence a quote that is not string-identical
to its source.

    >>> [each.label for each in label_sentences("The mill opens at nine [1]. It never closes.", passages, citations)]
    ['supported', 'unsupported']
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ragspec.core import Citation, Passage
from ragspec.rag.answer import AnswerSentence
from ragspec.rag.citations import find_citations, find_words
from ragspec.rag.evidence import Evidence
from ragspec.rag.restatement import Word, content_words, restates, words_of
from ragspec.rag.wording import abstains
from ragspec.retrieval.chunking import Span, sentences

_MARKERS = re.compile(r"(?:[\s,;]*\[\d{1,3}\])+[.;:]?")
_NUMBER = re.compile(r"\[(\d{1,3})\]")
_SHORT_ANSWER = re.compile(r"(?:[\s,;]*\[\d{1,3}\])+\s*[–—-]\s")
"""Ends the quote and begins the short answer in the format of `ragspec.rag.wording`."""
_LEAD_IN = re.compile(r"(?<=:)\s+(?=[\"“„«「])")
"""Ends the words before a quote, which are a sentence of their own."""
_DASHES = ("–", "—", "-")
_EDGE = " \t\r\n\"'“”„«»‘’「」*–—"
_BULLET = re.compile(r"(?:[-*•]|\d{1,3}[.)])\s+")
_FRAME = re.compile(
    r"(?:according to (?:the |your )?(?:passage|source|document|text)s?(?: \[?\d+\]?)?,"
    r"|(?:the |your )?(?:passage|source|document|text)s?(?: \[?\d+\]?)? (?:says?|states?|reads?)(?: that\b|:|,)?"
    r"|the (?:short |correct )?answer (?:is|:)(?: that\b|:)?)\s*",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(?<!\w)\"|[“„«「『]")  # Why not behind a word: 5" wide
_CLOSING = {'"': '"', "“": "”", "„": "“”", "«": "»", "「": "」", "『": "』"}
_MAX_INNER_MARKS = 16


@dataclass(frozen=True)
class _SourceSentence:
    passage: Passage
    start: int
    end: int

    @cached_property
    def words(self) -> list[Word]:
        return words_of(self.passage.text[self.start : self.end])

    def holds(self, quoted: AnswerSentence) -> bool:
        """Whether it has words of the quote."""
        is_same = quoted.passage_id == self.passage.id
        return is_same and quoted.passage_start < self.end and self.start < quoted.passage_end


class Support(NamedTuple):
    """`unknown_quotations`: spans of the answer inside quotation marks that stand in no passage."""

    citations: tuple[Citation, ...]
    sentences: tuple[AnswerSentence, ...]
    unknown_quotations: tuple[Span, ...]

    @property
    def is_found(self) -> bool:
        """Whether a passage holds the words of some sentence."""
        return any(sentence.label != "unsupported" for sentence in self.sentences)


def find_support(
    answer: str, passages: Sequence[Passage], question: str | None = None, *, numbered: bool = True
) -> Support:
    """Citations, labelled sentences and invented quotations; without passages nothing is labelled.

    `question`: of an answer in free words, whose sentences get evidence; None: no sentence becomes `related`.
    `numbered`: `[2]` in the answer means `passages[1]`.
    """
    if not passages:
        return Support((), (), ())
    citations = find_citations(answer, passages, numbered=numbered)
    labelled = label_sentences(answer, passages, citations, question, numbered=numbered)
    return Support(tuple(citations), tuple(labelled), tuple(unknown_quotations(answer, passages)))


def label_sentences(
    answer: str,
    passages: Sequence[Passage],
    citations: Sequence[Citation],
    question: str | None = None,
    *,
    numbered: bool = True,
) -> list[AnswerSentence]:
    """Every sentence with its label, in order. A sentence that says that the passages hold no answer has none.

    A sentence with numbers of passages is looked up in these alone, any other in all passages, quoted passages first. A short
    answer behind its quote is looked up in the quote alone.
    """
    by_id = {passage.id: passage for passage in passages}
    cited = dict.fromkeys(by_id[citation.passage_id] for citation in citations)
    sources = [source for passage in dict.fromkeys([*cited, *passages]) for source in _sentences_of(passage)]
    evidence = Evidence(() if question is None else passages, question or "")
    labelled: list[AnswerSentence] = []
    for start, end, numbers, is_short in _statements(answer):
        left, right = _core(answer, start, end)
        if left == right:
            continue
        named = {passages[number - 1].id for number in numbers if 0 < number <= len(passages)} if numbered else set()
        usable = [source for source in sources if not named or source.passage.id in named]
        if is_short and labelled and labelled[-1].label == "quoted":
            usable = [source for source in usable if source.holds(labelled[-1])]
        if quoted := _quoted(answer, left, right, citations, by_id):
            labelled.append(AnswerSentence(start, end, "quoted", *quoted))
        elif found := _supported(answer[left:right], usable):
            labelled.append(AnswerSentence(start, end, "supported", found.passage.id, found.start, found.end))
        elif abstains(answer[left:right]):
            continue
        elif not is_short and (place := evidence.find(answer[left:right])):
            labelled.append(AnswerSentence(start, end, "related", place.passage.id, place.start, place.end))
        else:
            labelled.append(AnswerSentence(start, end, "unsupported"))
    return labelled


def unknown_quotations(answer: str, passages: Sequence[Passage]) -> Iterator[Span]:
    """The spans between quotation marks, and behind an open one, that hold a word and stand in no passage."""
    at = 0
    while opening := _OPENING.search(answer, at):
        start, closing = opening.end(), _CLOSING[opening.group()]
        ends = [index for index in range(start, len(answer)) if answer[index] in closing][:_MAX_INNER_MARKS]
        # Why the longest first: a quoted sentence may hold quotation marks itself
        known = next((end for end in reversed(ends) if _stands_in(answer[start:end], passages)), None)
        is_open = not ends and any(answer[start:].strip() in passage.text for passage in passages)
        end = known if known is not None else ends[0] if ends else len(answer)
        if known is None and not is_open and re.search(r"\w", answer[start:end]):
            yield start, end
        at = end + 1


def _stands_in(quotation: str, passages: Sequence[Passage]) -> bool:
    text = quotation.strip()
    return bool(text) and any(find_words(passage.text, text) is not None for passage in passages)


def _statements(answer: str) -> Iterator[tuple[int, int, list[int], bool]]:
    """Sentences without the passage numbers around them, these numbers, and whether it is the short answer behind a quote."""
    found: list[tuple[int, int, list[int], bool]] = []
    inside = [match.start() for pattern in (_SHORT_ANSWER, _LEAD_IN) for match in pattern.finditer(answer)]
    borders = [0, *sorted(inside), len(answer)]
    for start, end in [span for left, right in pairwise(borders) for span in sentences(answer, left, right)]:
        numbers: list[int] = []
        is_short = False
        if leading := _MARKERS.match(answer, start, end):
            before, start = _numbers(leading.group()), leading.end()
            if found:
                found[-1][2].extend(before)
            if is_short := answer[start:end].lstrip().startswith(_DASHES):
                numbers += before
        if re.search(r"\w", answer[start:end]):
            start += len(answer[start:end]) - len(answer[start:end].lstrip(" \t\r\n–—-"))
            found.append((start, end, numbers + _numbers(answer[start:end]), is_short))
    yield from found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text)]


def _core(answer: str, start: int, end: int) -> Span:
    """The span of a statement without bullets, frames, quotation marks, passage numbers and its full stop."""
    for pattern in (_BULLET, _FRAME):
        if match := pattern.match(answer, start, end):
            start = match.end()
    before = None
    while before != (start, end):
        before = start, end
        while start < end and answer[start] in _EDGE:
            start += 1
        while end > start and answer[end - 1] in _EDGE + ".!?,;:…。！？":
            end -= 1
        trailing = next((m for m in _MARKERS.finditer(answer, start, end) if m.end() == end), None)
        end = trailing.start() if trailing else end
    return start, end


def _quoted(
    answer: str, start: int, end: int, citations: Sequence[Citation], by_id: dict[str, Passage]
) -> tuple[str, int, int] | None:
    """Where the whole of answer[start:end] stands in a passage, character for character."""
    for citation in citations:
        if start >= end or citation.start >= end or citation.end <= start:
            continue
        shift = citation.passage_start - citation.start
        source = by_id[citation.passage_id].text
        if start + shift >= 0 and source[start + shift : end + shift] == answer[start:end]:
            return citation.passage_id, start + shift, end + shift
    return None


def _sentences_of(passage: Passage) -> Iterator[_SourceSentence]:
    for start, end in sentences(passage.text):
        yield _SourceSentence(passage, start, end)


def _supported(statement: str, sources: Sequence[_SourceSentence]) -> _SourceSentence | None:
    """The first sentence of a passage that holds the statement's words."""
    wanted = content_words(words_of(_MARKERS.sub(" ", statement)))
    return next((each for each in sources if wanted and restates(each.words, wanted)), None)
