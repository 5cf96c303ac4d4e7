"""Inline notation that every reader writes alike: superscripts, subscripts, footnote marks and the numbers of list items.

>>> scripted("6", "10", "superscript"), scripted("1", "the mill", "superscript"), list_number(4, "lowerRoman")
('⁶', '[1]', 'iv')
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SUPERSCRIPTS = str.maketrans(
    "0123456789+-−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW′",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ′",
)
_SUBSCRIPTS = str.maketrans("0123456789+-−=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_ORDINALS = frozenset("st nd rd th er re e ème eme ère ers es o a os as".split())
_ENDINGS = frozenset("me mes lle lles gr r ie ve tm sm".split())
_ABBREVIATED = re.compile(r"(?:\b[A-ZÉ]|\b[Nn])\Z")
"""Text before the raised end of a word: "M" of "Mme", "n" of "no"."""

_NOTE = re.compile(r"\d{1,3}(?:\s*[,;]\s*\d{1,3})*|[a-z]")
_NOTED = re.compile(r"[^\W\d_]{4,}\Z|[.,;:!?”’\"»]\Z")
"""Text before a footnote mark: a word that is longer than a unit or the name of a function, or the end of a sentence."""

_LENGTH = re.compile(r"(?:met(?:er|re)|feet|foot|inch|mile|yard|second)(?:s|es)?\Z", re.IGNORECASE)
_MAX_SCRIPT_CHARS = 12
_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_ROMAN_SIGNS = "m cm d cd c xc l xl x ix v iv i".split()
_MAX_ROMAN = 4999


def scripted(text: str, before: str, script: str, is_link: bool = False) -> str:
    """Text as it is written in the line. `before`: the text to its left. `is_link`: it points to a footnote.

    `script` "superscript": an exponent becomes Unicode signs or `^(...)`, a footnote mark stands in brackets, an ordinal's ending
    stays as it is. "subscript": Unicode signs or `_(...)`. Any other: the text as it is.
    """
    content = " ".join(text.split())
    if not content or script not in ("superscript", "subscript"):
        return text
    found = _superscript(content, before, is_link) if script == "superscript" else _subscript(content, before)
    return f"{found} " if text[-1].isspace() else found


def _superscript(text: str, before: str, is_link: bool) -> str:
    if not any(map(str.isalnum, text)) or text[0] == "[" or _ends_word(text.lower(), before):
        return text
    is_power = text in ("2", "3") and _LENGTH.search(before[-12:])
    if _NOTE.fullmatch(text) and (is_link or (_NOTED.search(before[-8:]) and not is_power)):
        return f"[{text}]"
    return _script(text, before, _SUPERSCRIPTS, "^")


def _ends_word(text: str, before: str) -> bool:
    """Whether raised letters end an ordinal number or an abbreviation."""
    if before[-1:].isdigit():
        return text in _ORDINALS
    return text in ("tm", "sm") or (text in _ENDINGS and _ABBREVIATED.search(before[-4:]) is not None)


def _subscript(text: str, before: str) -> str:
    return _script(text, before, _SUBSCRIPTS, "_") if any(map(str.isalnum, text)) else text


def _script(text: str, before: str, signs: Mapping[int, int | str | None], mark: str) -> str:
    if len(text) > _MAX_SCRIPT_CHARS:  # small print
        return text if not before or before[-1].isspace() else f" {text}"
    if all(ord(character) in signs for character in text):
        return text.translate(signs)
    return f"{mark}{text}" if text.isalnum() and text.isascii() else f"{mark}({text})"


def list_number(number: int, style: str) -> str:
    """A number in a style that HTML or Word names: "decimal", "lowerLetter" or "a", "upperRoman" or "I"."""
    if style in ("a", "A", "lowerLetter", "upperLetter") and number > 0:
        found = _letters(number)
    elif style in ("i", "I", "lowerRoman", "upperRoman") and 0 < number <= _MAX_ROMAN:
        found = _roman(number)
    else:
        return f"{number:02d}" if style == "decimalZero" else str(number)
    return found.upper() if style[0] in "AIu" else found


def _letters(number: int) -> str:
    found = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        found = chr(ord("a") + letter) + found
    return found


def _roman(number: int) -> str:
    found = ""
    for value, sign in zip(_ROMAN_VALUES, _ROMAN_SIGNS, strict=True):
        found += sign * (number // value)
        number %= value
    return found
