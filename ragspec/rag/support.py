"""Labels every sentence of an answer by what a source says of it, and finds invented quotations.

Owns the rule. A sentence is `quoted` if it stands in a passage, character for character. It is `supported` if all its words and
numbers stand in one sentence of a passage, in their order, and nothing between them was left out that could change their
meaning: negations, numbers, names, conjunctions (`restates`, which knows no grammar, and refuses where it cannot tell). It is
`related` to the words of a passage that `Evidence` finds for it. Any other sentence is `unsupported`, also one that is true.
Never calls a sentence a quote that is not string-identical to its source.

Evidence is a run of at most `_MAX_UNITS` neighbours that `ragspec.rag.quotable` lets an answer quote, chosen by overlap. A word
counts by how rare it is in the passages; words of the question count less. Evidence is no proof: whether it says the same as the
sentence is for the reader to judge.

    >>> [each.label for each in label_sentences("The mill opens at nine [1]. It never closes.", passages, citations)]
    ['supported', 'unsupported']
    >>> restates(words_of("The mill, which is old, opens at nine."), content_words(words_of("The mill opens at nine")))
    True
    >>> Evidence(passages, "When does the mill open?").find("At nine o'clock.")
    Place(passage=..., start=0, end=34)
"""

import math
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ragspec.core import Citation, Passage
from ragspec.rag.answer import AnswerSentence
from ragspec.rag.citations import IDEOGRAPHS, find_citations, find_words
from ragspec.rag.quotable import quotable_runs
from ragspec.rag.wording import abstains
from ragspec.retrieval.chunking import Span, sentences
from ragspec.retrieval.search.analysis import COMMON_WORDS

_TOKEN = re.compile(
    r"[A-Za-z_][A-Za-z0-9_.]*\([!-'*-~\s]+\)"  # the call of a function: its arguments are no remark in brackets
    r"|(?:(?<![\w.)])[-−+])?[$€£]?\d+(?:[.,:/]\d+)*(?:st|nd|rd|th\b)?%?"
    rf"|[{IDEOGRAPHS}]"
    rf"|(?:(?![{IDEOGRAPHS}])\w)+(?:[.'’_/-]+(?:(?![{IDEOGRAPHS}])\w)+)*[+#]*"
    r"|[<>=≤≥≠!]+|[%;()]|,"
)
_LISTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_FUNCTION, _BOUNDARIES, _CONDITIONS, _CLAUSE_ENDS = (
    frozenset(_LISTS[name].split()) for name in ("function", "boundaries", "conditions", "clause_ends")
)
_MAX_LEFT_OUT = 2


class Word(NamedTuple):
    """A word in the form that is compared. `is_fact`: a number, or a name in the middle of its sentence."""

    text: str
    is_fact: bool


def words_of(text: str) -> list[Word]:
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    text = re.sub(r"(?i)\b(ca|wo)n't\b", lambda match: {"ca": "can", "wo": "will"}[match[1].lower()] + " not", text)
    text = re.sub(r"\ba (few|little)\b", r"a-\1", text, flags=re.IGNORECASE)  # Why: few is the opposite of a few
    text = re.sub(r"\bcannot\b", "can not", text.replace("n't", " not"), flags=re.IGNORECASE)
    words = []
    for number, token in enumerate(_TOKEN.findall(text)):
        token = token.removesuffix("'s").removesuffix("'")
        is_name = number > 0 and token[:1].isupper() and token != "I"
        is_number = any(character.isdigit() for character in token)
        words.append(Word(_form(token), is_name or is_number))
    return words


def _form(token: str) -> str:
    """Lower case, without the commas of numbers and the s of plurals and verbs."""
    lower = token.casefold()
    if lower[:1].isdigit():
        return lower.replace(",", "")
    is_plain = len(lower) > 3 and lower.isalpha() and not lower.endswith(("ss", "us", "is"))
    return lower.removesuffix("s") if is_plain else lower


_NEGATIONS = frozenset(words_of(word)[-1].text for word in _LISTS["negations"].split())
"""As they are compared: casefolding and tokens change some of them."""


def is_negation(text: str) -> bool:
    """Why beginnings: Korean verbs carry their negation."""
    return text in _NEGATIONS or text.startswith(("않", "못"))


def content_words(words: Sequence[Word]) -> list[str]:
    """The words that a source must hold."""
    return [word.text for word in _said(words)]


def restates(source: Sequence[Word], wanted: Sequence[str], *, is_short: bool = False) -> bool:
    """Whether the wanted words stand in the source, in order, and what is left out between them changes nothing. `is_short`: they
    stand behind the source itself, so that a negation behind them in their clause is read with them.
    """
    texts = [word.text for word in source]
    if not set(wanted) <= set(texts):
        return False
    for first in [index for index, text in enumerate(texts) if text == next(iter(wanted), None)]:
        try:
            places = _places(texts, wanted, first)
        except ValueError:
            return False  # a later first place leaves fewer words behind it
        # Why twice: the first places of the words, and the last ones, may leave different words out
        if _is_whole(source, places, is_short) or _is_whole(source, _last_places(texts, places), is_short):
            return True
    return False


def _places(texts: Sequence[str], wanted: Sequence[str], at: int) -> list[int]:
    """The earliest places of the wanted words, in order. Raises: ValueError if a word is missing."""
    places = [at]
    for word in wanted[1:]:
        places.append(at := texts.index(word, at + 1))
    return places


def _last_places(texts: Sequence[str], places: Sequence[int]) -> list[int]:
    """The same words as late as possible, before the same last word."""
    latest = [places[-1]]
    for place in reversed(places[:-1]):
        latest.append(next(i for i in range(latest[-1] - 1, -1, -1) if texts[i] == texts[place]))
    return latest[::-1]


def _is_whole(source: Sequence[Word], places: Sequence[int], is_short: bool) -> bool:
    """Whether the words at these places may stand without the others of their clause."""
    texts, taken = [word.text for word in source], set(places)
    left, right = places[0], places[-1] + 1
    while left > 0 and texts[left - 1] not in _CLAUSE_ENDS:
        left -= 1
    while right < len(texts) and texts[right] not in _CLAUSE_ENDS:
        right += 1
    if any(is_negation(texts[i]) for i in range(left, places[-1] if is_short else right) if i not in taken):
        return False
    if any(texts[i] in _CONDITIONS for i in places) and _said(source[places[-1] + 1 : right]):
        return False
    return all(_may_be_left_out(source[one + 1 : other]) for one, other in pairwise(places))


def _may_be_left_out(gap: Sequence[Word]) -> bool:
    """A remark in brackets or between commas, or at most two words that join nothing and name nothing."""
    texts = [word.text for word in gap]
    if len(gap) > 1 and (texts[0], texts[-1]) in ((",", ","), ("(", ")")):
        return "," not in texts[1:-1] and "(" not in texts[1:-1]
    said = _said(gap)
    return len(said) <= _MAX_LEFT_OUT and not any(word.is_fact or word.text in _BOUNDARIES for word in said)


def _said(words: Sequence[Word]) -> list[Word]:
    return [word for word in words if word.text not in _FUNCTION]


_MAX_UNITS = 3
_QUESTION_WEIGHT = 0.4
"""Of a word of the question beside one of the answer."""
_UNIT_COST = 0.5
"""What another sentence must add to the overlap, in the weight of a word that stands in one sentence only."""
_LEAST_COVERED = 0.6
"""The share of the statement's words that the question does not hold, by weight, that evidence holds."""
_LEAST_SAID_BACK = 0.8
"""The same of a statement that only says the question's words."""
_LEAST_BESIDE_NAMES = 0.3
"""The same of a statement with a number, an option or a path, all of which evidence holds."""
_STEM_CHARS = 6
_NAME = re.compile(r"[\d/_]|^-")
_COMMON = frozenset(word[:_STEM_CHARS] for word in [*COMMON_WORDS["english"].split(), "yes"])
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Place:
    """`passage.text[start:end]`."""

    passage: Passage
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.passage.text[self.start : self.end]

    @property
    def span(self) -> tuple[str, int, int]:
        """As an `AnswerSentence` has it."""
        return self.passage.id, self.start, self.end

    @cached_property
    def words(self) -> list[Word]:
        return words_of(self.text)

    def holds(self, quoted: AnswerSentence) -> bool:
        """Whether it has words of the quote."""
        is_same = quoted.passage_id == self.passage.id
        return is_same and quoted.passage_start < self.end and self.start < quoted.passage_end


class _Window(NamedTuple):
    place: Place
    stems: frozenset[str]
    num_units: int


class Evidence:
    """The sentences of some passages, as evidence for answers to one question."""

    def __init__(self, passages: Sequence[Passage], question: str = "", *, by_blocks: bool = False) -> None:
        """`by_blocks`: as in `quotable_runs`. Why not by default: a begun job may ask for support, and its answers stay."""
        runs = [(passage, run) for passage in passages for run in quotable_runs(passage, by_blocks=by_blocks)]
        units = [(passage, [(span, _stems(passage.text[slice(*span)])) for span in run]) for passage, run in runs]
        holding = Counter(stem for _, run in units for _, stems in run for stem in stems)
        self._num_units = sum(len(run) for _, run in units)
        self._holding, self._weights = holding, dict[str, float]()
        self._question = _stems(question)
        self._windows = [window for passage, run in units for window in _windows(passage, run)]

    def find(self, statement: str) -> Place | None:
        """The window of greatest overlap that lacks no number, no option and no negation of the statement, and not too many of
        its words; None if there is none."""
        stems = _stems(statement)
        if not stems or not self._windows:
            return None
        cost = _UNIT_COST * self._weight("")
        asked = self._question - stems
        covering = (each for each in self._windows if self._covers(each, statement, stems))
        overlap = {each.place: self._overlap(each.stems, stems, asked) - cost * each.num_units for each in covering}
        return max(overlap, key=overlap.__getitem__, default=None)

    def lead(self, quote: str) -> float:
        """By how much of the question's words, by weight, a quote holds more than any other span that may be quoted; -1 to 1."""
        others = (each for each in self._windows if each.num_units == 1)
        texts = ((each.place.text, each.stems) for each in others)
        shares = (self._share(stems) for text, stems in texts if text not in quote and quote not in text)
        best = max(shares, default=0.0)
        return self._share(_stems(quote)) - best

    def _share(self, stems: frozenset[str]) -> float:
        return self._total(stems & self._question) / (self._total(self._question) or 1.0)

    def _overlap(self, held: frozenset[str], stems: frozenset[str], asked: frozenset[str]) -> float:
        return self._total(held & stems) + _QUESTION_WEIGHT * self._total(held & asked)

    def _covers(self, window: _Window, statement: str, stems: frozenset[str]) -> bool:
        # Why not the question's words: they stand in most windows, and the answer is in the others
        told = (stems - self._question) or stems
        is_said_back = stems <= self._question
        names = {stem for stem in told if _NAME.search(stem)}
        if not names <= window.stems:
            return False
        if _is_negated(statement) != _is_negated(window.place.text):
            return False
        least = _LEAST_SAID_BACK if is_said_back else _LEAST_BESIDE_NAMES if names else _LEAST_COVERED
        return self._total(told & window.stems) >= least * self._total(told)

    def _total(self, stems: frozenset[str]) -> float:
        """Exact: the order of a set differs by process."""
        return math.fsum(map(self._weight, stems))

    def _weight(self, stem: str) -> float:
        if (weight := self._weights.get(stem)) is None:
            weight = self._weights[stem] = math.log(1 + self._num_units / max(1, self._holding[stem]))
        return weight


def _windows(passage: Passage, units: Sequence[tuple[Span, frozenset[str]]]) -> Iterator[_Window]:
    for first, ((start, _), _) in enumerate(units):
        for after in range(first + 1, min(first + _MAX_UNITS, len(units)) + 1):
            taken = units[first:after]
            held = frozenset().union(*(stems for _, stems in taken))
            yield _Window(Place(passage, start, max(end for (_, end), _ in taken)), held, len(taken))


def _stems(text: str) -> frozenset[str]:
    """The words that carry meaning, cut to their beginnings: "encrypts" and "encrypted" are one. And the options of commands."""
    words = [word[:_STEM_CHARS] if word.isalpha() else word for word in content_words(words_of(text))]
    return frozenset([*words, *_OPTION.findall(text)])


def _is_negated(text: str) -> bool:
    return any(is_negation(word.text) for word in words_of(text))


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
    r"(?i)(?:according to (?:the |your )?(?:passage|source|document|text)s?(?: \[?\d+\]?)?,"
    r"|(?:the |your )?(?:passage|source|document|text)s?(?: \[?\d+\]?)? (?:says?|states?|reads?)(?: that\b|:|,)?"
    r"|the (?:short |correct )?answer (?:is|:)(?: that\b|:)?)\s*"
)
_OPENING = re.compile(r"(?<!\w)\"|[“„«「『]")  # Why not behind a word: 5" wide
_CLOSING = {'"': '"', "“": "”", "„": "“”", "«": "»", "「": "」", "『": "』"}
_MAX_INNER_MARKS = 16


class Support(NamedTuple):
    """What passages say of a text beside them, in fields as an `Answer` has them. `unknown_quotations`: spans of the text inside
    quotation marks that stand in no passage."""

    passages: tuple[Passage, ...] = ()
    citations: tuple[Citation, ...] = ()
    sentences: tuple[AnswerSentence, ...] = ()
    unknown_quotations: tuple[Span, ...] = ()

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
        return Support()
    citations = find_citations(answer, passages, numbered=numbered)
    labelled = label_sentences(answer, passages, citations, question, numbered=numbered)
    unknown = unknown_quotations(answer, passages)
    return Support(tuple(passages), tuple(citations), tuple(labelled), tuple(unknown))


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
    ordered = dict.fromkeys([*cited, *passages])
    sources = [Place(each, *span) for each in ordered for span in sentences(each.text)]
    evidence = Evidence(() if question is None else passages, question or "")
    labelled: list[AnswerSentence] = []
    for start, end, numbers, is_short in _statements(answer):
        left, right = _core(answer, start, end)
        if left == right:
            continue
        named = {passages[number - 1].id for number in numbers if 0 < number <= len(passages)} if numbered else set()
        usable = [source for source in sources if not named or source.passage.id in named]
        is_behind_quote = is_short and bool(labelled) and labelled[-1].label == "quoted"
        if is_behind_quote:
            usable = [source for source in usable if source.holds(labelled[-1])]
        if quoted := _quoted(answer, left, right, citations, by_id):
            labelled.append(AnswerSentence(start, end, "quoted", *quoted))
        elif found := _supported(answer[left:right], usable, is_behind_quote):
            labelled.append(AnswerSentence(start, end, "supported", *found.span))
        elif abstains(answer[left:right]):
            continue
        elif not is_short and (place := evidence.find(answer[left:right])):
            labelled.append(AnswerSentence(start, end, "related", *place.span))
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


def _supported(statement: str, sources: Sequence[Place], is_short: bool) -> Place | None:
    """The first sentence of a passage that holds the statement's words."""
    wanted = content_words(words_of(_MARKERS.sub(" ", statement)))
    return next((each for each in sources if wanted and restates(each.words, wanted, is_short=is_short)), None)
