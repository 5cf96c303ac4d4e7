"""Packs: one set of passages with many questions about it, so that a step learns from more answers than contexts.

Owns which passages and questions come together; `target_rows` makes tokens of them. Each turn of a pack sees the passages
and itself, never another turn, exactly as a single question is asked later.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ragspec.training.grammar_errors import GrammarErrors
from ragspec.training.reference import generated_questions as generated
from ragspec.training.reference.examples import (
    MAX_QUOTE_WORDS,
    Example,
    ExampleStream,
    Lengths,
    first_doc_sentence,
    first_words,
)
from ragspec.training.reference.sources import Paragraph, Question, Sources
from ragspec.training.reference.text_format import ABSTENTION, Message, message, question_messages, quoted_answer
from ragspec.training.sentences import sentences_of

ABSTAIN_TRIES = 0.25
"""Questions without an answer that are looked for, per question with one, beside one a pack; not every try finds one."""
GENERATED_PER_PASSAGE = 1


@dataclass(frozen=True)
class Turn:
    """A question about a pack's passages. `passage` counts from 1; where they do not say, it is 0 and `quote` empty."""

    request: str
    quote: str = ""
    passage: int = 0
    short_answer: str = ""
    open_ended: bool = False

    @property
    def answer(self) -> str:
        return quoted_answer(self.quote, self.passage, self.short_answer) if self.passage else ABSTENTION


@dataclass(frozen=True)
class Pack:
    passages: list[str]
    turns: list[Turn]


class PackStream(ExampleStream):
    """Draws packs beside the examples that have no passages to share."""

    def __init__(self, sources: Sources, errors: GrammarErrors, lengths: Lengths, seed: int) -> None:
        super().__init__(sources, errors, lengths, seed)
        self.tasks.append((self.follow_up, 0.06))
        self.pack_kinds: list[tuple[Callable[[], Pack | None], float]] = [
            (lambda: self._text_pack(self.rng.choice(sources.squad)), 0.40),
            (lambda: self._text_pack(self.rng.choice(sources.other_questions)), 0.20),
            (lambda: self._text_pack(self.rng.choice(sources.nqg)), 0.14),
            (lambda: self._prose_pack(), 0.06),
            (lambda: self._stdlib_pack(), 0.20),
        ]  # fmt: skip

    def draw_pack(self) -> Pack:
        """The next pack with at least one turn."""
        kinds, shares = [kind for kind, _ in self.pack_kinds], [share for _, share in self.pack_kinds]
        while True:
            pack = self.rng.choices(kinds, shares)[0]()
            if pack is not None and pack.turns:
                return pack

    def question(self) -> Example:
        """One question of a pack, asked alone, about no more passages than a question may have."""
        pack = self.draw_pack()
        turn = self.rng.choice(pack.turns)
        others = [number for number in range(1, len(pack.passages) + 1) if number != turn.passage]
        num_others = self.lengths.max_passages - bool(turn.passage)
        shown = self.rng.sample(others, min(num_others, len(others))) + [turn.passage] * bool(turn.passage)
        self.rng.shuffle(shown)
        turn = replace(turn, passage=shown.index(turn.passage) + 1 if turn.passage else 0)
        messages = question_messages(turn.request, [pack.passages[number - 1] for number in shown])
        return Example([*messages, message("assistant", turn.answer)], open_ended=turn.open_ended)

    def follow_up(self) -> Example | None:
        """Two or three questions in a row about the same passages, which are shown once or again."""
        rng = self.rng
        pack = self._text_pack(rng.choice(self.sources.squad))
        chosen = pack.turns[: rng.choice((2, 2, 3))]
        if len(chosen) < 2:
            return None
        messages: list[Message] = []
        for turn in chosen:
            asked = question_messages(turn.request, pack.passages)
            messages += asked if not messages or rng.random() < 0.4 else asked[:1]
            messages.append(message("assistant", turn.answer))
        return Example(messages)

    def _prose_pack(self) -> Pack | None:
        paragraph = self.rng.choice(self.sources.prose)
        return self._text_pack(Question("", paragraph, self.rng.randrange(len(paragraph.sentences)), ""))

    def _text_pack(self, main: Question) -> Pack:
        rng = self.rng
        shown = [(main.paragraph, self._window(main.paragraph, main.sentence_index)), *self._others(main.paragraph)]
        rng.shuffle(shown)
        passages = [text for _, text in shown]
        asked, turns = set[str](), list[Turn]()
        for number, (paragraph, text) in enumerate(shown, start=1):
            for question in self.sources.by_paragraph.get(id(paragraph), ()):
                quote = question.paragraph.sentences[question.sentence_index]
                if quote in text and is_quotable(quote) and question.text not in asked:
                    asked.add(question.text)
                    open_ended = paragraph.group.startswith("nqg/")
                    turns.append(Turn(question.text, quote, number, question.short_answer, open_ended))
            turns += self._generated(text, number, passages)
        rng.shuffle(turns)
        turns[:0] = [turn for turn in turns if turn.request == main.text]
        absent = list(self._absent([paragraph for paragraph, _ in shown], passages, len(turns)))
        for turn in absent:
            turns.insert(rng.randint(0, len(turns)), turn)
        return Pack(passages, list(dict.fromkeys(turns)))

    def _others(self, paragraph: Paragraph) -> Iterator[tuple[Paragraph, str]]:
        """Other passages, most of them from the same article; those that have questions show the sentence of one."""
        rng, near = self.rng, self.sources.by_group.get(paragraph.group, [])
        for _ in range(rng.randrange(self.lengths.max_passages)):
            other = rng.choice(near if near and rng.random() < 0.7 else self.sources.prose)
            if other is not paragraph:
                known = self.sources.by_paragraph.get(id(other))
                index = rng.choice(known).sentence_index if known else rng.randrange(len(other.sentences))
                yield other, self._window(other, index)

    def _generated(self, text: str, number: int, passages: list[str]) -> Iterator[Turn]:
        rng, sentences = self.rng, [s for s in sentences_of(text) if is_quotable(s)]
        for _ in range(GENERATED_PER_PASSAGE if sentences else 0):
            sentence, way = rng.choice(sentences), rng.random()
            if way < 0.45:
                made = generated.question_about(sentence, rng)
                is_clear = made and sum(p.count(made.key) for p in passages) == sentence.count(made.key)
            else:
                made = (generated.question_for_subject if way < 0.6 else generated.question_for_span)(sentence, rng)
                is_clear = made is not None
            if made is not None and is_clear:
                yield Turn(made.text, sentence, number, made.short_answer)

    def _absent(self, paragraphs: list[Paragraph], passages: list[str], num_turns: int) -> Iterator[Turn]:
        """Questions whose answer is in none of the passages: written for it, or asked about another paragraph."""
        rng = self.rng
        for _ in range(1 + int(ABSTAIN_TRIES * num_turns)):
            paragraph = rng.choice(paragraphs)
            unanswerable = self.sources.unanswerable_by_paragraph.get(id(paragraph))
            if unanswerable and rng.random() < 0.6:
                yield Turn(rng.choice(unanswerable))
            elif rng.random() < 0.4:
                other = rng.choice(self.sources.squad)
                if other.paragraph not in paragraphs and not any(other.short_answer in text for text in passages):
                    yield Turn(other.text)

    def _stdlib_pack(self) -> Pack | None:
        """Questions about standard-library names; the answer is the first sentence of the documentation."""
        rng, documents = self.rng, self.sources.stdlib
        index = rng.randrange(len(documents))
        low, high = max(0, index - 12), min(len(documents), index + 13)
        count = rng.randint(1, self.lengths.max_passages + 1)
        chosen = {index} | {
            rng.randrange(low, high) if rng.random() < 0.75 else rng.randrange(len(documents)) for _ in range(count)
        }
        passages, turns = list[str](), list[Turn]()
        for at in rng.sample(sorted(chosen), len(chosen)):
            name, text = documents[at]
            quote = first_doc_sentence(name, text)
            if 2 <= len(quote.split()) <= MAX_QUOTE_WORDS:
                passage = first_words(
                    text, max(rng.randint(*self.lengths.passage_words), len((name + quote).split()) + 15)
                )
                if quote in passage:
                    passages.append(passage)
                    turns += [Turn(self._asked(name), quote, len(passages)) for _ in range(2)]
        absent, _ = documents[rng.randrange(low, high)]
        if passages and not any(absent.rsplit(".", 1)[-1] in passage for passage in passages):
            turns.append(Turn(self._asked(absent)))
        rng.shuffle(turns)
        return Pack(passages, turns) if passages else None

    def _asked(self, name: str) -> str:
        shown = name if self.rng.random() < 0.8 else name.split(".", 1)[-1]
        return self.rng.choice(generated.STDLIB_TEMPLATES).format(shown + "()" if self.rng.random() < 0.1 else shown)


def is_quotable(sentence: str) -> bool:
    """Short enough, and not inside quotation marks of its own."""
    return 2 < len(sentence.split()) <= MAX_QUOTE_WORDS and '"' not in sentence
