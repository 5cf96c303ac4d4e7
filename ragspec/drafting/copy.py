"""The copy drafter: the answer is likely to repeat what the request already holds.

References are the retrieved passages, the user's input, predicted text, the conversation, the output itself and, if allowed,
earlier answers of the same tenant. These ways lead to a place to copy from:

* match:    the longest run of tokens that ends the text so far and occurs in a reference; several places give branches
* start:    the output begins: inputs and predictions from their first token, a quotation mark where there are passages
* quote:    a quotation mark opens: sentences of the passages from their first token, those that share rare tokens with the
            question first
* tail:     what usually follows a copied sentence or input: the closing mark with the passage's number, the end
* draft:    tokens given with the request as what may come next, as a place to match and where an output begins
* realign:  after an edit, go on beside the place where copying stopped (one token replaced, inserted or left out)

The probability of each way and match length is learned from what the target accepted.

Sources: LLMA (Yang et al. 2023, arXiv 2304.04487), prompt lookup (Saxena 2023), SAD (Sun et al. 2021, arXiv 2106.04970),
suffix decoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ragspec.core import Request, SourceKind, is_part_of
from ragspec.drafting.acceptance import AcceptanceTable
from ragspec.drafting.drafter import Budget, Drafted, Features
from ragspec.drafting.references import Reference, ReferenceReader
from ragspec.drafting.suffix_index import SEPARATOR, Haystack
from ragspec.tree import Origin, Proposal

Ints = NDArray[np.int32]

_MAX_MATCH = 16
_MAX_BRANCHES = 6
_MAX_QUOTES = 8
_MAX_TENANTS = 256
_PRIORS = {
    **{f"match:{kind.name.lower()}": (0.25, 0.95) for kind in SourceKind},
    "start:input": (0.3, 0.95),
    "start:prediction": (0.9, 0.97),
    "start:draft": (0.9, 0.97),
    "start:quote": (0.6, 0.6),
    **{f"quote:{rank}": (0.3 / (rank + 1), 0.95) for rank in range(_MAX_QUOTES)},
    "tail": (0.5, 0.9),
    "realign:replaced": (0.5, 0.95),
    "realign:inserted": (0.3, 0.95),
    "realign:removed": (0.2, 0.95),
}


class Feedback(NamedTuple):
    """Which cell of the acceptance table a node was drawn from."""

    kind: str
    length: int


class _Place(NamedTuple):
    """Somewhere to copy from: `at` is the position of the first token to copy in the haystack."""

    at: int
    kind: str
    length: int


class CopyDrafter:
    """See the module. `earlier_tokens`: how many tokens of earlier answers one tenant may keep; 0 keeps none.

    Paths less probable than `least_prob` are not proposed: no row is that cheap.
    """

    name = "copy"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: SequenceOf[int] = (),
        earlier_tokens: int = 0,
        least_prob: float = 0.02,
    ) -> None:
        self._reader = ReferenceReader(tokenizer, eos_ids)
        self._earlier: dict[str, deque[tuple[int, ...]]] = {}  # by tenant, the latest writer last
        self._max_earlier = earlier_tokens
        self._least_prob = least_prob
        self._table = AcceptanceTable(_PRIORS, _MAX_MATCH)
        self._states: dict[tuple[str, int], Haystack] = {}

    def prepare(self, request: Request) -> list[Reference]:
        """Why the output's last tokens before a draft: the longest match then leads to it."""
        references, segment = self._reader.read(request.sources, request.salt), request.segment
        if segment.draft_ids:
            token_ids = [*segment.output_ids[-_MAX_MATCH:], *segment.draft_ids]
            references.append(Reference(SourceKind.DRAFT, token_ids, -1, [], len(token_ids)))
        return references

    def start(self, sequence: Drafted) -> None:
        prepared = sequence.prepared.get(self.name)
        if prepared is None:  # its sources could not be read
            return
        references = list(prepared)
        for answer in self._earlier.get(sequence.request.salt, ()):
            references.append(Reference(SourceKind.EARLIER, list(answer), -1, [], len(answer)))
        self._states[sequence.key] = Haystack(references, sequence)

    def cost_s(self, sequences: SequenceOf[Drafted]) -> float:
        """Nothing worth counting."""
        return 0.0

    def propose(self, sequences: SequenceOf[Drafted], budget: Budget) -> list[list[Proposal]]:
        return [self._propose(sequence, budget.max_nodes) for sequence in sequences]

    def observe(self, sequence: Drafted, tokens: SequenceOf[int], features: Features) -> None:
        state = self._states.get(sequence.key)
        if state is None:
            return
        for token in tokens:
            state.append(token)
            state.follow(token)
        if state.follows_input:
            self._realign(state, sequence)

    def learn(self, feedback: object, accepted: bool) -> None:
        if isinstance(feedback, Feedback):
            self._table.learn(feedback.kind, feedback.length, accepted)

    def finish(self, sequence: Drafted) -> None:
        state = self._states.pop(sequence.key, None)
        paused = sequence.request.segment.end is not None
        if self._max_earlier and sequence.num_output and state is not None and state.remembered and not paused:
            self._remember(sequence.request.salt, tuple(sequence.tokens[sequence.num_prompt :]))

    def _remember(self, salt: str, answer: tuple[int, ...]) -> None:
        """Drop a tenant's oldest answers, and all of the tenant that has written nothing for longest."""
        answers = self._earlier.pop(salt, None) or deque()
        self._earlier[salt] = answers
        answers.append(answer)
        while sum(map(len, answers)) > self._max_earlier:
            answers.popleft()
        if len(self._earlier) > _MAX_TENANTS:
            del self._earlier[next(iter(self._earlier))]

    def purge(self, salt: str) -> None:
        """Forget the earlier answers of one tenant, and remember none of those being written."""
        for each in [each for each in self._earlier if is_part_of(each, salt)]:
            del self._earlier[each]
        self._reader.forget()
        for state in self._states.values():
            state.remembered = state.remembered and not is_part_of(state.salt, salt)

    def _propose(self, sequence: Drafted, max_nodes: int) -> list[Proposal]:
        state = self._states.get(sequence.key)
        proposals: list[Proposal] = []
        if state is None:
            return proposals
        parent, left = -1, 1.0
        if sequence.num_output == 0 and any(r.is_sentence for r in state.references):
            left = self._table.probability("start:quote", 0)
            origin = Origin(self.name, feedback=Feedback("start:quote", 0))
            for token in self._reader.quote_ids:
                proposals.append(Proposal(token, parent, left, origin))
                parent = len(proposals) - 1
            self._copy(state, self._quotes(state), parent, left, max_nodes, proposals)
            parent, left = -1, 1.0 - left
        self._copy(state, self._places(state, sequence), parent, left, max_nodes, proposals)
        return proposals

    def _copy(
        self, state: Haystack, places: list[_Place], root: int, left: float, max_nodes: int, proposals: list[Proposal]
    ) -> None:
        """Append a branch for each place below node `root`; `left` is the chance that none before it was meant."""
        for place in places:
            number = state.reference_at(place.at)
            reference = state.references[number] if number < len(state.references) else None
            begin = int(state.begin[number]) if reference else 0
            tail = begin + reference.tail - place.at if reference else max_nodes
            prob, parent = left, root
            first = 0.0
            for i, (token, cell, given) in enumerate(self._branch(state, place, tail, max_nodes)):
                prob *= given
                first = first or given
                if prob < self._least_prob:
                    break
                source, offset = reference.provenance(place.at + i - begin) if reference else (-1, -1)
                proposals.append(Proposal(token, parent, prob, Origin(self.name, source, offset, cell)))
                parent = len(proposals) - 1
            left *= 1.0 - first

    def _branch(
        self, state: Haystack, place: _Place, tail: int, max_nodes: int
    ) -> Iterator[tuple[int, Feedback, float]]:
        """Each token to copy, the cell it is drawn from and its probability given the token before.

        `tail`: how many tokens from the place on are the reference's own text.
        """
        for i, token in enumerate(self._copyable(state, place, max_nodes).tolist()):
            cell = Feedback(place.kind, place.length + i) if i < tail else Feedback("tail", i - tail)
            yield token, cell, self._table.probability(*cell)

    def _copyable(self, state: Haystack, place: _Place, max_nodes: int) -> Ints:
        """Tokens from the place up to the next separator."""
        run = state.tokens[place.at : place.at + max_nodes]
        stop = np.flatnonzero(run == SEPARATOR)
        return run[: stop[0]] if len(stop) else run

    def _places(self, state: Haystack, sequence: Drafted) -> list[_Place]:
        """Where to copy from, best first: each is judged given that none before it is meant."""
        if sequence.num_output == 0:
            return self._starts(state)
        places = self._matches(state)
        if state.num_off and state.expected >= 0 and (not places or places[0].length <= 2):
            places = [*self._realignments(state), *places]
        if self._reader.opens_quote(sequence.tokens[-1]):
            places = [*(p for p in places if p.length > 3), *self._quotes(state)]
        return places

    def _quotes(self, state: Haystack) -> list[_Place]:
        return [_Place(at, f"quote:{rank}", 0) for rank, at in enumerate(state.quotes[:_MAX_QUOTES])]

    def _starts(self, state: Haystack) -> list[_Place]:
        kinds = {
            SourceKind.DRAFT: "start:draft",
            SourceKind.PREDICTION: "start:prediction",
            SourceKind.INPUT: "start:input",
        }
        return [
            _Place(int(state.begin[number]), kinds[reference.kind], 0)
            for kind in kinds
            for number, reference in enumerate(state.references)
            if reference.kind is kind
        ]

    def _matches(self, state: Haystack) -> list[_Place]:
        places: list[_Place] = []
        met: set[int] = set()
        for at, length in state.matches(_MAX_MATCH)[: 4 * _MAX_BRANCHES]:
            following = int(state.tokens[at])
            if following == SEPARATOR or following in met:
                continue
            met.add(following)
            number = state.reference_at(at)
            own = number >= len(state.references)
            kind = SourceKind.OUTPUT if own else state.references[number].kind
            places.append(_Place(at, f"match:{kind.name.lower()}", length))
            if len(places) == _MAX_BRANCHES:
                break
        return places

    def _realignments(self, state: Haystack) -> list[_Place]:
        off = state.num_off
        last = self._end_of_reference(state, state.expected)
        steps = (("realign:replaced", off), ("realign:inserted", 0), ("realign:removed", off + 1))
        return [
            _Place(state.expected + skip, kind, min(off, 4) - 1) for kind, skip in steps if state.expected + skip < last
        ]

    def _realign(self, state: Haystack, sequence: Drafted) -> None:
        """Find the input's place again where the last tokens occur once in it, at or after where copying stopped.

        Source: the uniqueness rule of SAD.
        """
        if state.expected >= 0 and state.num_off == 0:
            return
        if state.num_off > 8:
            state.expected, state.num_off = -1, 0
        matches = [p for p in self._matches(state) if p.kind in ("match:input", "match:prediction")]
        ahead = [p for p in matches if state.expected < 0 or state.expected - 1 <= p.at <= state.expected + 8]
        if len(ahead) == 1 and (ahead[0].length > 1 or state.expected >= 0):
            state.expected, state.num_off = ahead[0].at, 0
        elif state.expected < 0 and len(matches) == 0 and sequence.num_output <= 4:
            starts = self._starts(state)
            if starts:
                state.expected, state.num_off = starts[0].at, sequence.num_output

    def _end_of_reference(self, state: Haystack, at: int) -> int:
        number = state.reference_at(at)
        return int(state.begin[number + 1]) - 1 if number < len(state.references) else state.end
