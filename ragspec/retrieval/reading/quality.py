"""Measures whether a text reads as language or as garbage, such as a PDF's codes of letters.

>>> garbage_share("7KH RSHQLQJ KRXUV") > MOST_GARBAGE
True
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from string import ascii_lowercase

MOST_GARBAGE = 0.4
_WORD = re.compile(r"[^\W\d_]{3,}")
_MAX_LETTERS = 24
_LEAST_LETTERS = 60
"""A text of fewer letters counts as one of so many: a single odd word makes no garbage."""

_MOST_UNKNOWN = 0.25
_FOLLOWERS = (
    "abcdefghijklmnopqrstuvwyz abegilorsuy acehijklorstuyz abdefiklnorstuvwyz "
    "abcdefghijklmnoprstuvwxyz adefilorstu adeghilnorstu aeilmnorstuwy abcdefgijklmnopqrstuvwz "
    "acdefkmnosu aeiklnorstuvwy abcdeghijklmnopstuvy abdeilmnopstuy abcdefghiklnoprstuvwyz "
    "abcdefghijklmnopqrstuvwyz aefhiloprstu u abcdefghiklmnoprstuvwyz abcdefghijklmnoprstuvwyz "
    "abceghijklnorstuvwyz abcdefghijklmnoprstuvwz aeilnorsv acehiknosuy aceiopt abcdegjklmnprstwz "
    "abcdegiklmnotuwyz "
).split()
"""For each letter from a to z: the letters that often follow it in the words of one of ten European languages.

Of their words at most 1.1 % have more unknown pairs than a quarter; of the same words with shifted letters 68 % to 87 %.
"""

_KNOWN = frozenset(
    first + second for first, seconds in zip(ascii_lowercase, _FOLLOWERS, strict=True) for second in seconds
)
_UNREADABLE = frozenset({"Cc", "Co", "Cn"})


def garbage_share(text: str) -> float:
    """The larger of two shares: of letters in implausible words, and of control, private-use and replacement characters."""
    characters = [character for character in text if not character.isspace()]
    num_unreadable = sum(each == "\ufffd" or unicodedata.category(each) in _UNREADABLE for each in characters)
    words = _WORD.findall(text)
    num_implausible = sum(len(word) for word in words if _is_implausible(word))
    num_letters = max(_LEAST_LETTERS, sum(map(len, words)))
    return max(num_unreadable / max(1, len(characters)), num_implausible / num_letters)


def _is_implausible(word: str) -> bool:
    """Too long, or too many unknown pairs of letters. Words of other scripts than Latin have no pairs."""
    letters = [each for each in unicodedata.normalize("NFKD", word.lower()) if "a" <= each <= "z"]
    if len(letters) < len(word) / 2:
        return False
    pairs = ["".join(pair) for pair in itertools.pairwise(letters)]
    num_unknown = sum(pair not in _KNOWN for pair in pairs)
    return len(letters) > _MAX_LETTERS or num_unknown > _MOST_UNKNOWN * len(pairs)
