"""Synthetic grammar and spelling errors for correct sentences.

Word confusions and their counts come from learners' texts (Awasthi et al. 2019, PIE, arXiv 1910.02893: `common_replaces`,
`verbs`); other errors concern articles, prepositions, number, spelling, capitals and punctuation.

    >>> GrammarErrors(data_dir).corrupt("The cats sit on the mat.", random.Random(0))
"""

import difflib
import json
import random
import re
from pathlib import Path

ARTICLES = ("a", "an", "the")
PREPOSITIONS = ("in", "on", "at", "of", "for", "to", "with", "from", "by", "about", "into")
FILLERS = ("the", "a", "to", "of", "is", "in", "that", "and")
MIN_COUNT = 3
MEAN_ERRORS_PER_10_WORDS = 1.2
MISSPELT, MISSPELT_TWICE = 0.45, 0.15
"""Share of errors on words of more than three letters that are misspellings; and share of these with a second misspelling."""
TOKENISED_SHARE = 0.3
"""Share of sentences in Penn-Treebank-like spacing ("word , word ."), as many corpora have them."""


class GrammarErrors:
    """Adds errors to sentences."""

    def __init__(self, data_dir: Path) -> None:
        self.verbs: dict[str, list[str]] = json.loads((data_dir / "pie_errorify/verbs.json").read_text())
        replaces = json.loads((data_dir / "pie_errorify/common_replaces.json").read_text())
        self.confusions = {word: _plausible(word, wrong) for word, wrong in replaces.items()}

    def corrupt(self, sentence: str, rng: random.Random) -> str:
        """The sentence with about one error in eight words, and at least one error."""
        words = sentence.split(" ")
        num_errors = max(1, round(rng.gauss(1, 0.6) * len(words) * MEAN_ERRORS_PER_10_WORDS / 10))
        for _ in range(num_errors):
            self._add_error(words, rng)
        text = " ".join(words)
        if rng.random() < 0.08:
            text = text[:1].lower() + text[1:]
        if rng.random() < 0.08:
            text = text.rstrip(".!?").rstrip()
        return text

    def _add_error(self, words: list[str], rng: random.Random) -> None:
        index = rng.randrange(len(words))
        before, core, after = _split_word(words[index])
        lower, roll = core.lower(), rng.random()
        if rng.random() < MISSPELT and len(core) > 3 and core.isalpha():
            word = misspell(core, rng) if rng.random() < MISSPELT_TWICE else core
            words[index] = before + misspell(word, rng) + after
        elif lower in ARTICLES and roll < 0.8:
            is_left_out = roll < 0.45 and len(words) > 3
            words[index : index + 1] = [] if is_left_out else [before + _other(ARTICLES, lower, rng) + after]
        elif lower in PREPOSITIONS and roll < 0.5:
            words[index] = before + _other(PREPOSITIONS, lower, rng) + after
        elif (confusion := self.confusions.get(core)) and roll < 0.75:
            words[index] = before + rng.choices(*confusion)[0] + after
        elif self.verbs.get(lower) and roll < 0.7:
            words[index] = before + _same_case(rng.choice(self.verbs[lower]), core) + after
        elif core:
            words[index : index + 1] = self._generic_error(before, core, after, rng)

    def _generic_error(self, before: str, core: str, after: str, rng: random.Random) -> list[str]:
        roll = rng.random()
        if roll < 0.45 and core.isalpha():
            return [before + (core[:-1] if core.endswith("s") else core + "s") + after]
        if roll < 0.6 and after == ",":
            return [before + core]
        if roll < 0.9:
            return [before + core + after, rng.choice(FILLERS)] if not after else [before + core + after]
        return [before + core.lower() + after]


def misspell(word: str, rng: random.Random) -> str:
    """One letter swapped, dropped, doubled or replaced, never the first."""
    i = rng.randrange(1, len(word) - 1)
    roll = rng.random()
    if roll < 0.35:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if roll < 0.65:
        return word[:i] + word[i + 1 :]
    if roll < 0.8:
        return word[:i] + word[i] + word[i:]
    return word[:i] + rng.choice("aeiouaeioulrnst") + word[i + 1 :]


def tokenised(text: str) -> str:
    """Penn-Treebank-like spacing, as in corpora of learners' sentences: "word , word ."."""
    text = re.sub(r"([,;:!?()\"])", r" \1 ", text)
    text = re.sub(r"(\.)(\s*)$", r" \1", text)
    text = re.sub(r"(?i)n't\b", " n't", text)
    text = re.sub(r"(?i)'(s|re|ve|ll|d|m)\b", r" '\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _plausible(word: str, wrong: dict[str, int]) -> tuple[list[str], list[int]] | None:
    """The confusions that are frequent and look like the word; others come from misaligned edits."""
    kept = {
        other: count
        for other, count in wrong.items()
        if re.fullmatch(r"[A-Za-z'\- ]+", other)
        and count >= MIN_COUNT
        and difflib.SequenceMatcher(None, word.lower(), other.lower()).ratio() > (0.45 if len(word) > 3 else 0.3)
    }
    return (list(kept), list(kept.values())) if kept else None


def _split_word(word: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"([^A-Za-z]*)(.*?)([^A-Za-z]*)", word)
    assert match is not None
    return match[1], match[2], match[3]


def _same_case(word: str, like: str) -> str:
    return word[:1].upper() + word[1:] if like[:1].isupper() else word


def _other(choices: tuple[str, ...], current: str, rng: random.Random) -> str:
    return rng.choice([c for c in choices if c != current])
