"""Sentences of training texts, and the one that answers. Every sentence is a substring of its paragraph.

>>> split_sentences("Dr. Fox ran. It rained.")
['Dr. Fox ran.', 'It rained.']
"""

import random
import re
from collections import Counter

_BOUNDARY = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z\"'(\[0-9`])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Col|Lt|Sgt|Rev|vs|etc|e\.g|i\.e|cf|al|No|Vol|Fig|Inc|Ltd|Co|ca|c|v"
    r"|Jan|Feb|Mar|Apr|Aug|Sept|Sep|Oct|Nov|Dec))\.$"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph, stripped; initials and common abbreviations do not end one."""
    sentences, start = [], 0
    for boundary in _BOUNDARY.finditer(text):
        end = boundary.end()
        candidate = text[start:end].strip()
        if candidate and not _ABBREVIATION.search(candidate):
            sentences.append(candidate)
            start = end
    rest = text[start:].strip()
    return [*sentences, rest] if rest else sentences


def normalise(text: str) -> str:
    """One line, single spaces."""
    return re.sub(r"\s+", " ", text).strip()


def window_around(sentences: list[str], index: int, max_words: int, rng: random.Random) -> str:
    """Consecutive whole sentences around sentence `index`, extended at random ends up to `max_words` words."""
    first = last = index
    num_words = len(sentences[index].split())
    while True:
        choices = [i for i in (first - 1, last + 1) if 0 <= i < len(sentences)]
        choices = [i for i in choices if num_words + len(sentences[i].split()) <= max_words]
        if not choices:
            return " ".join(sentences[first : last + 1])
        chosen = rng.choice(choices)
        num_words += len(sentences[chosen].split())
        first, last = min(first, chosen), max(last, chosen)


def words_of(text: str) -> list[str]:
    """Words without the punctuation around them, as written."""
    return [word for word in (raw.strip(".,;:!?()[]\"'`*_—–-") for raw in text.split()) if word]


def best_sentence(question: str, answer: str, sentences: list[str]) -> int | None:
    """The sentence that holds the answer, preferring the one that shares most words with the question."""
    asked = set(re.findall(r"\w+", question.lower()))
    holding = [i for i, sentence in enumerate(sentences) if answer in sentence]
    if not holding:
        return None
    return max(holding, key=lambda i: (len(asked & set(re.findall(r"\w+", sentences[i].lower()))), -i))


def common_answer(answers: list[str]) -> str:
    """The answer most annotators gave; among equals the shortest."""
    counts = Counter(answers)
    return max(counts, key=lambda a: (counts[a], -len(a)))
