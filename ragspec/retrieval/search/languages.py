"""The commonest words of languages, and the language of a text by them, for the choice of a stemmer.

Counts words alone, so a short text may stay without a language. Owns no stemmer.

    >>> terms = str.split
    >>> LanguageDetector(terms).language("wo steht die alte Mühle", terms("wo steht die alte Mühle"))
    'german'
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

_BASE = "english"
COMMON_WORDS = {
    "english": "the of and to in is that it was for on are with as he his they at be this have from or had by not but "
    "what were we when your can said there an which she do how their if will up about out many then them "
    "these so some her would him has you my me does did who where why been than its must should may only other more",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus "
    "er hat dass sie nach wird bei einer um am sind noch wie einem über einen ich wir ihr du aber oder wenn "
    "was wo wann wer warum wurde wurden kann können man gibt vom zum zur beim welche welcher welches eines haben",
    "french": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec je "
    "vous nous mais ou cette son elle ont être fait comme leur très où quand quel quelle quels quelles pourquoi comment "
    "aux ces ses été peut",
    "spanish": "de la que el en y a los se del las un por con no una su para es al lo como más o pero sus le ha me si "
    "sin sobre este ya entre cuando todo esta ser son dos también era muy yo qué cuándo dónde quién cómo cuál fue hay",
    "italian": "di e il la che in a per un è del non una si le da con sono della i come al anche dei nel ma gli alla più "
    "lo questo ha delle o suo loro era tutti quando dove chi cosa perché quale nella dal dalla degli stato",
    "portuguese": "de a o que e do da em um para é não uma no se na por mais as dos como mas foi ao ele das tem à "
    "seu sua ou ser quando muito há nos já está eu também onde quem qual pela pelo são às",
    "dutch": "de van een het en in is dat op te zijn met voor niet aan er die om ook als dan maar bij nog uit door "
    "naar heeft ze hij je ik was wordt kan geen deze dit waar wanneer hoe wie wat waarom welke werd hebben",
    "swedish": "och att det som en på är av för med den till inte om ett har de jag kan men var när hur vad vem vilken "
    "varför från så eller vid under han hon sig också efter kommer finns vi ska skall blev där",
    "danish": "og at det som en på er af for med den til ikke om et har de jeg kan men hvor hvornår hvad hvem hvordan "
    "hvorfor fra så eller ved under han hun sig også efter kommer vi skal blev der var hvilken mellem",
    "norwegian": "og at det som en på er av for med den til ikke om et har de jeg kan men hvor når hva hvem hvordan "
    "hvorfor fra så eller ved under han hun seg også etter kommer vi skal ble der var hvilken mellom",
    "finnish": "ja on ei se että oli ovat hän mutta kun niin myös joka sekä tai jos olla ole kuin missä milloin mikä kuka "
    "miten miksi jotka tämä sen mukaan ollut voi ovatko onko",
    "hungarian": "a az és hogy nem egy is volt van ez meg csak de mint már el ki hol mikor mi melyik hogyan miért vagy "
    "azt ezt ha még minden kell lehet",
    "romanian": "de și în la a cu pe nu o că din un este pentru mai ce o să sunt care prin după au fost sau unde când cine "
    "cum fi dintre al ale lui această acest",
    "turkish": "ve bir bu da için ile çok olarak ne gibi daha en olan kadar sonra var değil mi ama nerede nasıl neden kim "
    "hangi nedir zaman her ya",
}
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
        return (
            best if is_clear and most >= 1 + text.isascii() and most * _MOST_WORDS_PER_COMMON >= len(distinct) else ""
        )
