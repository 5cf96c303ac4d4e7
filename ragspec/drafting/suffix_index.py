"""Texts as one array of tokens with their suffixes in order, searched for the end of an output.

Every drafter that repeats text uses it: the references of one request, a tenant's earlier answers, the passages of an index.
References are searched for places: a search compares the places of the last token alone, so its time grows with how often that
token occurs, not with the texts. The others are searched for counts: how often each token follows.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.core import SourceKind
from ragspec.drafting.acceptance import AcceptanceCells
from ragspec.drafting.references import Reference
from ragspec.numerics.compiled import address_of, array_at, compiled, inner

Ints = NDArray[np.int32]

SEPARATOR = -1
SORTED_TOKENS = 32
"""Suffixes that are searched for counts are in order by so many tokens."""
MOST_FOLLOWED = 8
"""Output tokens after which an input that the output left is followed no more."""
_NUM_RUNS = 8
FOLLOWS, ACCEPTED, SEEN, NUM_CELLS = range(10, 14)
"""Columns behind those that `searched_text` reads: whether the output may follow an input, and where the acceptance of each cell
lies."""
NUM_COLUMNS = NUM_CELLS + 1
_MOST_MATCHES = 24
NO_TOKENS: Ints = np.empty(0, np.int32)


@inner
def _bound(tokens: Any, order: Any, low: int, high: int, depth: int, least: int) -> int:
    """The first of the suffixes [low, high), whose tokens before `depth` are equal, with a token of at least `least` there.

    Both bounds are checked here and in `_followers`: `order` is a mapped file that another process may overwrite.
    """
    while low < high:
        middle = (low + high) // 2
        at = order[middle] + depth
        if 0 <= at < tokens.shape[0] and tokens[at] >= least:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def _count(visible: Any, low: int, high: int) -> int:
    return visible[high] - visible[low] if visible.shape[0] else high - low


@compiled(nogil=True)
def _find(tokens: Any, order: Any, pattern: Any, low: int, high: int, depth: int) -> Any:
    """[low, high): of these suffixes the ones with the pattern at `depth`. Shape: int32 [M]."""
    for n in range(pattern.shape[0]):
        low = _bound(tokens, order, low, high, depth + n, pattern[n])
        high = _bound(tokens, order, low, high, depth + n, pattern[n] + 1)
    return low, high


@compiled(nogil=True)
def _longest(tokens: Any, order: Any, visible: Any, text: Any) -> int:
    """The most last tokens of `text` that occur together at a visible place."""
    least, most = 0, text.shape[0]
    while least < most:
        length = (least + most + 1) // 2
        low, high = 0, order.shape[0]
        for depth in range(length):
            token = text[text.shape[0] - length + depth]
            low = _bound(tokens, order, low, high, depth, token)
            high = _bound(tokens, order, low, high, depth, token + 1)
        if _count(visible, low, high) > 0:
            least = length
        else:
            most = length - 1
    return least


@compiled(nogil=True)
def _followers(tokens: Any, order: Any, visible: Any, low: int, high: int, depth: int, most: int) -> Any:
    """(token, its suffixes [low, high), how many are visible) at `depth`: the `most` most frequent; ties to the lower token.

    Shape: int64 [<= most, 4].
    """
    best = np.empty((most, 4), np.int64)
    num = 0
    low = _bound(tokens, order, low, high, depth, 0)
    while low < high:
        at = order[low] + depth
        if not 0 <= at < tokens.shape[0]:
            break
        token = tokens[at]
        end = _bound(tokens, order, low, high, depth, token + 1)
        count = _count(visible, low, end)
        if count > 0 and (num < most or count > best[num - 1, 3]):
            num = min(num + 1, most)
            row = num - 1
            while row > 0 and count > best[row - 1, 3]:
                for column in range(4):
                    best[row, column] = best[row - 1, column]
                row -= 1
            best[row, 0], best[row, 1], best[row, 2], best[row, 3] = token, low, end, count
        low = max(end, low + 1)
    return best[:num]


@compiled(nogil=True)
def longest_matches(tokens: Any, order: Any, output_begin: int, end: int, max_length: int) -> Any:
    """(position after the match, its length) of at most `_MOST_MATCHES` earlier occurrences of the output's end, at most so long;
    the longest and latest first.

    Shapes: tokens int32 [T], the output at [output_begin, end); order int32 [output_begin]: the places before it in the order of
    their tokens -> int32 [<= most, 2].
    """
    most, suffix = _MOST_MATCHES, tokens[max(output_begin, end - max_length) : end]
    last = suffix.shape[0] - 1
    if last < 0:
        return np.empty((0, 2), np.int32)
    low = _bound(tokens, order, 0, order.shape[0], 0, suffix[last])
    known = order[low : _bound(tokens, order, low, order.shape[0], 0, suffix[last] + 1)]
    ends = np.empty((last + 1, most), np.int32)
    counts = np.zeros(last + 1, np.int64)
    at, left = end - 2, known.shape[0]
    while counts[last] < most:
        if at >= output_begin:  # Why no index: the output grows with every token, and is short
            place = at
            at -= 1
            if tokens[place] != suffix[last]:
                continue
        elif left > 0:
            left -= 1
            place = known[left]
        else:
            break
        length = 1
        while length <= last and length <= place and tokens[place - length] == suffix[last - length]:
            length += 1
        if counts[length - 1] < most:
            ends[length - 1, counts[length - 1]] = place + 1
            counts[length - 1] += 1
    found = np.empty((most, 2), np.int32)
    count = 0
    for length in range(last + 1, 0, -1):
        for n in range(min(counts[length - 1], most - count)):
            found[count, 0], found[count, 1] = ends[length - 1, n], length
            count += 1
    return found[:count]


class SortedSuffixes(NamedTuple):
    """Tokens with a separator behind each text, and where their suffixes begin, in order. Shapes: int32 [T] each."""

    tokens: Ints
    order: Ints

    @classmethod
    def build(cls, tokens: Ints, num_tokens: int = SORTED_TOKENS) -> Self:
        """Order by the first `num_tokens` tokens, a power of two; suffixes that are equal so far by their place."""
        keys, known = tokens.astype(np.int64), 1
        assert len(keys) < 2**31, "places are int32"
        order = np.argsort(keys, kind="stable")
        while known < num_tokens:
            ranks = np.empty(len(keys), np.int64)
            ranks[order] = np.cumsum(np.diff(keys[order], prepend=SEPARATOR - 1) != 0)
            keys = ranks * (len(keys) + 1)
            keys[:-known] += ranks[known:]
            order, known = np.argsort(keys, kind="stable"), 2 * known
        return cls(_read_only(tokens), _read_only(order.astype(np.int32)))

    def find(self, pattern: Ints, among: tuple[int, int] | None = None, depth: int = 0) -> tuple[int, int]:
        """[low, high) in `order`: the suffixes with the pattern at `depth`; of those `among`, whose earlier tokens are equal."""
        low, high = _find(self.tokens, self.order, pattern, *(among or (0, len(self.order))), depth)
        return low, high


def _read_only(array: Ints) -> Ints:
    """Why: searches are compiled once, for mapped files and for arrays."""
    view = array.view()
    view.setflags(write=False)
    return view


class VisibleSuffixes(NamedTuple):
    """Suffixes of which some may not be counted.

    `visible[i]`: how many of the first i are visible; empty: all are. Shape: int32 [T + 1].
    """

    suffixes: SortedSuffixes
    visible: Ints = NO_TOKENS

    def longest(self, text: Ints) -> int:
        """How many of the text's last tokens occur together."""
        length: int = _longest(*self.suffixes, self.visible, text)
        return length

    def num_visible(self, low: int, high: int) -> int:
        return int(self.visible[high] - self.visible[low]) if len(self.visible) else high - low

    def followers(self, low: int, high: int, depth: int, most: int) -> list[list[int]]:
        """As `_followers`."""
        found: list[list[int]] = _followers(*self.suffixes, self.visible, low, high, depth, most).tolist()
        return found


class GrowingSuffixes:
    """Sorted suffixes of texts that come one by one. Holds at most `max_tokens` tokens; the oldest texts leave first.

    `runs`, the oldest first, are sorted apart, and merged while they are of like size: adding a text costs little, and a search
    visits few runs.
    """

    def __init__(self, max_tokens: int) -> None:
        self.runs: list[VisibleSuffixes] = []
        self._max_tokens = max_tokens

    @property
    def num_tokens(self) -> int:
        return sum(len(run.suffixes.tokens) for run in self.runs)

    def append(self, token_ids: SequenceOf[int]) -> None:
        tokens: Ints = np.array([*token_ids, SEPARATOR], np.int32)
        while self.runs and self._merges(len(self.runs[-1].suffixes.tokens), len(tokens)):
            tokens = np.concatenate([self.runs.pop().suffixes.tokens, tokens])
        self.runs.append(VisibleSuffixes(SortedSuffixes.build(tokens)))
        while self.num_tokens > self._max_tokens:
            del self.runs[0]

    def _merges(self, earlier: int, later: int) -> bool:
        """Why not without limit: a whole run leaves at once."""
        return earlier <= 2 * later and earlier + later <= self._max_tokens / _NUM_RUNS


class ReferenceIndex:
    """The references of one request with separators between them, and the order of their tokens. Sequences share it.

    `facts` has for every token the kind of its reference, its source and character there (-1: none), the place where its
    reference's tail begins, and the place where its reference begins if that is a sentence, else -1. Shape: int32 [T, 5].
    """

    def __init__(self, references: list[Reference]) -> None:
        sizes = [len(r.token_ids) + 1 for r in references]
        self.begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.tokens = np.full(int(self.begin[-1]), SEPARATOR, np.int32)
        self.facts = np.full((len(self.tokens), 5), -1, np.int32)
        for reference, start in zip(references, self.begin.tolist(), strict=False):
            end, tail = start + len(reference.token_ids), start + reference.tail
            self.tokens[start:end] = reference.token_ids
            self.facts[start : end + 1, [0, 3, 4]] = reference.kind, tail, start if reference.is_sentence else -1
            if reference.offsets:
                self.facts[start:tail, 1] = reference.source
                self.facts[start:tail, 2] = reference.offsets[: reference.tail]
        self.follows_input = any(r.kind in (SourceKind.INPUT, SourceKind.PREDICTION) for r in references)
        self.starts = _starts(references, self.begin)
        self.quotes = np.array(_ranked_quotes(references, self.begin), np.int32)
        self.order = SortedSuffixes.build(self.tokens, 1).order
        self.distinct = frozenset(self.tokens.tolist())
        found = address_of(self.quotes), len(self.quotes), address_of(self.starts), len(self.starts)
        self.columns = address_of(self.order), address_of(self.facts), len(self.tokens), *found, self.follows_input


class SuffixIndex:
    """The references of one sequence, then the output, which grows. `acceptance`: of its tenant.

    `place` holds where the output begins and ends, and where it follows an input: the input's next position, -1 for none, and the
    output tokens since the output left the input. `text` has room for the whole output, which is written when the copy drafter is
    asked. Compiled code finds all arrays by `address`. Shapes: text int32 [room], place int64 [4].
    """

    def __init__(
        self,
        base: ReferenceIndex,
        salt: str,
        acceptance: AcceptanceCells,
        opens_quote: Callable[[int], bool],
        most_tokens: int = 0,
    ) -> None:
        """`opens_quote`: whether a token ends with a mark that opens a quotation. `most_tokens`: of the output."""
        self.base, self.salt, self.acceptance, self._opens_quote = base, salt, acceptance, opens_quote
        self.remembered = True
        self.text = np.empty(len(base.tokens) + most_tokens, np.int32)
        self.text[: len(base.tokens)] = base.tokens
        self.place = np.array([len(base.tokens), len(base.tokens), -1, 0])
        own = address_of(self.text), len(self.text), address_of(self.place)
        self._columns = np.array([*own, *base.columns, *acceptance.address, len(acceptance.seen)])
        self.address = address_of(self._columns)
        self._written, self._num_seen, self._has_match = set[int](), 0, False

    def unread(self, tokens: SequenceOf[int], num_prompt: int) -> SequenceOf[int]:
        """The output's tokens that are not in `text` yet; nothing where `text` has no room. `tokens`: prompt and output."""
        found = tokens[num_prompt - len(self.base.tokens) + self.place.item(1) :] if len(self.text) else ()
        assert self.place.item(1) + len(found) <= len(self.text)
        return found

    def may_continue(self, tokens: SequenceOf[int], num_prompt: int) -> bool:
        """Whether a search could find a point to copy from. `tokens`: prompt and output."""
        num_output, last = len(tokens) - num_prompt, tokens[-1]
        if not num_output:
            return len(self.base.starts) + len(self.base.quotes) > 0
        if num_output > self._num_seen:
            self._written.update(tokens[num_prompt + self._num_seen : -1])
            self._has_match = last in self._written or last in self.base.distinct
            self._written.add(last)
            self._num_seen = num_output
        if self._has_match or (len(self.base.quotes) and self._opens_quote(last)):
            return True
        return self.base.follows_input and (num_output <= MOST_FOLLOWED or self.place.item(2) >= 0)


class SearchedText(NamedTuple):
    """A sequence's references and output as compiled code reads them; see `SuffixIndex` and `ReferenceIndex`.

    `opens`: whether a token that was written opens a quotation. Shape: bool [V].
    """

    text: Any
    place: Any
    order: Any
    facts: Any
    quotes: Any
    starts: Any
    opens: Any


@inner
def searched_text(columns: Any, opens: Any) -> SearchedText:
    """The arrays of `SuffixIndex.address`. Shape: int64 [columns]."""
    text, room, place, order, facts, size, quotes, num_quotes, starts, num_starts = columns[:10]
    return SearchedText(
        array_at(text, (room,), np.int32),
        array_at(place, (4,), np.int64),
        array_at(order, (size,), np.int32),
        array_at(facts, (size, 5), np.int32),
        array_at(quotes, (num_quotes,), np.int32),
        array_at(starts, (num_starts, 2), np.int32),
        opens,
    )


def _starts(references: list[Reference], begin: NDArray[np.int64]) -> Ints:
    """Where an output may begin that repeats a text from its first token: place and kind, drafts first. Shape: int32 [S, 2]."""
    kinds = (SourceKind.DRAFT, SourceKind.PREDICTION, SourceKind.INPUT)
    places = list(zip(begin.tolist(), references, strict=False))
    found = [(at, kind) for kind in kinds for at, each in places if each.kind is kind]
    return np.array(found, np.int32).reshape(-1, 2)


def _ranked_quotes(references: list[Reference], begin: NDArray[np.int64]) -> list[int]:
    """Starts of the passages' sentences and their parts; sentences that share the rarest tokens with the question come first."""
    whole = [r for r in references if r.is_sentence and not r.is_part]
    counts = Counter(token for r in whole for token in set(r.token_ids))
    question = {t for r in references if r.kind in (SourceKind.HISTORY, SourceKind.INPUT) for t in r.token_ids}
    scores, score = list[tuple[float, int]](), 0.0
    for at, reference in zip(begin, references, strict=False):
        if reference.is_sentence:
            if not reference.is_part:
                score = -sum(1.0 / counts[t] for t in question.intersection(reference.token_ids))
            scores.append((score, int(at)))
    return [at for _, at in sorted(scores)]
