"""Inline notation that every reader writes alike: superscripts, footnote marks, numbers of list items, and formulas.

>>> scripted("6", "10", "superscript"), scripted("1", "the mill", "superscript"), list_number(4, "lowerRoman")
('⁶', '[1]', 'iv')
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SUPERSCRIPTS = str.maketrans(
    "0123456789+-−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVW′∘",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂ′°",
)
_SUBSCRIPTS = str.maketrans("0123456789+-−=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_ORDINALS = frozenset("st nd rd th er re e ème eme ère ers es o a os as".split())
_ENDINGS = frozenset("me mes lle lles gr r ie ve tm sm".split())
_ABBREVIATED = re.compile(r"(?:\b[A-ZÉ]|\b[Nn])\Z")
"""Text before the raised end of a word: "M" of "Mme", "n" of "no"."""

_NOTE = re.compile(r"\d{1,3}(?:\s*[,;]\s*\d{1,3})*|[a-z]")
_NOTED = re.compile(r"[^\W\d_]{4,}\Z|[.,;:!?”’\"»]\Z")
"""Text before a footnote mark: a word that is longer than a unit or the name of a function, or the end of a sentence."""

WORD_FORMULA = "{http://schemas.openxmlformats.org/officeDocument/2006/math}oMath"
"""The tag of a formula in files of Microsoft Office."""

_LENGTH = re.compile(r"(?:met(?:er|re)|feet|foot|inch|mile|yard|second)(?:s|es)?\Z", re.IGNORECASE)
_MAX_SCRIPT_CHARS = 12
_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_ROMAN_SIGNS = "m cm d cd c xc l xl x ix v iv i".split()
_MAX_ROMAN = 4999

_APART = "\x1f"
"""Around names, fractions and the like: a space is written if letters or digits stand on both sides."""

_NEEDED_SPACE = re.compile(f"(?<=[\\w)\\]]){_APART}+(?=[\\w√])")
_FACTOR = re.compile(r"\d[\d.,]*|\x1f\w+\x1f|[d∂Δ]?[^\W\d][¹²³ʰ-ʸᵃ-ᵿ⁰-₟]*|\([^()]*\)")
"""A denominator that needs no parentheses."""

_ATOM = re.compile(r"[^\s\x1f+\-−±·×⋅*/=<>≤≥,;:|]+|\([^()]*\)")
_LEFT_OUT = frozenset("annotation annotation-xml mphantom mprescripts none del moveFrom".split())
_INVISIBLE = str.maketrans({"\u2061": _APART, "\u2062": "", "\u2063": ",", "\u2064": _APART})
_ACCENTS = dict(zip("¯‾→^ˆ~˜˙.", "\u0304\u0304\u20d7\u0302\u0302\u0303\u0303\u0307\u0307", strict=True))
_NO_BAR = frozenset({"0", "0px", "0pt", "0em"})


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
    if text in ("+", "-", "−"):
        return _high(text)
    if not any(map(str.isalnum, text)) or text[0] == "[" or _ends_word(text.lower(), before):
        return text
    is_power = text in ("2", "3") and _LENGTH.search(before[-12:])
    if _NOTE.fullmatch(text) and (is_link or (_NOTED.search(before[-8:]) and not is_power)):
        return f"[{text}]"
    return _small_print(text, before) or _high(text)


def _ends_word(text: str, before: str) -> bool:
    """Whether raised letters end an ordinal number or an abbreviation."""
    if before[-1:].isdigit():
        return text in _ORDINALS
    return text in ("tm", "sm") or (text in _ENDINGS and _ABBREVIATED.search(before[-4:]) is not None)


def _subscript(text: str, before: str) -> str:
    return _small_print(text, before) or _low(text) if any(map(str.isalnum, text)) else text


def _small_print(text: str, before: str) -> str:
    """A long text as it is, apart from the text to its left; empty for a short one."""
    if len(text) <= _MAX_SCRIPT_CHARS:
        return ""
    return text if not before or before[-1].isspace() else f" {text}"


def _high(text: str) -> str:
    """A superscript as Unicode signs or `^(...)`."""
    return _script(text.replace(_APART, ""), _SUPERSCRIPTS, "^")


def _low(text: str) -> str:
    """A subscript as Unicode signs or `_(...)`."""
    return _script(text.replace(_APART, ""), _SUBSCRIPTS, "_")


def _script(text: str, signs: Mapping[int, int | str | None], mark: str) -> str:
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


def formula_text(formula: Any) -> str:
    """A formula on one line: fractions with a stroke, roots with their sign, scripts as `inline` writes them."""
    try:
        text = _line(formula)
    except (RecursionError, IndexError, TypeError):  # nested too deeply, or parts are missing
        text = " ".join(formula.itertext())
    return " ".join(_NEEDED_SPACE.sub(" ", text).replace(_APART, "").split())


def _line(element: Any) -> str:
    name = _local_name(element)
    if name in _LEFT_OUT:
        return ""
    if name in _FORMS:
        return _FORMS[name](element, [_line(each) for each in _children(element)])
    if len(element):
        return "".join(map(_line, _children(element)))
    text = (element.text or "").translate(_INVISIBLE)
    text = text if name == "t" else text.strip(" \t\r\n")
    return f"{_APART}{text}{_APART}" if name == "mtext" or (name == "mi" and len(text) > 1) else text


def _children(element: Any) -> list[Any]:
    """Without comments, and without the properties of Word's elements."""
    return [each for each in element if isinstance(each.tag, str) and not _local_name(each).endswith("Pr")]


def _local_name(element: Any) -> str:
    name: str = element.tag
    return re.split("[}:]", name)[-1]


def _property(element: Any, name: str, default: str) -> str:
    """A property of one of Word's elements."""
    found = [each for properties in element for each in properties if _local_name(each) == name]
    return str(next(iter(found[0].attrib.values()), "")) if found else default


def _grouped(text: str) -> str:
    text = text.strip(_APART)
    return text if len(text) < 2 or _ATOM.fullmatch(text) else f"({text})"


def _with_scripts(base: str, sub: str = "", sup: str = "") -> str:
    written = _grouped(base) + _low(sub) + _high(sup)
    return written if base[-1:].isalnum() else f"{_APART}{written}{_APART}"


def _accented(base: str, over: str) -> str:
    """With an accent over a letter; a brace or line over more is left out."""
    if any(map(str.isalnum, over)):
        return _with_scripts(base, sup=over)
    accent = _ACCENTS.get(over, over if unicodedata.combining(over[:1] or " ") else "")
    return base + accent if len(base) == 1 else base


def _fraction(element: Any, parts: Sequence[str]) -> str:
    over, under = _grouped(parts[0]), parts[1].strip(_APART)
    if not _FACTOR.fullmatch(parts[1]):
        under = f"({under})"
    has_bar = element.get("linethickness") not in _NO_BAR and _property(element, "type", "") != "noBar"
    return f"{_APART}{over}/{under}{_APART}" if has_bar else f"{_APART}{over} choose {under}{_APART}"


def _root(radicand: str, degree: str = "") -> str:
    return f"{_APART}{_high(degree)}√{_grouped(radicand)}{_APART}"


def _many_scripts(element: Any, parts: Sequence[str]) -> str:
    names = [_local_name(each) for each in _children(element)]
    place = names.index("mprescripts") if "mprescripts" in names else len(names)
    before, after = parts[place + 1 :], parts[1:place]
    lead = "".join(_low(sub) + _high(sup) for sub, sup in zip(before[::2], before[1::2], strict=False))
    return lead + _with_scripts(parts[0], "".join(after[::2]), "".join(after[1::2]))


def _fenced(element: Any, parts: Sequence[str]) -> str:
    signs = (element.get("open", "("), element.get("separators", ",")[:1], element.get("close", ")"))
    return str(signs[0] + signs[1].join(parts) + signs[2])


def _word_fenced(element: Any, parts: Sequence[str]) -> str:
    inner = _property(element, "sepChr", "|").join(parts)
    return _property(element, "begChr", "(") + inner + _property(element, "endChr", ")")


def _sum(element: Any, parts: Sequence[str]) -> str:
    return _with_scripts(_property(element, "chr", "∫"), parts[0], parts[1]) + _APART + parts[2]


_FORMS: dict[str, Callable[[Any, Sequence[str]], str]] = {
    "msqrt": lambda _, parts: _root("".join(parts)),
    "mroot": lambda _, parts: _root(*parts),
    "rad": lambda _, parts: _root(parts[-1], *parts[:-1]),
    "munder": lambda _, parts: _with_scripts(*parts) if any(map(str.isalnum, parts[1])) else parts[0],
    "mover": lambda _, parts: _accented(*parts),
    "acc": lambda element, parts: _accented(parts[0], _property(element, "chr", "\u0302")),
    "bar": lambda _, parts: _accented(parts[0], "¯"),
    "sPre": lambda _, parts: _low(parts[0]) + _high(parts[1]) + parts[2],
    "func": lambda _, parts: _APART.join(["", *parts]),
    "mmultiscripts": _many_scripts,
    "mfenced": _fenced,
    "d": _word_fenced,
    "nary": _sum,
    **dict.fromkeys(("mfrac", "f"), _fraction),
    **dict.fromkeys("msub sSub msubsup sSubSup munderover limLow".split(), lambda _, parts: _with_scripts(*parts)),
    **dict.fromkeys("msup sSup limUpp".split(), lambda _, parts: _with_scripts(parts[0], sup=parts[1])),
    **dict.fromkeys("mtr mr".split(), lambda _, parts: " ".join(parts)),
    **dict.fromkeys("mtable m eqArr".split(), lambda _, parts: "; ".join(parts)),
}
"""By the names of MathML's elements and of Word's: a line from the lines of an element's parts."""
