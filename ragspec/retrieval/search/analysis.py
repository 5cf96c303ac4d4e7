"""Text analysis: turns texts into the terms of BM25. The same text and settings always give the same terms.

Words are runs of letters, digits and marks, in lower case, reduced to their stem by the rules of the language. Scripts that are
written without spaces have no such runs: there, each pair of neighbouring characters is a term, and each Chinese character by
itself, since one is often a word (Nie et al., On the Use of Words and N-grams for Chinese Information Retrieval, 2000). The
language of a text, which chooses the stemmer, is told by the commonest words of languages, so a short text may have none.

    >>> Analyzer(AnalyzerConfig()).terms("It was raining, 雨天!")
    ['it', 'was', 'rain', '雨天', '雨', '天']
"""

from __future__ import annotations

import hashlib
import re
import tomllib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.retrieval_config import NO_STOP_WORDS, AnalyzerConfig

_BASE = "english"
COMMON_WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_name("common_words.toml").read_text(encoding="utf-8"))
"""By language."""

_SCRIPTS = {
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "russian": "\u0400-\u052f",
    "arabic": "\u0620-\u06ff",
    "tamil": "\u0b80-\u0bff",
}
"""Letters of languages that are known by them, and of their neighbours, for which there is no stemmer."""

_SCRIPT = re.compile("|".join(f"(?P<{language}>[{letters}]+)" for language, letters in _SCRIPTS.items()))
_MOST_WORDS_PER_COMMON = 8


class LanguageDetector:
    """Tells a text's language by its terms, which `terms` of a text in any language returns."""

    def __init__(self, terms: Callable[[str], Sequence[str]]) -> None:
        """Left out: words that English shares with another language, and single letters of programs and formulas."""
        found = defaultdict[str, list[str]](list)
        for language, words in COMMON_WORDS.items():
            for term in frozenset(terms(words)):
                found[term].append(language)
        telling = {term: own for term, own in found.items() if len(term) > 1 and (own == [_BASE] or _BASE not in own)}
        self._english = frozenset(term for term, own in telling.items() if own == [_BASE])
        self._languages_of = {term: own for term, own in telling.items() if own != [_BASE]}
        self._others = frozenset(self._languages_of)

    def language(self, text: str, terms: Sequence[str]) -> str:
        """A language other than English, or "" if the text is English or gives no evidence.

        Among its distinct terms must be more of the language's commonest than of any other's, more than three times as many as of
        English, and one in eight; in ASCII at least two, since one may be a name's ("Los Angeles"). Every word counts in a script
        of one language.
        """
        distinct = frozenset(terms)
        found = distinct & self._others
        if text.isascii() and len(found) < 2:  # Why: most sentences are English, and cost only this
            return ""
        counts = Counter(language for term in found for language in self._languages_of[term])
        if not text.isascii():
            counts.update(match.lastgroup for match in _SCRIPT.finditer(text) if match.lastgroup)
        (best, most), (_, second) = [*counts.most_common(2), ("", 0), ("", 0)][:2]
        is_clear = most > second and most > 3 * len(distinct & self._english)
        is_common = most >= 1 + text.isascii() and most * _MOST_WORDS_PER_COMMON >= len(distinct)
        return best if is_clear and is_common else ""


if TYPE_CHECKING:
    import tantivy

RULES = 4
"""The rules of a new index, part of every analyzer's id. A change of terms needs a new number, and the old rules stay here:
an index is searched and added to by the rules in its manifest. Rules 2 remove invisible characters, and fold İ to i. By rules 3
a number with dots, such as a version, is a term beside its parts. By rules 4 common words of a language are known
(`Analyzer.common_terms`); the terms are the same."""

_INVISIBLE = (
    "\u00ad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff"
)
_REMOVED = re.compile(f"[{_INVISIBLE}]+")
"""Soft hyphens, zero-width spaces and joiners, marks of direction, variation selectors: they split words or make them unequal."""

_FOLDED = {"dutch", "english", "french", "italian", "portuguese", "romanian", "spanish"}
"""Languages in which writers often omit accents, so accents are removed; elsewhere å is a letter of its own."""

_MAX_TERM_BYTES = 100

_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u3096\u3099-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
_HANGUL = "\u1100-\u11ff\u3131-\u318e\ua960-\ua97c\uac00-\ud7a3\ud7b0-\ud7fb"
_THAI_LAO_MYANMAR_KHMER = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u1000-\u103f\u1050-\u109f\u1780-\u17d3"
_UNSPACED = re.compile(f"[{_HAN}{_KANA}{_HANGUL}{_THAI_LAO_MYANMAR_KHMER}]+")
_IDEOGRAPH = re.compile(f"[{_HAN}]")
_PROBE = (
    "Ponies were running quickly; it's THE 3rd happiness of organisations' élèves, naïve generously dying in 1874. Die Häuser "
    "liefen, les chevaux mangeaient, los niños cantaban, हिन्दी भाषा, 今日は雨天です, 한국어 문장, ภาษาไทย, snake_case v2.0 e-mail"
)
_SCRIPT_PROBES = ("Τα βιβλία των παιδιών", "книги читались детьми", "الكتب والمدارس", "புத்தகங்கள் வீடுகள்")
_WORD = r"[\p{Alphabetic}\p{M}\p{N}]+"  # Why not tantivy's simple tokenizer: it splits हिन्दी at its virama
_ASCII_RUN = re.compile(r"[^\x00-/:-@\[-`{-\x7f]+")
_DOTTED_NUMBER = re.compile(r"(?<![\d.])\d+(?:\.\d+)+(?!\.?\d)", re.ASCII)
_WORDS_KEPT, _LONGEST_KEPT = 65_536, 64


class Analyzer:
    """Splits texts into terms. Safe to call from several threads."""

    def __init__(self, config: AnalyzerConfig, rules: int = RULES) -> None:
        """`rules`: of the index, see `rules_of`."""
        self.config, self.rules = config, rules
        base = config if config.language != "auto" else config.model_copy(update={"language": "english"})
        self._words = _word_analyzer(base)
        # a language is known by its stop words
        self._whole = _word_analyzer(base.model_copy(update={"stop_words": False}))
        self._detector = LanguageDetector(self._whole.analyze) if config.language == "auto" else None

    @cached_property
    def id(self) -> str:
        """Names the settings, the rules and the terms of a fixed text, which reveal a library that behaves differently.

        Why not the library's version: an index would have to be rebuilt after every update.
        """
        stop_words = "+stop" if self.config.stop_words else ""
        probes = [_PROBE]
        if self.config.language == "auto":
            probes += [f"{words} {_PROBE}" for words in COMMON_WORDS.values()] + [*_SCRIPT_PROBES]
        terms = [term for probe in probes for term in self.terms(probe)]
        digest = hashlib.sha256("\n".join(terms).encode()).hexdigest()[:12]
        return f"{self.config.language}{stop_words}/{self.rules}/{digest}"

    def terms(self, text: str, *, own_only: bool = False) -> list[str]:
        """The terms of `text` with repetitions: words in their order, then numbers with dots, then pairs of characters.

        With language "auto", the text's own stems stand first, then the English stems that are none of them; `own_only` leaves
        these out, so that a word is one term.
        """
        if not text.isascii():
            text = _normalized(text, self.rules)
        runs = [] if text.isascii() else _UNSPACED.findall(text)
        spaced = _UNSPACED.sub(" ", text) if runs else text
        terms = self._with_own_stems(spaced, self._words.analyze(spaced), own_only)
        if self.rules > 2:
            terms += _DOTTED_NUMBER.findall(spaced)
        for run in runs:
            terms += [run[i : i + 2] for i in range(max(1, len(run) - 1))]
            if len(run) > 1:
                terms += _IDEOGRAPH.findall(run)
        return terms

    def _with_own_stems(self, text: str, english: list[str], own_only: bool) -> list[str]:
        if self._detector is None:
            return english
        language = self._detector.language(text, self._whole.analyze(text) if self.config.stop_words else english)
        if not language:
            return english
        own = _word_analyzer(self._config_of(language)).analyze(text)
        found = frozenset(own)
        return own if own_only else own + [term for term in english if term not in found]

    def common_terms(self, text: str) -> frozenset[str]:
        """The terms of the commonest words of the text's language, none by rules before 4."""
        if self.rules < 4:
            return frozenset()
        language: str = self.config.language
        if self._detector is not None:
            language = self._detector.language(text, self._whole.analyze(text)) or _BASE
        return _common_terms(self._config_of(language))

    def _config_of(self, language: str) -> AnalyzerConfig:
        has_stop_words = self.config.stop_words and language not in NO_STOP_WORDS
        return self.config.model_copy(update={"language": language, "stop_words": has_stop_words})


@cache
def _common_terms(config: AnalyzerConfig) -> frozenset[str]:
    return frozenset(_word_analyzer(config).analyze(COMMON_WORDS.get(config.language, "")))


def rules_of(analyzer_id: str) -> int:
    """The rules that an analyzer's id names; today's if this version knows no such rules, so that the ids differ."""
    found = analyzer_id.split("/")[1:2]
    return next((rules for rules in range(1, RULES) if found == [str(rules)]), RULES)


def _normalized(text: str, rules: int) -> str:
    if rules == 1:
        return unicodedata.normalize("NFKC", text)
    return unicodedata.normalize("NFKC", _REMOVED.sub("", text)).replace("İ", "i")


class _WordAnalyzer(dict[str, list[str]]):
    """The terms of the latest words. A word ends at ASCII punctuation or white space, and the tokenizer may cut it further."""

    def __init__(self, analyzer: tantivy.TextAnalyzer) -> None:
        super().__init__()
        self._analyzer = analyzer

    def analyze(self, text: str) -> list[str]:
        return list(chain.from_iterable(map(self.__getitem__, _ASCII_RUN.findall(text))))

    def __missing__(self, word: str) -> list[str]:
        terms = self._analyzer.analyze(word)
        if len(word) <= _LONGEST_KEPT:
            if len(self) >= _WORDS_KEPT:
                self.clear()
            self[word] = terms
        return terms


@cache
def _word_analyzer(config: AnalyzerConfig) -> _WordAnalyzer:
    import tantivy  # Why here: training and evaluation import this module without it

    filters = [tantivy.Filter.remove_long(_MAX_TERM_BYTES), tantivy.Filter.lowercase()]
    if config.stop_words:
        filters.append(tantivy.Filter.stopword(config.language))
    if config.language == "english":  # the English stemmer knows no accents; other stemmers need them
        filters.append(tantivy.Filter.ascii_fold())
    if config.language != "none":
        filters.append(tantivy.Filter.stemmer(config.language))
    if config.language in _FOLDED:
        filters.append(tantivy.Filter.ascii_fold())
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(_WORD))
    for each in filters:
        builder = builder.filter(each)
    return _WordAnalyzer(builder.build())
