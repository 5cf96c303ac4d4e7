"""From packs to rows of tokens: positions, which turn each token belongs to, loss weights, and what guided heads look at.

Owns the mapping from characters to tokens. A row is the passages and as many turns as fit, or examples without passages.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragspec.training.reference.batches import ANSWER_WEIGHT, CHOICE_WEIGHT, ExampleEncoder
from ragspec.training.reference.correction_guides import CorrectionGuides
from ragspec.training.reference.examples import Example
from ragspec.training.reference.generated_questions import STOP_WORDS
from ragspec.training.reference.guidance import Guide
from ragspec.training.reference.packs import Pack, Turn
from ragspec.training.reference.text_format import ASSISTANT, CONTEXT, END, GRAMMAR_REQUEST, USER, numbered
from ragspec.training.reference.token_row import Row
from ragspec.training.reference.tokenizer import token_pieces
from ragspec.training.sentences import sentences_of

GUIDED_CONTEXT_TOKENS = 64
"""Of a row's tokens, so many are shown their role, and of its passages' so many their sentence and number."""

UNSPELT_EVERY = 8
"""Of so many tokens of a quote, one is guided to spell nothing."""

ASKING_WORDS = frozenset("who whom whose what which when where why how many much".split())


@dataclass(frozen=True)
class _Passage:
    """Where a passage's tokens are; `sentences`: token spans."""

    text: str
    start_char: int
    label: int
    sentences: list[tuple[int, int]]


class RowEncoder:
    """Makes rows with one tokenizer."""

    def __init__(self, encoder: ExampleEncoder) -> None:
        self.encoder, self.tokenizer = encoder, encoder.tokenizer
        self._words = [piece.removeprefix("Ġ").lower() for piece in token_pieces(self.tokenizer)]
        vocabulary = self.tokenizer.get_vocab()
        self._roles = {vocabulary[role] for role in (USER, CONTEXT, ASSISTANT)}
        self._corrections = CorrectionGuides(self.tokenizer, encoder.assistant_id)

    def pack_row(self, pack: Pack, max_tokens: int, rng: random.Random) -> Row:
        """The passages and the turns that fit; nothing if the passages alone do not."""
        row = Row()
        context = f"{CONTEXT}\n{numbered(pack.passages)}"
        ids, offsets = self._tokens(context)
        if len(ids) > max_tokens * 0.8:
            return row
        row.extend(ids, self.encoder.prompt_weights(ids, rng), 0, 0)
        passages, ways = list(_passages(pack, offsets)), _ways_on(ids)
        self._guide_context(row, passages, rng)
        for segment, turn in enumerate(pack.turns, start=1):
            asked, _ = self._tokens(f"{USER}{turn.request}{ASSISTANT}")
            answer, answer_offsets = self._tokens(turn.answer + END)
            if len(row.ids) + len(asked) + len(answer) > max_tokens:
                continue
            answer_weights = [CHOICE_WEIGHT] + [ANSWER_WEIGHT] * (len(answer) - 1)
            if turn.open_ended:
                answer_weights[-1] = 0.0
            weights = self.encoder.prompt_weights(asked, rng) + answer_weights
            begin = row.extend(asked + answer, weights, len(ids), segment)
            if turn.passage:
                passage = passages[turn.passage - 1]
                self._guide_turn(row, turn, passage, (begin, len(asked)), (ids, offsets, ways), answer_offsets)
        self._guide_roles(row, rng)
        return row

    def loose_row(self, examples: Iterator[Example], max_tokens: int, rng: random.Random) -> Row:
        """Examples side by side, none seeing another."""
        row = Row()
        for segment, example in enumerate(examples, start=1):
            encoded = self.encoder.encode(example, rng)
            if len(row.ids) + len(encoded.ids) > max_tokens:
                if len(row.ids) > max_tokens * 0.7:
                    break
                continue
            begin = row.extend(encoded.ids, encoded.weights, 0, segment)
            if example.messages and example.messages[0]["content"].startswith(GRAMMAR_REQUEST):
                self._corrections.guide(row, begin, encoded.ids)
        self._guide_roles(row, rng)
        return row

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _guide_context(self, row: Row, passages: list[_Passage], rng: random.Random) -> None:
        places = [(at, start, p.label) for p in passages for start, end in p.sentences for at in range(start, end)]
        for at, start, label in rng.sample(places, min(GUIDED_CONTEXT_TOKENS, len(places))):
            row.looks[Guide.START].append((at, [start]))
            row.looks[Guide.LABEL].append((at, [label]))

    def _guide_roles(self, row: Row, rng: random.Random) -> None:
        latest, places = {0: 0}, []
        for at, (token, segment) in enumerate(zip(row.ids, row.segments, strict=True)):
            if token in self._roles:
                latest[segment] = at
            if segment in latest:
                places.append((at, [latest[segment]]))
        row.looks[Guide.ROLE] += rng.sample(places, min(GUIDED_CONTEXT_TOKENS, len(places)))

    def _guide_turn(
        self,
        row: Row,
        turn: Turn,
        passage: _Passage,
        asked: tuple[int, int],
        context: tuple[list[int], list[tuple[int, int]], dict[tuple[int, ...], set[int]]],
        answer_offsets: list[tuple[int, int]],
    ) -> None:
        (ids, offsets, ways), (begin, num_asked) = context, asked
        char = passage.text.find(turn.quote)
        source = _token_span(offsets, passage.start_char + char, passage.start_char + char + len(turn.quote))
        quoted = _token_span(answer_offsets, 1, 1 + len(turn.quote))
        if source is None or quoted is None or char < 0:
            return
        first = begin + num_asked
        length = quoted[1] - quoted[0]
        if row.ids[first + quoted[0] : first + quoted[1]] != ids[source[0] : source[1]]:
            return
        looks = row.looks
        for i in range(length):
            at, key = first + quoted[0] + i, source[0] + i
            is_fork = i > 0 and len(ways[tuple(ids[key - min(i, 2) : key])]) > 1
            looks[Guide.FORK if is_fork else Guide.COPY if i else Guide.CHOOSE].append((at - 1, [key]))
            looks[Guide.LOCATE].append((at, [key]))
            if is_fork or not i:
                row.weights[at] = CHOICE_WEIGHT
            if not i % UNSPELT_EVERY:
                looks[Guide.SPELL].append((at - 1, [first - 1]))
        mark_and_number = range(first + quoted[1], min(first + quoted[1] + 4, len(row.ids)))
        looks[Guide.LOCATE] += [(at, [source[1] - 1]) for at in mark_and_number]
        self._guide_words(row, (begin, num_asked), (source[0], source[1], passage), range(first - 1, len(row.ids)))
        self._guide_short_answer(row, turn, (begin, num_asked), source[0] - quoted[0], answer_offsets)

    def _guide_short_answer(
        self, row: Row, turn: Turn, asked: tuple[int, int], shift: int, answer_offsets: list[tuple[int, int]]
    ) -> None:
        """`shift`: from a place in the answer's quote to the same in the passages."""
        text, first = turn.short_answer.rstrip("."), sum(asked)
        in_quote = turn.quote.find(text) + 1
        if not text or not in_quote:
            return
        written = turn.answer.rindex(text)
        said = _token_span(answer_offsets, in_quote, in_quote + len(text), inside=True)
        short = _token_span(answer_offsets, written, written + len(text), inside=True)
        if said is None or short is None or self._differ(row, (first + said[0], first + short[0]), short[1] - short[0]):
            return
        looks = row.looks
        looks[Guide.POINT].append((first + short[0] - 1, [said[0] + shift, first + said[0]]))
        for i in range(1, short[1] - short[0]):
            looks[Guide.FORK].append((first + short[0] + i - 1, [said[0] + shift + i, first + said[0] + i]))
        row.weights[first + short[0] : first + short[1] + 1] = [CHOICE_WEIGHT] * (short[1] - short[0] + 1)
        asking = [at for at in range(asked[0], first - 1) if self._words[row.ids[at]] in ASKING_WORDS]
        asking = sorted({place for at in asking for place in (at, at + 1) if place < first - 1})
        if asking:
            looks[Guide.ASK] += [(at, asking) for at in range(first + short[0] - 1, len(row.ids))]

    def _differ(self, row: Row, starts: tuple[int, int], length: int) -> bool:
        """At the beginning of a quote and behind brackets a word has another token than behind a space."""
        one, other = (row.ids[start : start + length] for start in starts)
        return one != other

    def _guide_words(self, row: Row, asked: tuple[int, int], gold: tuple[int, int, _Passage], rows: range) -> None:
        """Words of the question that stand in the quote's sentence, and the answer's tokens that gather them."""
        begin, num_asked = asked
        start = next((a for a, b in gold[2].sentences if a <= gold[0] < b), gold[0])
        places: dict[str, list[int]] = {}
        for at in range(start, gold[1]):
            places.setdefault(self._words[row.ids[at]], []).append(at)
        matched = []
        for at in range(begin + 1, begin + num_asked - 1):
            word = self._words[row.ids[at]]
            if word in places and word.isalnum() and word not in STOP_WORDS:
                row.looks[Guide.MATCH].append((at, places[word]))
                matched.append(at)
        if matched:
            row.looks[Guide.GATHER] += [(at, matched) for at in rows]


def _ways_on(ids: list[int]) -> dict[tuple[int, ...], set[int]]:
    """For each token and each two in a row, the tokens that follow somewhere in the text."""
    ways: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for at, token in enumerate(ids):
        for size in (1, 2):
            if at >= size:
                ways[tuple(ids[at - size : at])].add(token)
    return ways


def _passages(pack: Pack, offsets: list[tuple[int, int]]) -> Iterator[_Passage]:
    """Each passage's place in the tokens of the context message."""
    char = len(CONTEXT) + 1
    for number, text in enumerate(pack.passages, start=1):
        label = _token_span(offsets, char + 1, char + 1 + len(str(number)))
        start = char + len(f"[{number}] ")
        if label is None:
            raise ValueError(f"passage {number} has no number of its own: {text[:40]!r}")
        sentences, at = [], 0
        for sentence in sentences_of(text):
            at = text.index(sentence, at)
            span = _token_span(offsets, start + at, start + at + len(sentence), inside=True)
            if span is not None:
                sentences.append(span)
            at += len(sentence)
        yield _Passage(text, start, label[0], sentences)
        char = start + len(text) + 1


def _token_span(
    offsets: Sequence[tuple[int, int]], start: int, end: int, inside: bool = False
) -> tuple[int, int] | None:
    """The tokens of characters [start, end); None unless they begin and end there.

    `inside`: the first may bring the character before it, the last may go on.
    """
    first = next((i for i, (a, b) in enumerate(offsets) if b > start), None)
    last = next((i for i in range(len(offsets) - 1, -1, -1) if offsets[i][0] < end), None)
    if first is None or last is None or last < first:
        return None
    begins = offsets[first][0] == start or (inside and offsets[first][0] == start - 1)
    return (first, last + 1) if begins and (inside or offsets[last][1] == end) else None
