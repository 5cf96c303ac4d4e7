"""Citations: the spans of an answer that stand verbatim in a passage, and a grammar under which quotes can be nothing else.

A citation is a span of the answer and an equal span of a passage, compared character by character without normalisation.
Under the grammar, the quote at the beginning of an answer is what `ragspec.rag.quotable` allows of a passage, followed by that
passage's number, and by words of the quote or nothing. An answer that begins in another way is free. Drafts change no token: the
grammar holds with speculation and without.

    >>> find_citations('It rained: "The storm came in at dawn." [1]', passages)
    >>> Request(..., grammar=answer_grammar(params, speculation, prompt.passages))
"""

import functools
import heapq
import json
import re
import unicodedata
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from ragspec.core import Citation, Passage, SamplingParams
from ragspec.rag.quotable import quotable_runs
from ragspec.rag.wording import DASH
from ragspec.retrieval.chunking import Span
from ragspec.speculation import AcceptanceRule, Speculation

_JSON_KEY = re.compile(r'"\s*:')
_END_OF_MARKS = 0x20000
_JOINERS = "\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"  # and variation selectors, skin tones, tags
_WIDE = re.compile("[\U00010000-\U0010ffff]")


@functools.cache
def combining_marks() -> str:
    """All combining marks, for use inside the brackets of a regular expression: `re` has no class for them."""
    codes = [c for c in range(_END_OF_MARKS) if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me")]
    firsts = [c for c, before in zip(codes, [-1, *codes], strict=False) if c != before + 1]
    lasts = [c for c, after in zip(codes, [*codes[1:], -1], strict=True) if c != after - 1]
    return _JOINERS + "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(firsts, lasts, strict=True))


@functools.cache
def grapheme_pattern() -> str:
    """A regular expression for one grapheme cluster: a letter with its marks, a flag, an emoji of several parts."""
    mark, flag = f"[{combining_marks()}]", "[\U0001f1e6-\U0001f1ff]"
    return rf"(?:{flag}{{2}}|.{mark}*+(?:(?<=\u200d)\S{mark}*+)*+)"


class Utf16Offsets:
    """Offsets in one text."""

    def __init__(self, text: str) -> None:
        self._wide = [match.start() for match in _WIDE.finditer(text)]

    def units(self, index: int) -> int:
        """The number of UTF-16 code units before character `index`."""
        return index + bisect_left(self._wide, index)


IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # scripts without spaces: each character counts as a word
_QUOTED = re.compile(r"“([^“”]+)”|«([^«»]+)»|„([^„“]+)“")
_MARKER = re.compile(r"[\"”“»’.,;:!?)\s]{0,4}\[(\d{1,3})\]")


def find_citations(
    answer: str, passages: Sequence[Passage], *, min_words: int = 4, min_chars: int = 12, numbered: bool = True
) -> list[Citation]:
    """Verbatim spans without overlaps, chosen longest first and returned in the order of the answer.

    A whole quotation needs one word; any other span needs `min_words` whole words and `min_chars` characters. If several passages
    contain the span, the number after it decides (`[2]` means `passages[1]`) if passages are `numbered`, else the first one.
    Time is proportional to the lengths of answer and passages. Units: characters.
    """
    words = _Words(answer)
    queue = [(start - end, start, end) for start, end in _quotations(answer)]
    for run in _shared_runs(answer, passages):
        _push(queue, words.trimmed(*run, min_words, min_chars))
    heapq.heapify(queue)
    taken: list[Span] = []
    citations: list[Citation] = []
    while queue:
        _, start, end = heapq.heappop(queue)
        free = _free_parts(taken, start, end)
        if free != [(start, end)]:
            for part in free:
                _push(queue, words.trimmed(*part, min_words, min_chars))
        elif (citation := _cite(answer, start, end, passages, numbered)) is not None:
            insort(taken, (start, end))
            citations.append(citation)
    return sorted(citations, key=lambda citation: citation.start)


@functools.cache
def _piece() -> re.Pattern[str]:
    """Matches a word, white space, or any other grapheme cluster."""
    mark = f"[{combining_marks()}]"
    word = rf"[{IDEOGRAPHS}]{mark}*+|(?:(?![{IDEOGRAPHS}])\w{mark}*+)++"
    return re.compile(rf"(?P<word>{word})|\s++|{grapheme_pattern()}", re.DOTALL)


@functools.cache
def _joined() -> str:
    """A regular expression for characters that continue a word."""
    return rf"(?:(?![{IDEOGRAPHS}])[\w{combining_marks()}])"


class _Words:
    """The start and end offsets of the answer's words."""

    def __init__(self, text: str) -> None:
        spans = [match.span() for match in _piece().finditer(text) if match.lastgroup]
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def trimmed(self, start: int, end: int, min_words: int, min_chars: int) -> Span | None:
        """[start, end) trimmed to whole words; None if it is then too short."""
        first, after = bisect_left(self._starts, start), bisect_right(self._ends, end)
        if after - first < max(min_words, 1) or self._ends[after - 1] - self._starts[first] < min_chars:
            return None
        return self._starts[first], self._ends[after - 1]


def _push(queue: list[tuple[int, int, int]], span: Span | None) -> None:
    if span is not None:
        heapq.heappush(queue, (span[0] - span[1], *span))


def _quotations(answer: str) -> Iterator[Span]:
    """The spans between quotation marks that hold a word and have no space at their ends."""
    quotes = [match.start() for match in re.finditer('"', answer)]
    spans = [(left + 1, right) for left, right in pairwise(quotes)]
    spans += [match.span(match.lastindex or 0) for match in _QUOTED.finditer(answer)]
    is_json = answer.lstrip().startswith(("{", "["))
    for start, end in spans:
        quotation = answer[start:end]
        if is_json and _JSON_KEY.match(answer, end):
            continue
        if quotation and quotation == quotation.strip() and re.search(r"\w", quotation):
            yield start, end


def _shared_runs(answer: str, passages: Sequence[Passage]) -> Iterator[Span]:
    """The maximal spans of the answer, in whole pieces, that some passage contains."""
    ids: dict[str, int] = {}
    pieces = list(_piece().finditer(answer))
    automaton = _SuffixAutomaton(ids.setdefault(piece.group(), len(ids)) for piece in pieces)
    for passage in passages:
        automaton.look_up(ids.get(match.group(), -1) for match in _piece().finditer(passage.text))
    lengths = automaton.found_lengths()
    for last, length in enumerate(lengths):
        if length and (last + 1 == len(lengths) or lengths[last + 1] <= length):
            yield pieces[last - length + 1].start(), pieces[last].end()


class _SuffixAutomaton:
    """An automaton of all substrings of a sequence, in linear space (Blumer et al. 1985), and which of them others hold.

    Why of the answer and not of the passages: a step through an automaton takes a tenth of the time that adding to one takes.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._edges: list[dict[int, int]] = [{}]
        self._links = [-1]
        self._lengths = [0]
        self._prefixes: list[int] = []  # the state of each prefix
        for token in tokens:
            self._append(token)
        self._found = [0] * len(self._edges)  # by state: the longest of its substrings that was looked up

    def look_up(self, tokens: Iterable[int]) -> None:
        """Note which substrings another sequence holds."""
        edges, links, lengths, found = self._edges, self._links, self._lengths, self._found
        state, length = 0, 0
        for token in tokens:
            while state and token not in edges[state]:
                state = links[state]
                length = lengths[state]
            if token in edges[state]:
                state, length = edges[state][token], length + 1
                found[state] = max(found[state], length)

    def found_lengths(self) -> list[int]:
        """For each position, the length of the longest substring that ends there and stands in a sequence that was looked up."""
        found, by_length = list(self._found), sorted(range(1, len(self._links)), key=self._lengths.__getitem__)
        for state in reversed(by_length):
            if found[state]:  # then all shorter suffixes were found, too
                found[self._links[state]] = self._lengths[self._links[state]]
        for state in by_length:
            found[state] = found[state] or found[self._links[state]]
        return [found[state] for state in self._prefixes]

    def _append(self, token: int) -> None:
        at = self._prefixes[-1] if self._prefixes else 0
        state = self._add({}, self._lengths[at] + 1)
        self._prefixes.append(state)
        while at >= 0 and token not in self._edges[at]:
            self._edges[at][token] = state
            at = self._links[at]
        if at < 0:
            self._links[state] = 0
            return
        following = self._edges[at][token]
        if self._lengths[following] != self._lengths[at] + 1:
            following = self._split(at, token, following)
        self._links[state] = following

    def _add(self, edges: dict[int, int], length: int) -> int:
        self._edges.append(edges)
        self._links.append(0)
        self._lengths.append(length)
        return len(self._edges) - 1

    def _split(self, at: int, token: int, following: int) -> int:
        clone = self._add(dict(self._edges[following]), self._lengths[at] + 1)
        self._links[clone] = self._links[following]
        self._links[following] = clone
        while at >= 0 and self._edges[at].get(token) == following:
            self._edges[at][token] = clone
            at = self._links[at]
        return clone


def _free_parts(taken: list[Span], start: int, end: int) -> list[Span]:
    """The parts of [start, end) outside the taken spans, which are sorted and disjoint."""
    parts: list[Span] = []
    number = max(bisect_left(taken, (start, start)) - 1, 0)
    while number < len(taken) and taken[number][0] < end:
        if taken[number][1] > start:
            parts.append((start, taken[number][0]))
            start = taken[number][1]
        number += 1
    parts.append((start, end))
    return [(left, right) for left, right in parts if left < right]


def _cite(answer: str, start: int, end: int, passages: Sequence[Passage], numbered: bool) -> Citation | None:
    text = answer[start:end]
    marker = _MARKER.match(answer, end) if numbered else None
    marked = int(marker[1]) - 1 if marker else -1
    ranked = range(len(passages))
    for number in [marked, *ranked] if marked in ranked else ranked:
        passage = passages[number]
        if (at := find_words(passage.text, text)) is not None:
            return Citation(
                start=start,
                end=end,
                passage_id=passage.id,
                passage_start=at,
                passage_end=at + len(text),
                document_id=passage.document_id,
                document_start=passage.start + at,
                document_end=passage.start + at + len(text),
                source=passage.source,
            )
    return None


def find_words(text: str, span: str) -> int | None:
    """The offset in `text` where `span` stands as whole words."""
    if span not in text:
        return None
    is_joined, is_mark = (re.compile(each).match for each in (_joined(), f"[{combining_marks()}]"))
    goes_on_before, goes_on_after = is_joined(span), is_joined(span[-1])
    at = text.find(span)
    while at >= 0:
        before, after = text[max(at - 1, 0) : at], text[at + len(span) : at + len(span) + 1]
        if not (goes_on_before and is_joined(before)) and not (is_joined if goes_on_after else is_mark)(after):
            return at
        at = text.find(span, at + 1)
    return None


_FREE = r"""
FREE: /(\s*[^"\s](.|\n)*)?/
REST: /(.|\n)*/
"""
_MAX_ANSWERED_SPANS, _MAX_HELD_SPANS = 3, 200
"""Most spans of a quote with a short answer. Behind more spans of all passages the grammar has no short answers: it would compile
for longer than 0.1 s."""
_NO_SPACE_AT_ENDS = r"NO_SPACE_AT_ENDS: /\S((.|\n)*\S)?/"


def answer_grammar(
    params: SamplingParams,
    speculation: Speculation,
    passages: Sequence[Passage],
    *,
    left_out: Collection[str] = (),
    quotes: str = "blocks",
    short_answers: str = "quoted",
) -> str:
    """The grammar of an answer from passages; empty where quotes are free. `left_out`: texts that are not quoted. `quotes`,
    `short_answers`: as in `TextRules`; of "words", nothing is left out and short answers are free.

    They are free if they are asked to be, beside a JSON schema or `ignore_eos`, and under the published acceptance rules.
    """
    is_free = params.json_schema or params.ignore_eos or speculation.rule is not AcceptanceRule.KEYED
    if is_free or not params.verbatim_quotes or not passages:
        return ""
    if quotes == "words":
        return _word_grammar(passages)
    return quote_grammar(passages, left_out, by_blocks=quotes == "blocks", holds_short=short_answers == "quoted")


def _word_grammar(passages: Sequence[Passage]) -> str:
    """The grammar of earlier versions: a quote is any run of whole words of a passage."""
    numbered = list(enumerate(passages, start=1))
    rules = [f'/\\s*/ "\\"" PASSAGE_{number} "\\" [{number}]" REST' for number, _ in numbered]
    chunks = [(number, [match[0] for match in _piece().finditer(passage.text)]) for number, passage in numbered]
    words = [f'PASSAGE_{number}: %regex {{ "substring_chunks": {json.dumps(own)} }}' for number, own in chunks]
    return f"start: {' | '.join(['FREE', *rules])}{_FREE}" + "\n".join(words)


def quote_grammar(
    passages: Sequence[Passage], left_out: Collection[str] = (), *, by_blocks: bool = True, holds_short: bool = True
) -> str:
    """A grammar in llguidance's dialect of Lark. `passages`: numbered from 1, as in the prompt. `holds_short`: a quote of up to
    three spans is followed by words of one of them or by nothing, a longer quote, or one behind `_MAX_HELD_SPANS`, by nothing;
    else any text may follow."""
    rules, terminals, num_spans = ["FREE"], [_NO_SPACE_AT_ENDS], 0
    for number, passage in enumerate(passages, start=1):
        runs, name = quotable_runs(passage, left_out, by_blocks=by_blocks), f"PASSAGE_{number}"
        num_spans += sum(map(len, runs))
        if runs:
            rules.append(_quoting(name, number, "" if holds_short else "REST"))
            terminals += _parts(name, [_chunks(passage.text, run) for run in runs])
        for n, run in enumerate(runs if holds_short and num_spans <= _MAX_HELD_SPANS else ()):
            words = [f"WORDS_{number}_{n}_{m}" for m in range(len(run))]
            for each, span in zip(words, run, strict=True):
                terminals += _parts(each, [_value_or_piece().findall(passage.text, *span)], '"."?')
            quotes = ((at, to) for at in range(len(run)) for to in range(at, min(at + _MAX_ANSWERED_SPANS, len(run))))
            for first, last in quotes:
                quote, text = f"QUOTE_{number}_{n}_{first}_{last}", passage.text[run[first][0] : run[last][1]]
                terminals.append(f"{quote}: {json.dumps(text)}")
                rules.append(_quoting(quote, number, f'" {DASH} " ({" | ".join(words[first : last + 1])})'))
    return f"start: {' | '.join(rules)}{_FREE}" + "\n".join(terminals)


def _quoting(quote: str, number: int, rest: str) -> str:
    """The rule of an answer that begins with a quote."""
    return f'/\\s*/ "\\"" {quote} "\\" [{number}]" {rest}'


def _parts(name: str, runs: list[list[str]], end: str = "") -> list[str]:
    """The terminal `name`: neighbouring texts of one run, without white space at their ends. Why `end` is in the terminal: the
    lexer takes the longest, and behind "8" the end of "8.5" would be the only way on."""
    each = [f'{name}_OF_{n}: %regex {{ "substring_chunks": {json.dumps(run)} }}' for n, run in enumerate(runs)]
    return [f"{name}: (({' | '.join(f'{name}_OF_{n}' for n in range(len(runs)))}) & NO_SPACE_AT_ENDS) {end}", *each]


def _chunks(text: str, run: Sequence[Span]) -> list[str]:
    """Each span and each gap between two."""
    borders = [at for span in run for at in span]
    return [text[start:end] for start, end in pairwise(borders) if start < end]


@functools.cache
def _value_or_piece() -> re.Pattern[str]:
    """Matches a number or version (-5, 3.5, 1,000, v2.10.3, 1e-5), or what `_piece` matches."""
    number = r"(?:(?<![\w.])[-−])?[A-Za-z]*\d+(?:[.:]\d\w*|,\d{3}(?!\d))*(?:[eE][-−+]\d+)?(?!\w)"
    return re.compile(f"{number}|{_piece().pattern}".replace("(?P<word>", "(?:"), re.DOTALL)
