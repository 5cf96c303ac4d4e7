"""Text analysis: turns texts into the terms of BM25. The same text and settings always give the same terms.

Words are runs of letters, digits and marks, in lower case, reduced to their stem by the rules of the language. Scripts that are
written without spaces have no such runs: there, each pair of neighbouring characters is a term, and each Chinese character by
itself, since one is often a word (Nie et al., On the Use of Words and N-grams for Chinese Information Retrieval, 2000).

    >>> Analyzer(AnalyzerConfig()).terms("It was raining, 雨天!")
    ['it', 'was', 'rain', '雨天', '雨', '天']
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import cache, cached_property
from typing import TYPE_CHECKING

from ragspec.config import NO_STOP_WORDS, AnalyzerConfig
from ragspec.retrieval.search.languages import COMMON_WORDS, LanguageDetector

if TYPE_CHECKING:
    import tantivy

_RULES = 1
"""Part of every analyzer's id. Raise it with any change of this file that changes terms."""

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


class Analyzer:
    """Splits texts into terms. Safe to call from several threads."""

    def __init__(self, config: AnalyzerConfig) -> None:
        self.config = config
        base = config if config.language != "auto" else config.model_copy(update={"language": "english"})
        self._words = _word_analyzer(base)
        self._ascii_words = _word_analyzer(base, is_ascii=True)
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
        return f"{self.config.language}{stop_words}/{_RULES}/{digest}"

    def terms(self, text: str, *, own_only: bool = False) -> list[str]:
        """The terms of `text` with repetitions: words in their order, then pairs of characters.

        With language "auto", the text's own stems stand first, then the English stems that are none of them; `own_only` leaves
        these out, so that a word is one term.
        """
        if text.isascii():
            return self._with_own_stems(text, self._ascii_words.analyze(text), own_only)
        text = unicodedata.normalize("NFKC", text)
        runs = _UNSPACED.findall(text)
        spaced = _UNSPACED.sub(" ", text) if runs else text
        terms = self._with_own_stems(spaced, self._words.analyze(spaced), own_only)
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
        has_stop_words = self.config.stop_words and language not in NO_STOP_WORDS
        config = self.config.model_copy(update={"language": language, "stop_words": has_stop_words})
        own = _word_analyzer(config).analyze(text)
        found = frozenset(own)
        return own if own_only else own + [term for term in english if term not in found]


@cache
def _word_analyzer(config: AnalyzerConfig, is_ascii: bool = False) -> tantivy.TextAnalyzer:
    """`is_ascii`: for such texts only; the same words in two thirds of the time."""
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
    tokenizer = tantivy.Tokenizer.simple() if is_ascii else tantivy.Tokenizer.regex(_WORD)
    builder = tantivy.TextAnalyzerBuilder(tokenizer)
    for each in filters:
        builder = builder.filter(each)
    return builder.build()
