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

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragspec.core import Request, SourceKind, salt_belongs_to
from ragspec.drafting.acceptance import Cell, CopyAcceptance, Experience, Guess
from ragspec.drafting.counted import CountedAcceptance, CountedDrafts
from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.drafting.references import Reference, ReferenceReader
from ragspec.drafting.suffix_index import SEPARATOR, GrowingSuffixes, ReferenceIndex, SuffixIndex, compile_searches
from ragspec.numerics.attention import Ints
from ragspec.tenants import TenantStates
from ragspec.tree import Origin, Proposal

_MAX_MATCH = 16
_MAX_BRANCHES = 6
_MAX_QUOTES = 8
_LIKELY = 0.1
"""Beyond `max_nodes` tokens a branch goes on while its path is at least so probable."""
_MAX_TENANTS = 256
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


class _CopyPoint(NamedTuple):
    """A point to copy from. `at`: position of the first token to copy in the suffix index."""

    at: int
    kind: str
    length: int


class _Limits(NamedTuple):
    """The most tokens of any branch, and of a likely branch. A copied path less probable than `least_prob` is left out."""

    num_any: int
    num_likely: int
    least_prob: float


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
        self._earlier = TenantStates(_MAX_TENANTS, lambda: GrowingSuffixes(earlier_tokens))
        self._least_prob = least_prob
        self._acceptance = Experience(lambda: CopyAcceptance(_PRIORS, _MAX_MATCH))
        self._counts = CountedDrafts(self.name, least_match=2) if earlier_tokens else None
        self._counted_acceptance = Experience(CountedAcceptance)
        self._indexes: dict[tuple[str, int], SuffixIndex] = {}
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
        self._indexes[sequence.key] = SuffixIndex(index, sequence, self._acceptance.of(sequence.request.salt))

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        least_prob = max(self._least_prob, budget.least_prob)
        limits = [_Limits(min(budget.max_nodes, depth), depth, least_prob) for depth in budget.depths]
        return [self._propose(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        index = self._indexes.get(sequence.key)
        if index is None:
            return
        for token in tokens:
            index.append(token)
            index.follow(token)
        if index.follows_input:
            self._realign(index, sequence)

    def finish(self, sequence: SequenceView) -> None:
        index = self._indexes.pop(sequence.key, None)
        paused = sequence.request.segment.end is not None
        if self._counts and sequence.num_output and index is not None and index.remembered and not paused:
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

    def _propose(self, sequence: SequenceView, limits: _Limits) -> list[Proposal]:
        index = self._indexes.get(sequence.key)
        proposals: list[Proposal] = []
        if index is None:
            return proposals
        parent, left = -1, 1.0
        if sequence.num_output == 0 and any(r.is_sentence for r in index.references):
            guess = Guess(index.acceptance, index.acceptance.cell("start:quote", 0))
            left, origin = index.acceptance.probability(guess.cell), Origin(self.name, feedback=guess)
            for token in self._reader.quote_ids:
                proposals.append(Proposal(token, parent, left, origin))
                parent = len(proposals) - 1
            self._copy(index, self._quotes(index), parent, left, limits, proposals)
            parent, left = -1, 1.0 - left
        points = self._points(index, sequence)
        recalled, length = self._recalled(sequence, limits.num_any)
        comes_first = length > max((point.length for point in points), default=0)
        if comes_first:
            left = _append(recalled, left, proposals)
        left = self._copy(index, points, parent, left, limits, proposals)
        if not comes_first:
            _append(recalled, left, proposals)
        return proposals

    def _recalled(self, sequence: SequenceView, most: int) -> tuple[list[Proposal], int]:
        """What followed in the tenant's earlier answers, and the length of the match there."""
        salt = sequence.request.salt
        if self._counts is None or (answers := self._earlier.get(salt)) is None:
            return [], 0
        return self._counts.grow(answers.runs, sequence.tokens, most, most, self._counted_acceptance.of(salt))

    def _copy(
        self,
        index: SuffixIndex,
        points: list[_CopyPoint],
        root: int,
        left: float,
        limits: _Limits,
        proposals: list[Proposal],
    ) -> float:
        """Append a branch for each point below node `root`. `left`: the probability that all earlier branches fail. Returns the
        probability that the new branches fail, too."""
        for point in points:
            number = index.reference_at(point.at)
            reference = index.references[number] if number < len(index.references) else None
            begin = int(index.begin[number]) if reference else 0
            tail = begin + reference.tail - point.at if reference else limits.num_likely
            if index.tokens[point.at] == SEPARATOR:
                continue
            prob, parent = left, root
            left *= 1.0 - self._chance(index, point, tail, 0)[1]
            if prob - left < limits.least_prob:
                continue
            for i, token in enumerate(self._copyable(index, point, limits.num_likely).tolist()):
                cell, given = self._chance(index, point, tail, i)
                prob *= given
                if prob < (limits.least_prob if i < limits.num_any else max(limits.least_prob, _LIKELY)):
                    break
                source, offset = reference.provenance(point.at + i - begin) if reference else (-1, -1)
                guess = Guess(index.acceptance, cell)
                proposals.append(Proposal(token, parent, prob, Origin(self.name, source, offset, guess)))
                parent = len(proposals) - 1
        return left

    @staticmethod
    def _chance(index: SuffixIndex, point: _CopyPoint, tail: int, i: int) -> tuple[Cell, float]:
        """The acceptance cell of token i to copy, and its probability given the token before.

        `tail`: how many tokens from the point on are the reference's own text; tail tokens follow.
        """
        kind, length = (point.kind, point.length + i) if i < tail else ("tail", i - tail)
        cell = index.acceptance.cell(kind, length)
        return cell, index.acceptance.probability(cell)

    def _copyable(self, index: SuffixIndex, point: _CopyPoint, most: int) -> Ints:
        """Tokens from the point up to the next separator; what is copied from the output's end repeats itself."""
        run = index.tokens[point.at : point.at + most]
        stop = np.flatnonzero(run == SEPARATOR)
        return run[: stop[0]] if len(stop) else np.resize(run, most if len(run) else 0)

    def _points(self, index: SuffixIndex, sequence: SequenceView) -> list[_CopyPoint]:
        """Points to copy from, best first: each is judged given that no earlier point is the right one."""
        if sequence.num_output == 0:
            return self._starts(index)
        points = self._matches(index)
        if index.num_off and index.expected >= 0 and (not points or points[0].length <= 2):
            points = [*self._realignments(index), *points]
        if self._reader.opens_quote(sequence.tokens[-1]):
            points = [*(p for p in points if p.length > 3), *self._quotes(index)]
        return points

    def _quotes(self, index: SuffixIndex) -> list[_CopyPoint]:
        return [_CopyPoint(at, f"quote:{rank}", 0) for rank, at in enumerate(index.quotes[:_MAX_QUOTES])]

    def _starts(self, index: SuffixIndex) -> list[_CopyPoint]:
        return [
            _CopyPoint(int(index.begin[number]), f"start:{kind.name.lower()}", 0)
            for kind in (SourceKind.DRAFT, SourceKind.PREDICTION, SourceKind.INPUT)
            for number, reference in enumerate(index.references)
            if reference.kind is kind
        ]

    def _matches(self, index: SuffixIndex) -> list[_CopyPoint]:
        points: list[_CopyPoint] = []
        met: set[int] = set()
        for at, length in index.matches(_MAX_MATCH)[: 4 * _MAX_BRANCHES]:
            following = int(index.tokens[at])
            if following == SEPARATOR or following in met:
                continue
            met.add(following)
            number = index.reference_at(at)
            own = number >= len(index.references)
            kind = SourceKind.OUTPUT if own else index.references[number].kind
            is_quoted = not own and self._is_quoted(index, number, at, length)
            points.append(_CopyPoint(at, "quoted" if is_quoted else f"match:{kind.name.lower()}", length))
            if len(points) == _MAX_BRANCHES:
                break
        return points

    def _is_quoted(self, index: SuffixIndex, number: int, at: int, length: int) -> bool:
        """Whether the matched tokens are a sentence's first ones, behind a mark that opens a quote."""
        before = index.end - length - 1
        return (
            index.references[number].is_sentence
            and at - length == index.begin[number]
            and before >= index.begin[-1]
            and self._reader.opens_quote(int(index.tokens[before]))
        )

    def _realignments(self, index: SuffixIndex) -> list[_CopyPoint]:
        off = index.num_off
        last = self._end_of_reference(index, index.expected)
        steps = (("realign:replaced", off), ("realign:inserted", 0), ("realign:removed", off + 1))
        return [
            _CopyPoint(index.expected + skip, kind, min(off, 4) - 1)
            for kind, skip in steps
            if index.expected + skip < last
        ]

    def _realign(self, index: SuffixIndex, sequence: SequenceView) -> None:
        """Follow the input again from the only match of the last tokens in it, near or after the point where copying stopped.

        Source: the uniqueness rule of SAD.
        """
        if index.expected >= 0 and index.num_off == 0:
            return
        if index.num_off > 8:
            index.expected, index.num_off = -1, 0
        matches = [p for p in self._matches(index) if p.kind in ("match:input", "match:prediction")]
        ahead = [p for p in matches if index.expected < 0 or index.expected - 1 <= p.at <= index.expected + 8]
        if len(ahead) == 1 and (ahead[0].length > 1 or index.expected >= 0):
            index.expected, index.num_off = ahead[0].at, 0
        elif index.expected < 0 and len(matches) == 0 and sequence.num_output <= 4:
            starts = self._starts(index)
            if starts:
                index.expected, index.num_off = starts[0].at, sequence.num_output

    def _end_of_reference(self, index: SuffixIndex, at: int) -> int:
        number = index.reference_at(at)
        return int(index.begin[number + 1]) - 1 if number < len(index.references) else index.end


def _append(tree: list[Proposal], left: float, proposals: list[Proposal]) -> float:
    """Append another tree below the root. The tree's probabilities are conditional on all earlier branches failing, which has
    probability `left`. Returns the probability that the tree fails, too."""
    first = len(proposals)
    for node in tree:
        parent = node.parent + first if node.parent >= 0 else -1
        proposals.append(node._replace(parent=parent, path_prob=node.path_prob * left))
    return left * (1.0 - sum(node.path_prob for node in tree if node.parent < 0))
