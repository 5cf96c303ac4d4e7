"""Questions made from a sentence alone, without an annotator.

Owns the patterns. They are not good English, but they need what a real question needs: finding the sentence that
shares the rare words, and the span whose kind fits the question word.
"""

import random
import re
from typing import NamedTuple

from ragspec.training.sentences import words_of

STOP_WORDS = frozenset(
    "the a an of in on at and or to for is are was were be been by with that this it as from their its which who has "
    "have had not but also more than such these those they he she his her we our you your can may will would some many most "
    "other into when where what how there after before about between through during while because if so then no all "
    "one two".split()
)
ABOUT_TEMPLATES = (
    "What is said about {}?", "Which sentence mentions {}?", "What does the text say about {}?",
    "What do the passages say about {}?", "Tell me about {}.", "What about {}?", "Find the sentence about {}.",
    "Quote what is said about {}.", "{}?",
)  # fmt: skip
STDLIB_TEMPLATES = (
    "What does {} do?", "What is {}?", "Explain {}.", "How do I use {}?", "What is {} for?", "Describe {}.",
    "Tell me about {}.", "What does the documentation say about {}?", "When would I use {}?", "{}?",
    "What does the function {} do?", "what is {} used for", "Can you explain what {} does?", "How does {} work?",
    "What happens when I call {}?", "Purpose of {}",
)  # fmt: skip
_YEAR = re.compile(r"\b(?:1\d{3}|20[0-2]\d)\b")
_NUMBER = re.compile(
    r"\b\d[\d,.]*\d(?: (?:percent|million|billion|thousand))?|\b(?:two|three|four|five|six|seven|eight|nine|ten)\b"
)
_NAME = re.compile(r"(?<=[a-z,] )(?:the )?[A-Z][\w’'-]+(?: (?:of|the|and) (?=[A-Z])| [A-Z][\w’'-]+)*")


class GeneratedQuestion(NamedTuple):
    """Text, the words it took from the sentence and, where one was cut out of it, the short answer."""

    text: str
    key: str
    short_answer: str = ""


def question_about(sentence: str, rng: random.Random) -> GeneratedQuestion | None:
    """A question that names one to three content words of the sentence."""
    words = words_of(sentence)
    content = [i for i, word in enumerate(words) if len(word) > 3 and word.lower() not in STOP_WORDS]
    if not content:
        return None
    index = rng.choice(content)
    length = rng.choice((1, 1, 2, 2, 3))
    chosen = words[index : index + length]
    while chosen[-1].lower() in STOP_WORDS:
        chosen.pop()
    key = " ".join(chosen)
    if len(content) > 2 and rng.random() < 0.25:
        key = " and ".join(words[i] for i in sorted(rng.sample(content, 2)))
    return GeneratedQuestion(rng.choice(ABOUT_TEMPLATES).format(key), key)


def question_for_span(sentence: str, rng: random.Random) -> GeneratedQuestion | None:
    """A question word that fits a span cut out of the sentence, and some of the sentence's other words."""
    candidates = [(kind, m) for kind, pattern in _KINDS for m in pattern.finditer(sentence)]
    candidates = [(kind, m) for kind, m in candidates if len(m[0].split()) <= 6]
    if not candidates:
        return None
    kind, span = rng.choice(candidates)
    answer = span[0].rstrip(",.")
    before, after = words_of(sentence[: span.start()]), words_of(sentence[span.end() :])
    keep = rng.uniform(0.45, 0.95)
    kept = [
        w
        for w in before[-10:] + after[:10]
        if w not in answer and rng.random() < (keep if w.lower() in STOP_WORDS else keep + 0.1)
    ]
    if sum(word.lower() not in STOP_WORDS for word in kept) < 2:
        return None
    if kept[0] in before[:1] and kept[0].lower() in STOP_WORDS:
        kept[0] = kept[0].lower()
    return GeneratedQuestion(f"{rng.choice(_QUESTION_WORDS[kind])} {' '.join(kept)}?", " ".join(kept), answer)


_KINDS = (("year", _YEAR), ("number", _NUMBER), ("name", _NAME))
_QUESTION_WORDS = {
    "year": ("When did", "When was", "In what year did", "In which year was", "What year did", "When were"),
    "number": ("How many", "How much", "What number of", "How many", "What amount of"),
    "name": ("Who", "What", "Which", "Where did", "What is", "Who was", "What was", "In what place did", "Whom did"),
}


def question_for_subject(sentence: str, rng: random.Random) -> GeneratedQuestion | None:
    """ "X was born in Y." becomes "Who was born in Y?" with the answer X."""
    match = re.match(
        r"((?:The |An? )?(?:[A-Z][\w’'-]+ ){1,4})((?:was|were|is|are|became|had|has|\w+ed) .{15,110}?)[,.;]", sentence
    )
    if match is None or match[1].strip() in ("It", "This", "He", "She", "They", "There", "In", "These", "That"):
        return None
    return GeneratedQuestion(f"{rng.choice(('Who', 'What', 'What', 'Which'))} {match[2]}?", match[2], match[1].strip())
