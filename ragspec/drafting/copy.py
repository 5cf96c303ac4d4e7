"""The copy drafter: the answer is likely to repeat text that the request already holds.

References are the retrieved passages, the user's input, predicted text, the conversation and the output itself. Seven rules
find a point to copy from:

* match:    the longest run of tokens that ends the output so far and occurs in a reference; several points give branches
* start:    the output begins: inputs and predictions from their first token, a quotation mark where there are passages
* quote:    a quotation mark opens: sentences of the passages from their first token, ranked by the rare tokens that they share
            with the question
* quoted:   the output since the opening mark is the beginning of a sentence of the passages
* tail:     the usual end of a copied sentence or input: the closing mark with the passage's number, the end token
* draft:    tokens given with the request as a likely continuation
* realign:  after an edit, copying goes on beside the point where it stopped (one token replaced, inserted or left out)

If allowed, earlier answers of the same tenant are searched too, for what followed most often (`ragspec.drafting.counted`): before
the references where they hold the longer match.

The probability of each rule and match length is learned from acceptance, for each tenant.

Sources: LLMA (Yang et al. 2023, arXiv 2304.04487), prompt lookup (Saxena 2023), SAD (Sun et al. 2021, arXiv 2106.04970),
suffix decoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragspec.core import Request, SourceKind, salt_belongs_to
from ragspec.drafting.acceptance import MAX_TENANTS, AcceptanceCells, Floats, Guess, Guesses, Ints
from ragspec.drafting.counted import CountedAcceptance, CountedDrafts, compile_searches
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.references import Reference, ReferenceReader
from ragspec.drafting.suffix_index import (
    ACCEPTED,
    FOLLOWS,
    MOST_FOLLOWED,
    NUM_CELLS,
    NUM_COLUMNS,
    SEEN,
    SEPARATOR,
    GrowingSuffixes,
    ReferenceIndex,
    SuffixIndex,
    longest_matches,
    searched_text,
)
from ragspec.numerics.compiled import array_at, assign, compiled, inner
from ragspec.tenants import TenantStates, tenant_of
from ragspec.tree import FEEDBACK, NUM_GIVEN, OFFSET, PARENT, SOURCE, TOKEN, Proposal, Proposals

_MAX_MATCH = 16
_MAX_BRANCHES = 6
_MAX_QUOTES = 8
_LIKELY = 0.1
"""Beyond `max_nodes` tokens a branch goes on while its path is at least so probable."""
_PROMPT_END = 4
"""Tokens of the prompt that are kept with an answer, so that its beginning is found again."""
_PRIORS = {
    **{f"match:{kind.name.lower()}": (0.25, 0.95) for kind in SourceKind},
    "start:input": (0.3, 0.95),
    "start:prediction": (0.9, 0.97),
    "start:draft": (0.9, 0.97),
    "start:quote": (0.6, 0.6),
    **{f"quote:{rank}": (0.3 / (rank + 1), 0.95) for rank in range(_MAX_QUOTES)},
    "quoted": (0.5, 0.97),
    "tail": (0.5, 0.9),
    "realign:replaced": (0.5, 0.95),
    "realign:inserted": (0.3, 0.95),
    "realign:removed": (0.2, 0.95),
}


_ROWS = {kind: n * (_MAX_MATCH + 1) for n, kind in enumerate(_PRIORS)}
"""The cell of each kind's length 0; the next cells have the next lengths."""
_START_QUOTE, _QUOTE, _QUOTED, _TAIL = (_ROWS[kind] for kind in ("start:quote", "quote:0", "quoted", "tail"))
_REALIGN = _ROWS["realign:replaced"]
_START_ROWS = tuple(_ROWS.get(f"start:{kind.name.lower()}", 0) for kind in SourceKind)
_INPUT, _PREDICTION, _OUTPUT = (int(kind) for kind in (SourceKind.INPUT, SourceKind.PREDICTION, SourceKind.OUTPUT))
_KIND, _SOURCE, _CHARACTER, _TAIL_AT, _SENTENCE_AT = range(5)  # columns of `ReferenceIndex.facts`
_BEGIN, _END, _EXPECTED, _NUM_OFF = range(4)  # of `SuffixIndex.place`
_MOST_POINTS, _SPARE_NODES = 48, 1024


class _Limits(NamedTuple):
    """The most tokens of any branch, and of a likely branch. A copied path less probable than `least_prob` is left out."""

    num_any: int
    num_likely: int
    least_prob: float


@inner
def _matches(searched: Any, points: Any) -> int:
    """Points behind the longest matches whose next tokens differ. Returns how many."""
    text, facts, place = searched.text, searched.facts, searched.place
    begin, end, num = place[_BEGIN], place[_END], 0
    for n, (at, length) in enumerate(longest_matches(text, searched.order, begin, end, _MAX_MATCH)):
        if n >= 4 * _MAX_BRANCHES or num >= _MAX_BRANCHES:
            break
        met = text[at] == SEPARATOR
        for m in range(num):
            met = met or text[points[m, 0]] == text[at]
        if met:
            continue
        row, before = (_OUTPUT if at >= begin else facts[at, _KIND]) * (_MAX_MATCH + 1), end - length - 1
        if at < begin and facts[at, _SENTENCE_AT] == at - length and before >= begin and searched.opens[text[before]]:
            row = _QUOTED  # the match is a sentence's beginning, behind a mark that opens a quote
        points[num, 0], points[num, 1], points[num, 2] = at, row, length
        num += 1
    return num


@inner
def _find_points(searched: Any, points: Any) -> int:
    """Points to copy from, best first: each is judged given that no earlier point is the right one. Returns how many.

    Shape of points: int64 [most, 3], the place of the first token to copy, its kind's row of acceptance, the length of the match.
    """
    text, place, quotes, starts = searched.text, searched.place, searched.quotes, searched.starts
    begin, end, off = place[_BEGIN], place[_END], place[_NUM_OFF]
    if end == begin:
        for n in range(min(len(starts), _MOST_POINTS)):
            points[n, 0], points[n, 1], points[n, 2] = starts[n, 0], _START_ROWS[starts[n, 1]], 0
        return min(len(starts), _MOST_POINTS)
    first = 3  # room for realignments
    num = first + _matches(searched, points[first:])
    if off and place[_EXPECTED] >= 0 and (num == first or points[first, 2] <= 2):
        last = place[_EXPECTED]
        while last < begin and text[last] != SEPARATOR:
            last += 1
        for n, skip in ((2, off + 1), (1, 0), (0, off)):
            if place[_EXPECTED] + skip < last:
                first -= 1
                points[first, 0], points[first, 1] = place[_EXPECTED] + skip, _REALIGN + n * (_MAX_MATCH + 1)
                points[first, 2] = min(off, 4) - 1
    if len(quotes) and searched.opens[text[end - 1]]:
        keep = first
        for n in range(first, num):
            if points[n, 2] > 3:
                assign(points[keep], points[n])
                keep += 1
        num = keep + _quote_points(quotes, points[keep:])
    for n in range(first, num):
        assign(points[n - first], points[n])
    return num - first


@inner
def _quote_points(quotes: Any, points: Any) -> int:
    num = min(len(quotes), _MAX_QUOTES)
    for rank in range(num):
        points[rank, 0], points[rank, 1], points[rank, 2] = quotes[rank], _QUOTE + rank * (_MAX_MATCH + 1), 0
    return num


@inner
def _copy(searched: Any, points: Any, chances: Any, limits: Any, root: int, left: float, out: Any, count: int) -> Any:
    """Append a branch for each point below node `root`. `left`: the probability that all earlier branches fail. Returns the
    probability that the new branches fail, too, and the number of nodes.

    Shape of chances: float64 [cells].
    """
    text, facts, place, (nodes, probs) = searched.text, searched.facts, searched.place, out
    begin, end = place[_BEGIN], place[_END]
    for at, row, length in points:
        if text[at] == SEPARATOR:
            continue
        tail = facts[at, _TAIL_AT] - at if at < begin else limits.num_likely
        prob, parent = left, root
        left *= 1.0 - chances[row + min(length, _MAX_MATCH) if tail > 0 else _TAIL]
        if prob - left < limits.least_prob:
            continue
        for i in range(min(limits.num_likely, len(nodes) - count)):
            source = at + i if at < begin else at + i % (end - at)  # the copied end of the output repeats itself
            if text[source] == SEPARATOR:
                break
            cell = row + min(length + i, _MAX_MATCH) if i < tail else _TAIL + min(i - tail, _MAX_MATCH)
            prob *= chances[cell]
            if prob < (limits.least_prob if i < limits.num_any else max(limits.least_prob, _LIKELY)):
                break
            nodes[count, TOKEN], nodes[count, PARENT], nodes[count, FEEDBACK] = text[source], parent, cell
            nodes[count, SOURCE] = facts[source, _SOURCE] if at < begin else -1
            nodes[count, OFFSET] = facts[source, _CHARACTER] if at < begin else -1
            probs[count], parent = prob, count
            count += 1
    return left, count


@inner
def _propose_one(searched: Any, marks: Any, chances: Any, limits: Any, out: Any) -> Any:
    """Copies for one sequence: their number, the probability that all fail, and the longest match.

    `marks`: the tokens that open a quotation, before an output whose passages have sentences.
    """
    place, quotes, (nodes, probs) = searched.place, searched.quotes, out
    points = np.empty((_MOST_POINTS, 3), np.int64)
    top, left = np.int64(-1), 1.0
    count, parent = np.int64(0), top  # Why int64: `_copy` would be compiled for each literal, too
    if place[_END] == place[_BEGIN] and len(quotes):
        left = chances[_START_QUOTE]
        for token in marks:
            nodes[count, TOKEN], nodes[count, PARENT], nodes[count, FEEDBACK] = token, parent, _START_QUOTE
            nodes[count, SOURCE] = nodes[count, OFFSET] = -1
            probs[count], parent = left, count
            count += 1
        num = _quote_points(quotes, points)
        _, count = _copy(searched, points[:num], chances, limits, parent, left, out, count)
        left = 1.0 - left
    num, longest = _find_points(searched, points), 0
    for n in range(num):
        longest = max(longest, points[n, 2])
    left, count = _copy(searched, points[:num], chances, limits, top, left, out, count)
    return count, left, longest


@inner
def _follow(searched: Any, num_new: int) -> None:
    """Advance the position in the input by the last output tokens. Where the output left the input, follow it again from the only
    match of the last tokens in it, near or after the point where copying stopped.

    Source: the uniqueness rule of SAD.
    """
    text, place, starts = searched.text, searched.place, searched.starts
    begin, end, points = place[_BEGIN], place[_END], np.empty((_MAX_BRANCHES, 3), np.int64)
    for at in range(end - num_new, end):
        if place[_EXPECTED] >= 0:
            follows = place[_NUM_OFF] == 0 and text[place[_EXPECTED]] == text[at]
            place[_EXPECTED if follows else _NUM_OFF] += 1
    if place[_EXPECTED] >= 0 and place[_NUM_OFF] == 0:
        return
    if place[_NUM_OFF] > MOST_FOLLOWED:
        place[_EXPECTED], place[_NUM_OFF] = -1, 0
    num_inputs, num_ahead, ahead = 0, 0, 0
    expected = place[_EXPECTED]
    for n in range(_matches(searched, points)):
        if points[n, 1] == _INPUT * (_MAX_MATCH + 1) or points[n, 1] == _PREDICTION * (_MAX_MATCH + 1):
            num_inputs += 1
            if expected < 0 or expected - 1 <= points[n, 0] <= expected + 8:
                num_ahead, ahead = num_ahead + 1, n
    if num_ahead == 1 and (points[ahead, 2] > 1 or expected >= 0):
        place[_EXPECTED], place[_NUM_OFF] = points[ahead, 0], 0
    elif expected < 0 and num_inputs == 0 and end - begin <= 4 and len(starts):
        place[_EXPECTED], place[_NUM_OFF] = starts[0, 0], end - begin


@compiled(nogil=True)
def _propose(addresses: Any, written: Any, quoting: Any, levels: Any, limits: Any, out: Any) -> Any:
    """Append each sequence's new output, then copy for it. `out` gets the nodes of all sequences, one after the other.

    `written`: all new tokens, and where each sequence's begin; `quoting`: the tokens of a mark, as in `_propose_one`, and `opens`
    of `SearchedText`; `levels`: of each sequence's draft at most. Returns where each sequence's nodes begin, the probability that
    all its copies fail, and its longest match. Shapes: addresses int64 [B], levels int64 [B] -> int64 [B + 1], float64 [B],
    int64 [B].
    """
    (tokens, begins), (marks, opens), (max_nodes, least_prob), (nodes, probs) = written, quoting, limits, out
    starts, failing = np.zeros(len(levels) + 1, np.int64), np.empty(len(levels))
    longest = np.empty(len(levels), np.int64)
    for n, address in enumerate(addresses):
        row = array_at(address, (NUM_COLUMNS,), np.int64)
        searched, num_new, first = searched_text(row, opens), begins[n + 1] - begins[n], starts[n]
        end = searched.place[_END]
        assign(searched.text[end : end + num_new], tokens[begins[n] : begins[n + 1]])
        searched.place[_END] = end + num_new
        if num_new and row[FOLLOWS]:
            _follow(searched, num_new)
        most, size = first + levels[n] + _SPARE_NODES, (row[NUM_CELLS],)
        chances = array_at(row[ACCEPTED], size, np.float64) / array_at(row[SEEN], size, np.float64)
        own = _Limits(min(max_nodes, levels[n]), levels[n], least_prob)
        count, failing[n], longest[n] = _propose_one(
            searched, marks, chances, own, (nodes[first:most], probs[first:most])
        )
        starts[n + 1] = first + count
    return starts, failing, longest


def copy_acceptance() -> AcceptanceCells:
    """Acceptance of a copied node given its parent's, by kind and match length."""
    share = 1.0 - 0.6 ** np.arange(_MAX_MATCH + 1)
    return AcceptanceCells(np.concatenate([short + (long - short) * share for short, long in _PRIORS.values()]))


class CopyDrafter(Drafter):
    """See the module. `earlier_tokens`: the most tokens of earlier answers kept for one tenant; 0 keeps none.

    Paths less probable than `least_prob` are not proposed: no row is that cheap.
    """

    name = "copy"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: SequenceOf[int] = (),
        earlier_tokens: int = 0,
        least_prob: float = 0.02,
    ) -> None:
        self._reader = ReferenceReader(tokenizer, eos_ids)
        self._marks = np.array(self._reader.quote_ids, np.int64)
        self._earlier = TenantStates(MAX_TENANTS, lambda: GrowingSuffixes(earlier_tokens))
        self._least_prob = least_prob
        self._acceptance = TenantStates(MAX_TENANTS, copy_acceptance)
        self._has_earlier = earlier_tokens > 0
        self._counted_acceptance = TenantStates(MAX_TENANTS, CountedAcceptance)
        self._indexes: dict[tuple[str, int], SuffixIndex] = {}
        self._room = np.empty((0, NUM_GIVEN), np.int64), np.empty(0)  # for the nodes of one call
        self._opens, self._is_noted = np.zeros((2, 1), np.bool_)  # tokens that open a quotation; tokens looked at
        self._nothing = SuffixIndex(ReferenceIndex([]), "", copy_acceptance(), self._reader.opens_quote)
        self._copies([self._nothing], [[]], Budget(0, 0.0, [0]))  # compiles it: the first answer would wait
        Guesses([self._nothing.acceptance], *np.zeros((2, 1), np.int64)).learn(np.ones(1, np.int64))
        compile_searches()

    def prepare(self, request: Request) -> ReferenceIndex:
        """The references of a request. Why the last output tokens precede a given draft: the longest match then leads to it."""
        references, segment = self._reader.read(request.sources, request.salt), request.segment
        if segment.draft_ids:
            token_ids = [*segment.output_ids[-_MAX_MATCH:], *segment.draft_ids]
            references.append(Reference(SourceKind.DRAFT, token_ids, -1, [], len(token_ids)))
        return ReferenceIndex(references)

    def start(self, sequence: SequenceView) -> None:
        index = sequence.prepared.get(self.name)
        if index is None:  # preparing failed
            return
        salt = sequence.request.salt
        acceptance = self._acceptance.used(tenant_of(salt))
        most = sequence.num_output + sequence.most_tokens
        self._indexes[sequence.key] = SuffixIndex(index, salt, acceptance, self._reader.opens_quote, most)

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        return 0.0 if any(map(self._may_copy, sequences)) else math.inf

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> SequenceOf[SequenceOf[Proposal]]:
        indexes = [self._indexes.get(sequence.key, self._nothing) for sequence in sequences]
        outputs = [index.unread(s.tokens, s.num_prompt) for s, index in zip(sequences, indexes, strict=True)]
        copies, failing, longest = self._copies(indexes, outputs, budget)
        if not self._has_earlier:
            return copies
        most = [min(budget.max_nodes, level) for level in budget.depths]
        recalled = [self._recalled(*each) for each in zip(sequences, most, strict=True)]
        if not any(nodes for nodes, _ in recalled):
            return copies
        parts = zip(copies, failing.tolist(), longest.tolist(), recalled, strict=True)
        return [_with_recalled(*each) for each in parts]

    def _may_copy(self, sequence: SequenceView) -> bool:
        if (index := self._indexes.get(sequence.key)) is None:
            return False
        has_earlier = self._has_earlier and sequence.request.salt in self._earlier
        return has_earlier or index.may_continue(sequence.tokens, sequence.num_prompt)

    def finish(self, sequence: SequenceView) -> None:
        index = self._indexes.pop(sequence.key, None)
        paused = sequence.request.segment.end is not None
        if self._has_earlier and sequence.num_output and index is not None and index.remembered and not paused:
            answer = sequence.tokens[max(0, sequence.num_prompt - _PROMPT_END) :]
            self._earlier.used(sequence.request.salt).append(answer)

    def purge(self, salt: str) -> None:
        """Forget one tenant's earlier answers, and keep none of its running sequences' answers."""
        self._earlier.purge(salt)
        self._reader.forget()
        self._acceptance.purge(salt)
        self._counted_acceptance.purge(salt)
        for index in self._indexes.values():
            index.remembered = index.remembered and not salt_belongs_to(index.salt, salt)

    def _copies(
        self, indexes: SequenceOf[SuffixIndex], outputs: SequenceOf[SequenceOf[int]], budget: Budget
    ) -> tuple[Proposals, Floats, Ints]:
        """Copies of the references, the probability that all fail, and the longest match. `outputs`: new tokens."""
        written = np.fromiter(chain.from_iterable(outputs), np.int32)
        self._note_quotes(written)
        size = sum(budget.depths) + _SPARE_NODES * len(indexes)
        if size > len(self._room[1]):
            self._room = np.empty((size, NUM_GIVEN), np.int64), np.empty(size)
        begins, levels = np.cumsum([0, *map(len, outputs)]), np.array(budget.depths, np.int64)
        limits = budget.max_nodes, max(self._least_prob, budget.least_prob)
        addresses, quoting = np.array([index.address for index in indexes]), (self._marks, self._opens)
        starts, failing, longest = _propose(addresses, (written, begins), quoting, levels, limits, self._room)
        nodes, probs = self._room[0][: starts[-1]].copy(), self._room[1][: starts[-1]].copy()
        tables = [index.acceptance for index in indexes]
        return Proposals(self.name, nodes, probs, starts, partial(_guesses, tables)), failing, longest

    def _note_quotes(self, tokens: Any) -> None:
        """Note which of these tokens open a quotation. Shape: int32 [N]."""
        if (most := tokens.max(initial=0)) >= len(self._opens):
            self._opens, self._is_noted = np.pad([self._opens, self._is_noted], ((0, 0), (0, most)))
        for token in set(tokens[~self._is_noted[tokens]].tolist()):
            self._opens[token], self._is_noted[token] = self._reader.opens_quote(token), True

    def _recalled(self, sequence: SequenceView, most: int) -> tuple[list[Proposal], int]:
        """What followed in the tenant's earlier answers, and the length of the match there. Nothing where preparing failed."""
        salt = sequence.request.salt
        if sequence.key not in self._indexes or (answers := self._earlier.get(salt)) is None:
            return [], 0
        acceptance = self._counted_acceptance.used(tenant_of(salt))
        return CountedDrafts(self.name, answers.runs, acceptance).grow(sequence.tokens, most, most)


def _with_recalled(
    copies: SequenceOf[Proposal], failing: float, longest: int, recalled: tuple[list[Proposal], int]
) -> list[Proposal]:
    """Copies, and what followed in earlier answers, the longer match first. `failing`: the probability that all copies fail."""
    nodes, length = recalled
    if length <= longest:
        return [*copies, *_below(nodes, failing, len(copies))]
    left = 1.0 - sum(node.path_prob for node in nodes if node.parent < 0)
    return [*nodes, *_below(copies, left, len(nodes))]


def _below(proposals: SequenceOf[Proposal], left: float, first: int) -> Iterator[Proposal]:
    """Proposals behind `first` others, which all fail with probability `left`."""
    for node in proposals:
        yield node._replace(parent=node.parent + first if node.parent >= 0 else -1, path_prob=node.path_prob * left)


def _guesses(tables: SequenceOf[AcceptanceCells], owners: Any, cells: Any) -> Guess | Guesses:
    """The feedback of a node, or of several."""
    return Guess(tables[owners], cells) if isinstance(owners, int) else Guesses(tables, owners, cells)
