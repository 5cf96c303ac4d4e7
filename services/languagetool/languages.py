"""The corrected languages, and detection of a text's language.

Only English is corrected. Detection compares a text's script and its most common words, so that a request with "auto" gets an
error for other languages instead of random corrections.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import NamedTuple

LANGUAGES = {
    "en": "English",
    "en-US": "English (US)",
    "en-GB": "English (GB)",
    "en-AU": "English (Australian)",
    "en-CA": "English (Canada)",
    "en-NZ": "English (New Zealand)",
    "en-ZA": "English (South African)",
}
DEFAULT = "en-US"
AUTO = "auto"

_COMMON = {
    "en": "the of and to in is that it was for on are with as he his they at be this have from or had by not but "
    "what were we when your can said there an which she do how their if will up about out many then them "
    "these so some her would him has you my",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus "
    "er hat dass sie nach wird bei einer um am sind noch wie einem über einen ich wir ihr du aber oder wenn "
    "war",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec je "
    "vous nous mais ou cette son elle ont être fait comme leur très où",
    "es": "de la que el en y a los se del las un por con no una su para es al lo como más o pero sus le ha me si "
    "sin sobre este ya entre cuando todo esta ser son dos también era muy yo",
    "it": "di e il la che in a per un è del non una si le da con sono della i come al anche dei nel ma gli alla più "
    "io lo questo ha delle o suo loro era tutti",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais as dos como mas foi ao ele das tem à "
    "seu sua ou ser quando muito há nos já está eu também",
    "nl": "de van een het en in is dat op te zijn met voor niet aan er die om ook als dan maar bij nog uit door "
    "naar heeft ze hij je ik was wordt kan geen deze dit",
}
_NAMES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese", "nl": "Dutch"}
_SCRIPTS = {
    "CYRILLIC": ("ru", "Russian"),
    "GREEK": ("el", "Greek"),
    "ARABIC": ("ar", "Arabic"),
    "CJK": ("zh", "Chinese"),
    "HIRAGANA": ("ja", "Japanese"),
    "KATAKANA": ("ja", "Japanese"),
    "HANGUL": ("ko", "Korean"),
}
_WORDS = {code: frozenset(words.split()) for code, words in _COMMON.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MAX_CHARS = 20_000
_MIN_WORDS = 4


class DetectedLanguage(NamedTuple):
    """`code`: of `LANGUAGES`, of a language that is not corrected, or "unknown". `confidence` is in [0, 1]."""

    code: str
    name: str
    confidence: float

    @property
    def is_corrected(self) -> bool:
        return self.code in LANGUAGES


def detect_language(text: str, variant: str = DEFAULT) -> DetectedLanguage:
    """`variant` for English, and for texts too short to tell."""
    text = text[:_MAX_CHARS]
    if (script := _script(text)) != "LATIN":
        return DetectedLanguage(*_SCRIPTS.get(script, ("unknown", "another language")), 0.9)
    words = [word.casefold() for word in _WORD.findall(text)]
    counts = Counter({code: sum(word in common for word in words) for code, common in _WORDS.items()})
    (best, most), english = counts.most_common(1)[0], counts["en"]
    if best == "en" or most < 2 * english + _MIN_WORDS // 2 or len(words) < _MIN_WORDS:
        share = english / max(1, counts.total())
        return DetectedLanguage(variant, LANGUAGES[variant], round(0.5 + share / 2, 3))
    return DetectedLanguage(best, _NAMES[best], round(most / counts.total(), 3))


def _script(text: str) -> str:
    """The script of most letters; LATIN if there is none."""
    letters = [char for char in text if char.isalpha()][:400]
    scripts = Counter(unicodedata.name(char, "?").split()[0] for char in letters)
    script, count = scripts.most_common(1)[0] if scripts else ("LATIN", 0)
    if 2 * count <= len(letters):
        return "LATIN"
    return "HIRAGANA" if script == "CJK" and scripts["HIRAGANA"] + scripts["KATAKANA"] else script
