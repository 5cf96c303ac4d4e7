"""Packs: one set of numbered passages with many questions about it, so that many answers share one reading.

Owns the choice of passages, distractors and questions. A draw is a function of the paragraphs and the generator it is given.

    >>> pack = PackStream(paragraphs).draw(random.Random(0)); pack.passages, pack.turns
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from ragspec.rag.wording import ABSTENTION, quoted_answer
from ragspec.training.documentation import Neighbours
from ragspec.training.reference.sources import Paragraph, Question
from ragspec.training.sentences import split_sentences, window_around, words_of

ABSENT_SHARE = 0.5
"""Questions without an answer, of a pack's questions."""
RETRIEVED_SHARE, FOREIGN_SHARE = 0.4, 0.15
"""Packs whose distractors a search finds, the others being of the same article; distractors from anywhere."""
WINDOW_SHARE, TITLE_SHARE = 0.6, 0.1
"""Passages cut to a window of sentences, and passages under their title."""
WINDOW_WORDS, MAX_PASSAGE_WORDS, MAX_PACK_WORDS = (50, 110), 200, 300
NUM_OTHERS = (0, 1, 2, 2, 2, 2, 3, 3, 4)
MAX_WEIGHT = 5
"""A paragraph is drawn in proportion to its questions, up to this many."""


class Pack(NamedTuple):
    """Passages, and (question, answer) pairs about them."""

    passages: list[str]
    turns: list[tuple[str, str]]


class PackStream:
    """Draws packs from paragraphs with questions."""

    def __init__(self, paragraphs: list[Paragraph]) -> None:
        self.paragraphs = paragraphs
        weights = [len(p.questions[:MAX_WEIGHT]) + 0.3 * bool(p.absent) for p in paragraphs]
        self._weights = list(itertools.accumulate(weights))
        self._groups: dict[str, list[Paragraph]] = {}
        for paragraph in paragraphs:
            self._groups.setdefault(paragraph.group, []).append(paragraph)
        self._neighbours = Neighbours([p.text for p in paragraphs])

    def draw(self, rng: random.Random) -> Pack:
        """A pack with at least one turn."""
        while True:
            main = rng.choices(self.paragraphs, cum_weights=self._weights)[0]
            shown = self._shown(main, rng)
            turns = [*_answered(shown), *self._unanswered(shown, rng)]
            if turns:
                rng.shuffle(turns)
                return Pack([text for _, text in shown], turns)

    def _shown(self, main: Paragraph, rng: random.Random) -> list[tuple[Paragraph, str]]:
        """The paragraph and its distractors, each with the passage that is shown of it, in random order."""
        count, group = rng.choice(NUM_OTHERS), self._groups[main.group]
        if main.questions and rng.random() < RETRIEVED_SHARE:
            rows = self._neighbours.nearest(rng.choice(main.questions).text, count + 1)
            near = [self.paragraphs[row] for row in rows]
        else:
            near = rng.sample(group, min(count, len(group)))
        others = [other if rng.random() > FOREIGN_SHARE else rng.choice(self.paragraphs) for other in near]
        chosen = {id(each): each for each in (main, *others)}
        shown, num_words = list[tuple[Paragraph, str]](), 0
        for paragraph in list(chosen.values())[: count + 1]:
            text = _passage(paragraph, rng)
            num_words += len(text.split())
            if num_words <= MAX_PACK_WORDS or not shown:
                shown.append((paragraph, text))
        rng.shuffle(shown)
        return shown

    def _unanswered(self, shown: list[tuple[Paragraph, str]], rng: random.Random) -> Iterator[tuple[str, str]]:
        """Questions that were written to have no answer, and questions whose passage retrieval missed."""
        num_answered = len(list(_answered(shown)))
        count = max(1, round(num_answered * ABSENT_SHARE / (1 - ABSENT_SHARE)))
        everything = " ".join(text for _, text in shown).lower()
        written = [text for paragraph, _ in shown for text in paragraph.absent]
        missed = [q for paragraph, text in shown for q in paragraph.questions if q.quote not in text]
        for paragraph, _ in shown:
            missed += rng.choice(self._groups[paragraph.group]).questions[:1]
        missed = [q for q in missed if not _may_answer(q, everything)]
        chosen = rng.sample(written, min(len(written), count - count // 3))
        chosen += [q.text for q in rng.sample(missed, min(len(missed), 1 + count // 3))]
        yield from ((text, ABSTENTION) for text in dict.fromkeys(chosen))


def _answered(shown: list[tuple[Paragraph, str]]) -> Iterator[tuple[str, str]]:
    for number, (paragraph, text) in enumerate(shown, start=1):
        for question in paragraph.questions:
            if question.quote in text:
                yield question.text, quoted_answer(question.quote, number, question.short_answer)


def _may_answer(question: Question, text: str) -> bool:
    """Whether a lower-case text may hold the answer: it has the short answer, or the question's names and rare words."""
    if question.short_answer:
        return question.short_answer.lower() in text
    words = [word.lower().rsplit(".", 1)[-1] for word in words_of(question.text) if len(word) > 4]
    return question.quote.lower() in text or all(word in text for word in words[1:])


def _passage(paragraph: Paragraph, rng: random.Random) -> str:
    """Some sentences around one that is asked about, or all; sometimes under its title."""
    text, limit = paragraph.text, rng.randint(*WINDOW_WORDS) if rng.random() < WINDOW_SHARE else MAX_PASSAGE_WORDS
    if not paragraph.is_whole and len(text.split()) > limit:
        sentences = split_sentences(text)
        quotes = [q.quote for q in paragraph.questions if q.quote in sentences]
        index = sentences.index(rng.choice(quotes)) if quotes else rng.randrange(len(sentences))
        text = window_around(sentences, index, limit, rng)
    return f"{paragraph.title}\n{text}" if paragraph.title and rng.random() < TITLE_SHARE else text
