"""Whether a sentence restates another: its words stand there, in order, and what it leaves out changes nothing.

Owns the words that may be left out and those that may not. A rule: it knows no grammar, and refuses where it cannot tell.

    >>> restates(words_of("The mill, which is old, opens at nine."), content_words(words_of("The mill opens at nine")))
    True
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ragspec.rag.citations import IDEOGRAPHS

_TOKEN = re.compile(
    r"[A-Za-z_][A-Za-z0-9_.]*\([!-'*-~\s]+\)"  # the call of a function: its arguments are no remark in brackets
    r"|(?:(?<![\w.)])[-−+])?[$€£]?\d+(?:[.,:/]\d+)*(?:st|nd|rd|th\b)?%?"
    rf"|[{IDEOGRAPHS}]"
    rf"|(?:(?![{IDEOGRAPHS}])\w)+(?:[.'’_/-]+(?:(?![{IDEOGRAPHS}])\w)+)*[+#]*"
    r"|[<>=≤≥≠!]+|[%;()]|,"
)
_FUNCTION = frozenset(
    "a an the is are was were be been being it its this that these those there he she they do does did also , ( )".split()
)
"""Words that a sentence may hold without its source, and the other way round."""
_NEGATION_WORDS = (
    "not no never none nor neither nobody nothing nowhere without cannot hardly scarcely barely rarely seldom false falsely "
    "untrue incorrect incorrectly wrongly myth deny denies denied denying doubt doubts doubted refuse refuses refused fail "
    "fails failed failing lack lacks lacked lacking alleged allegedly claimed supposedly if unless except "
    "nicht kein keine keinen keiner nie niemals ohne ne pas jamais sans aucun aucune nunca sin ningún non mai senza niet geen "
    "não nem nenhum nenhuma sem не ни нет без никогда inte aldrig utan ikke aldri aldrig uden ei eivät ilman nu nici fără değil "
    "yok δεν δε μη μην όχι ποτέ χωρίς لا ليس ليست لم لن नहीं 不 没 沒 未 无 無 非 勿 안 못 않"
)
"""Words of a clause that no sentence may leave out."""
_BOUNDARIES = frozenset(
    "and or but who whom whose which where when while because although though as than then before after until since for from "
    "to into of by with between ; may might could would should must can will only almost nearly about approximately around "
    "least most more less fewer up over under partly partially und oder aber et ou mais y o pero".split()
)
"""Words that may not be left out between words that both texts have."""
_CONDITIONS = frozenset(("if", "unless", "because"))
"""Words of a clause of which no end may be left out: a condition of two is another condition."""
_CLAUSE_ENDS = frozenset("; but while whereas although though".split())
_MAX_LEFT_OUT = 2


class Word(NamedTuple):
    """A word in the form that is compared. `is_fact`: a number, or a name in the middle of its sentence."""

    text: str
    is_fact: bool


def words_of(text: str) -> list[Word]:
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    text = re.sub(
        r"\b(ca|wo)n't\b", lambda match: {"ca": "can", "wo": "will"}[match[1].lower()] + " not", text, flags=re.I
    )
    text = re.sub(r"\ba (few|little)\b", r"a-\1", text, flags=re.IGNORECASE)  # Why: few is the opposite of a few
    text = re.sub(r"\bcannot\b", "can not", text.replace("n't", " not"), flags=re.IGNORECASE)
    words = []
    for number, token in enumerate(_TOKEN.findall(text)):
        token = token.removesuffix("'s").removesuffix("'")
        is_name = number > 0 and token[:1].isupper() and token != "I"
        is_number = any(character.isdigit() for character in token)
        words.append(Word(_form(token), is_name or is_number))
    return words


def _form(token: str) -> str:
    """Lower case, without the commas of numbers and the s of plurals and verbs."""
    lower = token.casefold()
    if lower[:1].isdigit():
        return lower.replace(",", "")
    is_plain = len(lower) > 3 and lower.isalpha() and not lower.endswith(("ss", "us", "is"))
    return lower.removesuffix("s") if is_plain else lower


_NEGATIONS = frozenset(words_of(word)[-1].text for word in _NEGATION_WORDS.split())
"""As they are compared: casefolding and tokens change some of them."""


def is_negation(text: str) -> bool:
    """Why beginnings: Korean verbs carry their negation."""
    return text in _NEGATIONS or text.startswith(("않", "못"))


def content_words(words: Sequence[Word]) -> list[str]:
    """The words that a source must hold."""
    return [word.text for word in _said(words)]


def restates(source: Sequence[Word], wanted: Sequence[str]) -> bool:
    """Whether the wanted words stand in the source, in order, and what is left out between them changes nothing."""
    texts = [word.text for word in source]
    if not set(wanted) <= set(texts):
        return False
    for first in [index for index, text in enumerate(texts) if text == next(iter(wanted), None)]:
        try:
            places = _places(texts, wanted, first)
        except ValueError:
            return False  # a later first place leaves fewer words behind it
        # Why twice: the first places of the words, and the last ones, may leave different words out
        if _is_whole(source, places) or _is_whole(source, _last_places(texts, places)):
            return True
    return False


def _places(texts: Sequence[str], wanted: Sequence[str], at: int) -> list[int]:
    """The earliest places of the wanted words, in order. Raises: ValueError if a word is missing."""
    places = [at]
    for word in wanted[1:]:
        places.append(at := texts.index(word, at + 1))
    return places


def _last_places(texts: Sequence[str], places: Sequence[int]) -> list[int]:
    """The same words as late as possible, before the same last word."""
    latest = [places[-1]]
    for place in reversed(places[:-1]):
        latest.append(next(i for i in range(latest[-1] - 1, -1, -1) if texts[i] == texts[place]))
    return latest[::-1]


def _is_whole(source: Sequence[Word], places: Sequence[int]) -> bool:
    """Whether the words at these places may stand without the others of their clause."""
    texts, taken = [word.text for word in source], set(places)
    left, right = places[0], places[-1] + 1
    while left > 0 and texts[left - 1] not in _CLAUSE_ENDS:
        left -= 1
    while right < len(texts) and texts[right] not in _CLAUSE_ENDS:
        right += 1
    if any(is_negation(texts[i]) for i in range(left, right) if i not in taken):
        return False
    if any(texts[i] in _CONDITIONS for i in places) and _said(source[places[-1] + 1 : right]):
        return False
    return all(_may_be_left_out(source[one + 1 : other]) for one, other in pairwise(places))


def _may_be_left_out(gap: Sequence[Word]) -> bool:
    """A remark in brackets or between commas, or at most two words that join nothing and name nothing."""
    texts = [word.text for word in gap]
    if len(gap) > 1 and (texts[0], texts[-1]) in ((",", ","), ("(", ")")):
        return "," not in texts[1:-1] and "(" not in texts[1:-1]
    said = _said(gap)
    return len(said) <= _MAX_LEFT_OUT and not any(word.is_fact or word.text in _BOUNDARIES for word in said)


def _said(words: Sequence[Word]) -> list[Word]:
    return [word for word in words if word.text not in _FUNCTION]
