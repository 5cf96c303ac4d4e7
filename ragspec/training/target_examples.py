"""Training texts for the reference target that share no passages, one at a time, from a seeded generator.

Owns corrections, prose, dialogues and follow-up questions (single questions: `target_packs`); the texts come from `Sources`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from ragspec.training.grammar_errors import TOKENISED_SHARE, GrammarErrors, tokenised
from ragspec.training.sentences import split_sentences, window_around
from ragspec.training.stdlib_corpus import unwrap
from ragspec.training.target_format import Message, grammar_messages, message, question_messages, quoted_answer
from ragspec.training.target_sources import Paragraph, Question, Sources

MAX_QUOTE_WORDS = 60
CLEAN_SHARE = 0.25
TITLE_SHARE = 0.12


@dataclass(frozen=True)
class Example:
    """A conversation to learn, or plain text. `open_ended`: the answer may go on, so its end is not learnt."""

    messages: list[Message]
    text: str = ""
    open_ended: bool = False


@dataclass(frozen=True)
class Lengths:
    """How much context one example carries."""

    max_passages: int
    passage_words: tuple[int, int]
    prose_words: int


class ExampleStream:
    """Draws examples; equal seeds and sources give equal streams."""

    def __init__(self, sources: Sources, errors: GrammarErrors, lengths: Lengths, seed: int) -> None:
        self.sources, self.errors, self.lengths = sources, errors, lengths
        self.rng = random.Random(seed)
        self.tasks: list[tuple[Callable[[], Example | None], float]] = [
            (self.grammar, 0.72), (self.prose, 0.12), (self.follow_up, 0.12), (self.dialogue, 0.04),
        ]  # fmt: skip

    def draw(self) -> Example:
        """The next example of the mixture."""
        tasks, shares = [task for task, _ in self.tasks], [share for _, share in self.tasks]
        while True:
            example = self.rng.choices(tasks, shares)[0]()
            if example is not None:
                return example

    def grammar(self) -> Example:
        rng = self.rng
        sentence = rng.choice(self.sources.plain_sentences)
        shown = sentence if rng.random() < CLEAN_SHARE else self.errors.corrupt(sentence, rng)
        if rng.random() < TOKENISED_SHARE:
            sentence, shown = tokenised(sentence), tokenised(shown)
        return Example([*grammar_messages(shown), message("assistant", sentence)])

    def follow_up(self) -> Example | None:
        """Two or three questions in a row, about one page or one paragraph; its passages are shown once or again."""
        rng = self.rng
        if rng.random() < 0.5:
            return self._conversation_turns(rng.choice(self.sources.conversations))
        first = rng.choice(self.sources.squad)
        same = [q for q in self.sources.by_paragraph[id(first.paragraph)] if q is not first]
        if not same:
            return None
        messages = self._turn(first, None)
        shown = messages[1]["content"] if messages else ""
        for question in rng.sample(same, min(len(same), rng.choice((1, 1, 2)))):
            turn = self._turn(question, shown if rng.random() < 0.6 else None)
            messages += turn
        return Example(messages) if messages else None

    def dialogue(self) -> Example:
        turns = self.rng.choice(self.sources.dialogues)
        start = self.rng.randrange(0, max(1, len(turns) - 4), 2)
        roles = {"USER": "user", "SYSTEM": "assistant"}
        chosen = turns[start : start + 2 * self.rng.randint(1, 2)]
        return Example([message(roles[speaker], text) for speaker, text in chosen])

    def prose(self) -> Example:
        rng = self.rng
        text = (
            rng.choice(self.sources.book_paragraphs)
            if rng.random() < 0.5
            else " ".join(rng.choice(self.sources.prose).sentences)
        )
        return Example([], text=" ".join(text.split()[: self.lengths.prose_words]))

    def _turn(self, question: Question, shown: str | None) -> list[Message]:
        """Question, passages and answer; with `shown`, the passages of an earlier turn are not repeated."""
        quote = question.paragraph.sentences[question.sentence_index]
        if len(quote.split()) > MAX_QUOTE_WORDS or '"' in quote[:1]:
            return []
        if shown is not None:
            number = next((n for n, p in enumerate(shown.split("\n["), start=1) if quote in p), None)
            if number is None:
                return []
            answer = quoted_answer(quote, number, question.short_answer)
            return [message("user", question.text), message("assistant", answer)]
        passages = [self._window(question.paragraph, question.sentence_index), *self._distractors(question.paragraph)]
        order = list(range(len(passages)))
        self.rng.shuffle(order)
        answer = quoted_answer(quote, order.index(0) + 1, question.short_answer)
        asked = question_messages(question.text, [passages[i] for i in order])
        return [*asked, message("assistant", answer)]

    def _conversation_turns(self, turns: list[tuple[str, str]]) -> Example | None:
        rng = self.rng
        start = rng.randrange(len(turns) - 1)
        chosen = [(q, a) for q, a in turns[start : start + 3] if a != "CANNOTANSWER" and 3 < len(a.split()) < 50]
        if len(chosen) < 2:
            return None
        answers = [a for _, a in chosen]
        passages = [" ".join(answers)] + [
            self._window(rng.choice(self.sources.prose), 0) for _ in range(rng.randrange(2))
        ]
        rng.shuffle(passages)
        number = next(n for n, p in enumerate(passages, start=1) if answers[0] in p)
        messages = question_messages(chosen[0][0], passages)
        for turn, (question, quote) in enumerate(chosen):
            messages += [message("user", question)] if turn else []
            messages.append(message("assistant", quoted_answer(quote, number)))
        return Example(messages, open_ended=True)

    def _window(self, paragraph: Paragraph, index: int) -> str:
        text = window_around(paragraph.sentences, index, self.rng.randint(*self.lengths.passage_words), self.rng)
        return f"{paragraph.title}\n{text}" if paragraph.title and self.rng.random() < TITLE_SHARE else text

    def _distractors(self, paragraph: Paragraph) -> list[str]:
        """Other passages, most of them from the same article."""
        rng, near = self.rng, self.sources.by_group.get(paragraph.group, [])
        count = rng.randrange(self.lengths.max_passages)
        chosen = [rng.choice(near if near and rng.random() < 0.7 else self.sources.prose) for _ in range(count)]
        return [self._window(p, rng.randrange(len(p.sentences))) for p in chosen if p is not paragraph]


def first_doc_sentence(name: str, text: str) -> str:
    """The first sentence of a standard-library document, without the name and the signature before it."""
    doc = text[len(name) :]
    doc = doc.split(": ", 1)[1] if doc.startswith(": ") else doc[doc.find("): ") + 3 :]
    sentences = split_sentences(unwrap(doc).split("\n")[0])
    return sentences[0] if sentences else ""


def first_words(text: str, max_words: int) -> str:
    """The beginning of a document, cut after a whole sentence or line where one ends near."""
    kept, num_words = [], 0
    for piece in text.split("\n"):
        words = piece.split(" ")
        if num_words + len(words) > max_words:
            kept.append(" ".join(words[: max_words - num_words]))
            break
        kept.append(piece)
        num_words += len(words)
    return "\n".join(kept).rstrip()
