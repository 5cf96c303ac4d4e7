"""Unicode text: combining marks, grapheme clusters, and offsets in UTF-16 code units.

Java and JavaScript count the characters of a string in UTF-16 code units.

    >>> Utf16Offsets("a\\U0001f600b").units(2)
    3
"""

from __future__ import annotations

import functools
import re
import unicodedata
from bisect import bisect_left

_END_OF_MARKS = 0x20000
_JOINERS = "\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"  # and variation selectors, skin tones, tags
_WIDE = re.compile("[\U00010000-\U0010ffff]")


@functools.cache
def combining_marks() -> str:
    """All combining marks, for use inside the brackets of a regular expression: `re` has no class for them."""
    codes = [c for c in range(_END_OF_MARKS) if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me")]
    firsts = [c for c, before in zip(codes, [-1, *codes], strict=False) if c != before + 1]
    lasts = [c for c, after in zip(codes, [*codes[1:], -1], strict=True) if c != after - 1]
    return _JOINERS + "".join(f"{chr(first)}-{chr(last)}" for first, last in zip(firsts, lasts, strict=True))


@functools.cache
def grapheme_pattern() -> str:
    """A regular expression for one grapheme cluster: a letter with its marks, a flag, an emoji of several parts."""
    mark, flag = f"[{combining_marks()}]", "[\U0001f1e6-\U0001f1ff]"
    return rf"(?:{flag}{{2}}|.{mark}*+(?:(?<=\u200d)\S{mark}*+)*+)"


class Utf16Offsets:
    """Offsets in one text."""

    def __init__(self, text: str) -> None:
        self._wide = [match.start() for match in _WIDE.finditer(text)]

    def units(self, index: int) -> int:
        """The number of UTF-16 code units before character `index`."""
        return index + bisect_left(self._wide, index)
