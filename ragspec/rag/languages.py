"""The language of a text, guessed from its script and its most common words.

>>> guess_language("Wie ändere ich den Port und wo steht er?").name
'German'
"""

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

from ragspec.retrieval.search.analysis import COMMON_WORDS

ENGLISH = "en"
_CODES = dict(zip(COMMON_WORDS, "en de fr es it pt nl sv da no fi hu ro tr".split(), strict=True))
_SCRIPTS = {
    "CYRILLIC": ("ru", "Russian"),
    "GREEK": ("el", "Greek"),
    "ARABIC": ("ar", "Arabic"),
    "CJK": ("zh", "Chinese"),
    "HIRAGANA": ("ja", "Japanese"),
    "KATAKANA": ("ja", "Japanese"),
    "HANGUL": ("ko", "Korean"),
}
_WORDS = {language: frozenset(words.split()) for language, words in COMMON_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MAX_CHARS = 20_000
_MIN_WORDS, _LEAST_LEAD = 4, 2
"""Of a text in another language: words, and common words beyond twice those of English."""


class GuessedLanguage(NamedTuple):
    """`code`: two letters, or "unknown". `confidence` is in [0, 1]."""

    code: str
    name: str
    confidence: float


def guess_language(text: str) -> GuessedLanguage:
    """English also for texts too short to tell."""
    text = text[:_MAX_CHARS]
    if (script := _script(text)) != "LATIN":
        return GuessedLanguage(*_SCRIPTS.get(script, ("unknown", "another language")), 0.9)
    words = [word.casefold() for word in _WORD.findall(text)]
    counts = Counter({language: sum(word in common for word in words) for language, common in _WORDS.items()})
    (best, most), english = counts.most_common(1)[0], counts["english"]
    if best == "english" or most < 2 * english + _LEAST_LEAD or len(words) < _MIN_WORDS:
        share = english / max(1, counts.total())
        return GuessedLanguage(ENGLISH, "English", round(0.5 + share / 2, 3))
    return GuessedLanguage(_CODES[best], best.capitalize(), round(most / counts.total(), 3))


def _script(text: str) -> str:
    """The script of most letters; LATIN if there is none."""
    letters = [char for char in text if char.isalpha()][:400]
    scripts = Counter(unicodedata.name(char, "?").split()[0] for char in letters)
    script, count = scripts.most_common(1)[0] if scripts else ("LATIN", 0)
    if 2 * count <= len(letters):
        return "LATIN"
    return "HIRAGANA" if script == "CJK" and scripts["HIRAGANA"] + scripts["KATAKANA"] else script
