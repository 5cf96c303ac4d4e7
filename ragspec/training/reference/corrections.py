"""Wrong and right sentences. Never JFLEG.

Right sentences come from textbooks, books, dialogues and questions, their errors from `GrammarErrors` and lists of misspellings.
Real pairs come from `gec_more`.

    >>> wrong, right = Corrections(data_dir, paragraphs).draw(random.Random(0))
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from ragspec.training.grammar_errors import TOKENISED_SHARE, GrammarErrors, tokenised
from ragspec.training.reference.sources import Paragraph, json_lines
from ragspec.training.sentences import normalise, split_sentences

CLEAN_SHARE, PAIRS_SHARE, MISSPELT_SHARE = 0.36, 0.3, 0.3
"""Sentences to leave as they are; real pairs; sentences with a misspelling of the lists beside other errors."""
NUM_BOOKS = 40
REPEATS = {"eracond_pairs": 3, "harper_pairs": 1, "blimp_pairs": 1, "zorro_pairs": 1}
"""How often a pair of each file stands in the list."""
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;:'’\"()\-]+[.!?]")


class Corrections:
    """Draws (wrong, right) pairs. Raises: OSError."""

    def __init__(self, data_dir: Path, paragraphs: list[Paragraph]) -> None:
        self._errors = GrammarErrors(data_dir)
        self._right = [
            text.replace("’", "'")
            for text in _sentences(data_dir, paragraphs)
            if 4 <= len(text.split()) <= 35 and _PLAIN.fullmatch(text)
        ]
        self._pairs = [
            (row["source"], row["target"])
            for name, times in REPEATS.items()
            for row in json_lines(data_dir / f"gec_more/{name}.jsonl")
            for _ in range(times)
        ]
        self._misspelt: dict[str, list[str]] = {}
        for row in json_lines(data_dir / "gec_more/misspellings.jsonl"):
            if row["target"].isalpha() and row["target"].islower():
                self._misspelt.setdefault(row["target"], []).append(row["source"])

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """A sentence, wrong or not, and its correction."""
        if rng.random() < PAIRS_SHARE:
            wrong, right = rng.choice(self._pairs)
            return (right, right) if rng.random() < CLEAN_SHARE / 2 else (wrong, right)
        right = rng.choice(self._right)
        wrong = right if rng.random() < CLEAN_SHARE else self._wrong(right, rng)
        return (tokenised(wrong), tokenised(right)) if rng.random() < TOKENISED_SHARE else (wrong, right)

    def _wrong(self, right: str, rng: random.Random) -> str:
        words = self._errors.corrupt(right, rng).split(" ")
        known = [number for number, word in enumerate(words) if word in self._misspelt]
        if known and rng.random() < MISSPELT_SHARE:
            number = rng.choice(known)
            words[number] = rng.choice(self._misspelt[words[number]])
        return " ".join(words)


def _sentences(data_dir: Path, paragraphs: list[Paragraph]) -> Iterator[str]:
    """Every kind about as often as a writer meets it."""
    for path in sorted((data_dir / "openstax").glob("*.jsonl")):
        for row in json_lines(path):
            for text in row["text"].split("\n")[::4]:
                yield from split_sentences(normalise(text))
    for number, row in zip(range(NUM_BOOKS), json_lines(data_dir / "books/classic_books.jsonl"), strict=False):
        for text in re.split(r"\n\s*\n", row["text"][2_000:100_000])[number % 3 :: 3]:
            yield from split_sentences(normalise(text.replace("_", "")))
    for row in list(json_lines(data_dir / "sgd/train.jsonl"))[::12]:
        yield from (normalise(text) for _, text in row["turns"] if len(text) > 40)
    yield from (question.text for paragraph in paragraphs for question in paragraph.questions[:1])
