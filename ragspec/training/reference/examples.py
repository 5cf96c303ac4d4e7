"""Training texts for the reference target that share no passages, one at a time, from a seeded generator.

Owns corrections, prose and conversations (questions about passages: `target_packs`); the texts come from `Sources`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from ragspec.training.grammar_errors import TOKENISED_SHARE, GrammarErrors, tokenised
from ragspec.training.reference.sources import Paragraph, Sources
from ragspec.training.reference.text_format import Message, grammar_messages, message, question_messages, quoted_answer
from ragspec.training.sentences import split_sentences, window_around
from ragspec.training.stdlib_corpus import unwrap

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
            (self.grammar, 0.72), (self.prose, 0.12), (self.conversation, 0.06), (self.dialogue, 0.04),
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

    def conversation(self) -> Example | None:
        """Two or three questions in a row about one page, which is shown once."""
        rng, turns = self.rng, self.rng.choice(self.sources.conversations)
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


def first_doc_sentence(name: str, text: str) -> str:
    """The first sentence of a standard-library document, without the name and the signature before it."""
    doc = text[len(name) :]
    _, _, doc = doc[_end_of_parentheses(doc) :].partition(": ")
    sentences = split_sentences(unwrap(doc).split("\n")[0])
    return sentences[0] if sentences else ""


def _end_of_parentheses(text: str) -> int:
    """Where those close that the text begins with; 0 if it begins otherwise. Quoted ones do not count.

    A signature that was shortened may end within quotes: then where it is followed by the documentation.
    """
    depth, quote = 0, ""
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[at - 1] != "\\" else quote
        elif char in "'\"" and depth:
            quote = char
        else:
            depth += (char == "(") - (char == ")")
        if depth == 0:
            return at + 1 if char == ")" else 0
    return text.find("): ") + 1


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
